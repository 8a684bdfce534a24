"""Parts of a run, made from its configuration."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import Tensor

from trainer.common.ranks import Ranks, all_gather
from trainer.config import RunConfig
from trainer.interchange.pretrained import Pretrained
from trainer.lightning.devices import compiles, dense_peak, precision_of
from trainer.lightning.module import LanguageModule
from trainer.lightning.strategy import fill, lightning_strategy, parallelize
from trainer.model.decoder import Decoder, initial_value
from trainer.runs.phases import Phase, configured_layout, phase_at, phases_of
from trainer.runs.ranks import device_of, device_type


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
    ranks: Ranks,
    pretrained: Pretrained | None = None,
    draws: bool = True,
) -> LanguageModule:
    """Create a run's module; ``draws``: whether weights are drawn, or taken from ``pretrained``."""
    run, strategy, phases = config.trainer, config.strategy, phases_of(config)
    size = strategy.shard_size or ranks.local_size

    def value(name: str, shape: torch.Size) -> Tensor:
        if pretrained is None or name not in pretrained.tensors:
            return initial_value(model.config, name, shape, config.seed)
        return pretrained.tensors[name]().float()

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
            fill(model, value)

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
    phase: Phase, ranks: Ranks, loggers: list[Logger], callbacks: list[L.Callback]
) -> L.Trainer:
    """Create Lightning's trainer of a phase, without its own checkpoints, bar and summary."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    config, run = phase.config, phase.config.trainer
    single = config.strategy.name == "single"
    device = device_of(config, ranks)
    trainer = L.Trainer(
        max_steps=phase.end,
        accelerator=device_type(config),
        devices=1,
        num_nodes=ranks.nodes,
        strategy=lightning_strategy(config.strategy.name, device, ranks.local_size),
        # explicit, so that Lightning does not detect a SLURM job
        plugins=[LightningEnvironment() if single else TorchElasticEnvironment()],
        precision="32-true",  # of the weights; the decoder chooses the compute dtype
        accumulate_grad_batches=run.accumulation(ranks.world_size),
        logger=loggers,
        log_every_n_steps=0,  # the Metrics callback logs, including values from log()
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        default_root_dir=config.run_dir,
    )
    # Lightning would broadcast at every batch whether a rank got SIGTERM, which causes a host sync.
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def make_callbacks(configured: Mapping[str, Mapping[str, Any]]) -> list[L.Callback]:
    """Create the user's callbacks: each the class ``_target_`` with the other keys."""
    callbacks = []
    for values in configured.values():
        arguments = {str(key): value for key, value in values.items() if key != "_target_"}
        module, _, name = str(values["_target_"]).rpartition(".")
        callbacks.append(getattr(import_module(module), name)(**arguments))
    return callbacks


def peak_of_ranks(config: RunConfig) -> float | None:
    """Return the dense operations per second of all ranks' GPUs, or None if one is unknown; all
    ranks call this together."""
    if device_type(config) == "cpu":
        return None
    peaks = all_gather(dense_peak(torch.cuda.get_device_name(), precision_of(config)))
    return None if None in peaks else sum(filter(None, peaks))
