"""From a run to Lightning's trainer: device, settings of torch, module."""

import inspect
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
from trainer.common.processes import cores, current_ranks, use_cores
from trainer.common.ranks import best_precision, device_of, device_type, tf32
from trainer.common.registry import check_call
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.lightning.module import LanguageModule
from trainer.lightning.optimizers import OPTIMIZERS
from trainer.lightning.strategy import parallelize, shard_like
from trainer.model.decoder import Decoder, initial_value
from trainer.runs.phases import Run
from trainer.training.internals import leave_signals_alone
from trainer.training.strategies import RunStrategy


def check_device(trainer: TrainerConfig) -> None:
    """Raise UserError unless this machine has the configured device and precision."""
    device = device_type(trainer.accelerator)
    if device == "cpu" and trainer.accelerator == "gpu":
        raise UserError("trainer.accelerator: expected a GPU, and torch sees none")
    if device == "cuda" and trainer.precision == "bf16" and best_precision(device) == "fp32":
        raise UserError(f"trainer.precision: {torch.cuda.get_device_name()} has no bf16; use fp32")


def precision_of(trainer: TrainerConfig) -> Literal["fp32", "bf16"]:
    """Return ``trainer.precision`` as it is on this machine."""
    if trainer.precision != "auto":
        return trainer.precision
    return best_precision(device_type(trainer.accelerator))


def compiles(trainer: TrainerConfig) -> bool:
    """Whether models are compiled on this machine."""
    if trainer.compile != "auto":
        return trainer.compile
    return device_type(trainer.accelerator) == "cuda"


def set_threads(trainer: TrainerConfig) -> None:
    """Set the numbers of CPU threads (``trainer.threads``) and of processes that compile.

    The latter, and with several ranks the default of the former, is the number of cores of this
    process: srun gives each process cores of its own, those of torchrun share all cores.
    """
    ranks = current_ranks()
    share = cores()
    if not {"SLURM_CPUS_PER_TASK", "SLURM_LOCALID"} <= os.environ.keys():
        share = max(share // ranks.local_size, 1)
    if trainer.threads is None and ranks.world_size > 1:
        use_cores(share)  # torchrun sets OMP_NUM_THREADS=1 on all ranks unless it is set
    else:
        use_cores(trainer.threads)
    if compiles(trainer) and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config as inductor  # after the environment is set

        # The default is one worker per core of the node, up to 32, on every rank.
        inductor.compile_threads = min(trainer.threads or share, 32)


def set_environment(accelerator: str) -> None:
    """Set the environment that torch and cuBLAS read when first used; the user's settings stay."""
    if device_type(accelerator) == "cpu":
        return
    if not any(name.endswith("_ALLOC_CONF") for name in os.environ):  # torch has three names
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a later run may need it


@contextmanager
def numerics(trainer: TrainerConfig) -> Iterator[None]:
    """Multiply float32 in TF32 on a GPU and apply ``trainer.deterministic`` within the block."""
    options: Any = torch.utils.deterministic  # attributes are created at run time
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = options.fill_uninitialized_memory
    if trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        # Filling new memory first costs an eighth of a step; nothing reads it unwritten.
        options.fill_uninitialized_memory = False
    try:
        with tf32(device_type(trainer.accelerator)):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        options.fill_uninitialized_memory = fills


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence advice within the block: Lightning's log below warnings, its warnings, and DCP's."""
    names = "lightning", "lightning.pytorch", "lightning.fabric"
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            for name in names:
                logging.getLogger(name).setLevel(logging.WARNING)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def make_decoder(run: Run, vocab_size: int) -> Decoder:
    """Create a run's decoder on the meta device, without weights.

    ``vocab_size``: number of its tokens, unless the run is configured with another.
    """
    shape = run.config.model
    with torch.device("meta"):
        return Decoder(replace(shape, vocab_size=shape.vocab_size or vocab_size), run.layout)


def distribute(run: Run, model: Decoder) -> None:
    """Distribute a run's decoder from the meta device, without weights."""
    trainer = run.config.trainer
    strategy = run.config.strategy
    parallelize(
        model,
        device_of(trainer.accelerator),
        strategy.name,
        half=precision_of(trainer) == "bf16",
        shard_size=strategy.shard_size or current_ranks().local_size,
        activation_checkpointing=strategy.activation_checkpointing,
        compile=compiles(trainer),
    )


def set_weights(run: Run, model: Decoder) -> None:
    """Set a distributed decoder's weights: at random, or to those that the run begins with."""

    def value(name: str, parameter: Tensor) -> Tensor:
        if run.weights is None:
            whole = initial_value(model.config, name, parameter.shape, run.config.seed)
        else:
            whole = run.weights.value(name, parameter).float()
        return shard_like(whole, parameter)

    model.fill(value)


class RunModule(LanguageModule):
    """Module of a run."""

    def configure_model(self) -> None:
        """Do nothing: :func:`distribute` has distributed the model."""


def make_module(run: Run, model: Decoder) -> RunModule:
    """Create a run's module with a distributed decoder."""
    return RunModule(
        model,
        schedule=lambda step: run.phases.at(step).factor(step),
        optimizer=run.config.optimizer.name,
        gradient_clip=run.config.trainer.gradient_clip,
        attention=model.config.attention_backend,
        **optimizer_settings(run.config.optimizer),
    )


def optimizer_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings of an optimizer: the keys of the group that it takes, and ``arguments``;
    raise a UserError if there is no such optimizer, or it has no such settings."""
    function = OPTIMIZERS.find(config.name, "optimizer.name")
    takes = inspect.signature(function).parameters
    values = asdict(config)
    settings = {key: values[key] for key in values if key in takes} | (config.arguments or {})
    check_call(f"optimizer.arguments: {config.name}", function, [], **settings)
    return {key: values[key] for key in ("weight_decay", "decay_embeddings")} | settings


def make_trainer(
    run: Run, strategy: RunStrategy, loggers: list[Logger], callbacks: list[L.Callback]
) -> L.Trainer:
    """Create Lightning's trainer of a run, whose phases are epochs, without bar and summary."""
    ranks = current_ranks()
    is_single = run.config.strategy.name == "single"
    trainer = L.Trainer(
        max_steps=run.steps,
        accelerator=device_type(run.config.trainer.accelerator),
        devices=1,
        num_nodes=ranks.world_size // ranks.local_size,
        strategy=strategy,
        # explicit, so that Lightning does not detect a SLURM job
        plugins=[LightningEnvironment() if is_single else TorchElasticEnvironment()],
        precision="32-true",  # of the weights; the decoder chooses the compute dtype
        reload_dataloaders_every_n_epochs=1,
        logger=loggers,
        log_every_n_steps=0,  # rows include the values of log()
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        default_root_dir=run.directory,
    )
    leave_signals_alone(trainer)
    return trainer
