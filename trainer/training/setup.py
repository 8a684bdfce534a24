"""From a configuration to Lightning's trainer: device, settings of torch, decoder, module."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.processes import cores, use_cores
from trainer.common.ranks import best_precision, current_ranks, device_type
from trainer.config import RunConfig
from trainer.interchange.pretrained import Pretrained
from trainer.lightning.module import LanguageModule
from trainer.lightning.strategy import parallelize, shard_like
from trainer.model.decoder import Decoder, initial_value
from trainer.runs.phases import configured_layout, phase_at, phases_of
from trainer.training.internals import leave_signals_alone
from trainer.training.strategies import RunStrategy


def check_device(config: RunConfig) -> None:
    """Check that this machine can run the configuration.

    Raises:
        UserError: it has no GPU, or one that cannot compute in the configured precision.
    """
    run, device = config.trainer, device_type(config.trainer.accelerator)
    if device == "cpu" and run.accelerator == "gpu":
        raise UserError("trainer.accelerator: expected a GPU, and torch sees none")
    if device == "cuda" and run.precision == "bf16" and best_precision(device) == "fp32":
        raise UserError(f"trainer.precision: {torch.cuda.get_device_name()} has no bf16; use fp32")


def precision_of(config: RunConfig) -> Literal["fp32", "bf16"]:
    """Return ``trainer.precision`` as it is on this machine."""
    if (precision := config.trainer.precision) != "auto":
        return precision
    return best_precision(device_type(config.trainer.accelerator))


def compiles(config: RunConfig) -> bool:
    """Whether a run compiles its model on this machine."""
    compile = config.trainer.compile
    return device_type(config.trainer.accelerator) == "cuda" if compile == "auto" else compile


def set_threads(config: RunConfig) -> None:
    """Set the number of CPU threads to ``trainer.threads`` or the default.

    With several ranks, and when compiling, the default is one per core of this process's share of
    the machine: srun gives each process cores of its own, those of torchrun share all cores.
    """
    ranks, threads, share = current_ranks(), config.trainer.threads, cores()
    if not {"SLURM_CPUS_PER_TASK", "SLURM_LOCALID"} <= os.environ.keys():
        share = max(share // ranks.local_size, 1)
    # torchrun sets OMP_NUM_THREADS=1 on all ranks unless it is set.
    use_cores(threads or (share if ranks.world_size > 1 else None))
    if compiles(config) and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config as inductor  # after the environment is set

        # The default is one worker per core of the node, up to 32, on every rank.
        inductor.compile_threads = min(threads or share, 32)


def set_environment(config: RunConfig) -> None:
    """Set the environment that torch and cuBLAS read when first used; the user's settings stay."""
    if device_type(config.trainer.accelerator) == "cpu":
        return
    if not any(name.endswith("_ALLOC_CONF") for name in os.environ):  # torch has three names
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def numerics(config: RunConfig) -> Iterator[None]:
    """Multiply float32 in TF32 on a GPU; apply ``trainer.deterministic`` within the block."""
    # torch recommends torch.backends.cuda.matmul.fp32_precision. Lightning reads the older
    # setting, and torch raises if both are used.
    if device_type(config.trainer.accelerator) == "cuda":
        torch.set_float32_matmul_precision("high")
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        memory: Any = torch.utils.deterministic  # attributes are created at run time
        # Filling new memory first costs an eighth of a step; nothing reads it unwritten.
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        if config.trainer.deterministic:
            torch.use_deterministic_algorithms(False)


def make_decoder(
    config: RunConfig, vocab_size: int, pretrained: Pretrained | None = None
) -> Decoder:
    """Create a run's decoder on the meta device, without weights.

    ``pretrained``: the model that provides the weights, and the encoding.
    """
    shape = replace(config.model, vocab_size=config.model.vocab_size or vocab_size)
    with torch.device("meta"):
        return Decoder(shape, pretrained.layout if pretrained else configured_layout(config))


def make_module(
    config: RunConfig,
    model: Decoder,
    pretrained: Pretrained | None = None,
    draws: bool = True,
) -> LanguageModule:
    """Create a run's module; ``draws``: whether weights are drawn, or taken from ``pretrained``."""
    run, strategy, phases = config.trainer, config.strategy, phases_of(config)
    size = strategy.shard_size or current_ranks().local_size

    def value(name: str, parameter: Tensor) -> Tensor:
        if pretrained is None:
            whole = initial_value(model.config, name, parameter.shape, config.seed)
        else:
            whole = pretrained.value(name, parameter).float()
        return shard_like(whole, parameter)

    def prepare(model: Decoder, device: torch.device) -> None:
        parallelize(
            model,
            device,
            strategy.name,
            half=precision_of(config) == "bf16",
            shard_size=size,
            activation_checkpointing=strategy.activation_checkpointing,
            compile=compiles(config),
        )
        if draws:
            model.fill(value)

    optimizer = asdict(config.optimizer)
    return LanguageModule(
        model,
        optimizer.pop("lr"),
        schedule=lambda step: phase_at(phases, step).factor(step),
        optimizer=optimizer.pop("name"),
        gradient_clip=run.gradient_clip,
        attention=config.model.attention_backend,
        prepare=prepare,
        **optimizer,
    )


def make_trainer(
    config: RunConfig, strategy: RunStrategy, loggers: list[Logger], callbacks: list[L.Callback]
) -> L.Trainer:
    """Create Lightning's trainer of a run, whose phases are epochs, without bar and summary."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    ranks, single = current_ranks(), config.strategy.name == "single"
    trainer = L.Trainer(
        max_steps=config.trainer.max_steps,
        accelerator=device_type(config.trainer.accelerator),
        devices=1,
        num_nodes=ranks.world_size // ranks.local_size,
        strategy=strategy,
        # explicit, so that Lightning does not detect a SLURM job
        plugins=[LightningEnvironment() if single else TorchElasticEnvironment()],
        precision="32-true",  # of the weights; the decoder chooses the compute dtype
        reload_dataloaders_every_n_epochs=1,
        logger=loggers,
        log_every_n_steps=0,  # rows include the values of log()
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        default_root_dir=config.run_dir,
    )
    leave_signals_alone(trainer)
    return trainer
