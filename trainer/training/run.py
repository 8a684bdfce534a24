"""One training run from start or checkpoint to its last step."""

from __future__ import annotations

import logging
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger

from trainer.data.corpus import Corpus
from trainer.data.dataset import Batch, as_batch, held_out_windows
from trainer.model.decoder import Decoder
from trainer.report.progress import Progress
from trainer.training.callbacks.checkpointing import Checkpointing
from trainer.training.callbacks.drop import Drop
from trainer.training.callbacks.metrics import Metrics
from trainer.training.checkpoints import check_same_shape, newest_checkpoint, read_checkpoint
from trainer.training.config import RunConfig
from trainer.training.data_module import TrainingData
from trainer.training.loggers import other_loggers
from trainer.training.metrics_file import MetricsFile
from trainer.training.module import LanguageModule, make_decoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its model, what its drop did (empty without one), and the seconds spent in
    this process."""

    model: Decoder
    effect: dict[str, Any]
    seconds: float


def device_problems(config: RunConfig) -> list[str]:
    """What this machine cannot do of what the configuration asks for, one sentence each."""
    from trainer.model.backends import backend_problem

    gpu = torch.cuda.is_available()
    found = []
    if config.trainer.accelerator == "gpu" and not gpu:
        found.append("trainer.accelerator: 'gpu', but torch sees no GPU; choose 'auto' or 'cpu'.")
    uses_gpu = gpu and config.trainer.accelerator != "cpu"
    if uses_gpu and config.trainer.precision == "bf16" and not torch.cuda.is_bf16_supported(False):
        found.append(
            "trainer.precision: 'bf16' is not supported by this GPU "
            f"({torch.cuda.get_device_name()}); use 'fp32'."
        )
    if problem := backend_problem(config.model.attention_backend, "cuda" if uses_gpu else "cpu"):
        found.append(problem)
    return found


def set_threads(config: RunConfig) -> None:
    """Use ``trainer.threads`` CPU threads, or one a core."""
    torch.set_num_threads(config.trainer.threads or os.cpu_count() or 1)


def train(config: RunConfig, corpus: Corpus, branch: Path | None = None) -> TrainedRun:
    """Train to ``trainer.max_steps``, from the newest checkpoint of ``run_dir`` where there is one.

    Args:
        config: the run.
        corpus: its text.
        branch: where the run has no checkpoint yet, the checkpoint of another run to go on from,
            with that run's metrics up to it.

    Raises:
        UserError: the checkpoint does not fit the model, or the backend cannot run here.
    """
    run_dir = Path(config.run_dir)
    model = make_decoder(config, corpus.tokenizer.get_vocab_size())
    start = newest_checkpoint(run_dir) or branch
    step = 0
    if start is not None:
        contents = read_checkpoint(start)
        check_same_shape(contents, model, start.name)
        step = contents["unrope"]["step"]
        log.info("Resuming from %s (step %d)", start.name, step)
    metrics_file = MetricsFile(run_dir / "metrics.csv")
    metrics_file.continue_from(
        step, branch.parent.parent / "metrics.csv" if branch is not None else None
    )
    module = LanguageModule(config, model, corpus.tokenizer.to_str())
    began = time.perf_counter()
    with Progress(title(config), config.trainer.max_steps, config.tokens_per_step) as progress:
        metrics = Metrics(config, progress)
        checkpointing = Checkpointing(config, run_dir / "checkpoints")
        drop = Drop(config, effect_batch(config, corpus), checkpointing.before_drop, metrics.add)
        trainer = make_trainer(
            config, [metrics_file, *other_loggers(config)], [drop, metrics, checkpointing]
        )
        backend = model.to(trainer.strategy.root_device).use_backend(
            config.model.attention_backend,
            documents=config.data.document_mask,
            half=config.trainer.precision == "bf16",
        )
        log.info(
            "%s: %s parameters, attention backend %s",
            title(config),
            f"{sum(p.numel() for p in model.parameters()):,}",
            backend,
        )
        if config.trainer.compile:
            for block in model.layers:
                block.compile()
        trainer.fit(
            module, datamodule=TrainingData(corpus, config), ckpt_path=start, weights_only=True
        )
        if trainer.interrupted:
            raise KeyboardInterrupt
    return TrainedRun(model, drop.effect, time.perf_counter() - began)


def title(config: RunConfig) -> str:
    """What the run is called on the terminal."""
    return f"Training {config.label or config.name}"


def effect_batch(config: RunConfig, corpus: Corpus) -> Batch:
    """The fixed validation batch on which the drop's effect is measured, plain text."""
    windows = held_out_windows(
        corpus.validation, config.drop.effect_sequences, config.data.sequence_length
    )
    return as_batch(windows, corpus.end_of_text, np.ones(windows.shape, dtype=np.float32))


def make_trainer(
    config: RunConfig, loggers: list[Logger], callbacks: list[L.Callback]
) -> L.Trainer:
    """Lightning's trainer, without its own checkpoints, progress bar and advice."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    run = config.trainer
    return L.Trainer(
        max_steps=run.max_steps,
        accelerator=run.accelerator,
        devices=1,
        precision="bf16-mixed" if run.precision == "bf16" else "32-true",
        accumulate_grad_batches=run.accumulation,
        logger=loggers,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=config.run_dir,
    )
