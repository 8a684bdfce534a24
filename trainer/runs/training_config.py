"""The ``optimizer``, ``trainer`` and ``strategy`` groups: how a run trains, and on what."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from trainer.common.errors import Problem
from trainer.runs.timeouts import TimeoutConfig

TIME = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")


@dataclass(frozen=True)
class OptimizerConfig:
    """``adamw`` for everything, or ``muon`` for the matrices of the blocks and AdamW for the rest.

    ``lr``, ``betas``, ``eps``: of AdamW; ``muon_lr``, ``muon_momentum``: of Muon.
    ``weight_decay``: on matrices; on embeddings and the head with ``decay_embeddings``; never on
    norms and biases.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    muon_lr: float = 0.02
    muon_momentum: float = 0.95

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem(f"optimizer.{key}", f"expected a positive number, got {value}.")
            for key in ("lr", "eps", "muon_lr")
            if (value := getattr(self, key)) <= 0
        ]
        if self.weight_decay < 0:
            found.append(
                Problem("optimizer.weight_decay", f"expected 0 or more, got {self.weight_decay}.")
            )
        if not all(0 <= b < 1 for b in (*self.betas, self.muon_momentum)):
            found.append(
                Problem("optimizer.betas, optimizer.muon_momentum", "expected numbers in [0, 1).")
            )
        return found


COUNTS = (
    "max_steps", "max_tokens", "batch_size", "micro_batch_size", "threads", "log_every",
    "checkpoint_every", "keep_checkpoints", "keep_every", "rewind_after", "gc_every",
)  # fmt: skip


@dataclass(frozen=True)
class TrainerConfig:
    """Length, batch, precision and rhythm of a run.

    ``max_tokens``: length in tokens instead of steps. ``batch_size``: sequences an optimizer step,
    on all ranks; ``micro_batch_size``: sequences a forward pass of one rank (null: all it has).
    ``precision``: ``bf16`` computes in bfloat16 and keeps float32 weights. ``tf32``: GPUs multiply
    float32 matrices in TF32. ``deterministic``: the same bits every time, by slower GPU kernels.
    ``accelerator``: ``auto`` is GPUs where torch sees them, else the CPU. ``threads``: CPU threads
    (null: one for each core it may use). ``log_every``, ``checkpoint_every``: steps;
    ``checkpoint_minutes``: so long after a checkpoint there is another (null: by steps only).
    ``keep_checkpoints``: how many of the regular ones stay, the last ones; of ``keep_every`` steps
    all stay, and the ``keep_best`` of least training loss; the one before the drop always does.
    ``async_checkpoint``: train on while one is written. ``max_time``: hours:minutes:seconds after
    which the run stops with a checkpoint; the end of a SLURM job is known without it.
    ``step_timeout``: seconds after which a step counts as stuck, and the process ends with its
    stacks (null: never). ``rewind_after``: so many updates in a row without a finite gradient, and
    the run goes back to its last checkpoint and leaves out the samples since (null: never).
    ``gc_every``: steps between collections of Python's garbage, the same on all ranks (null:
    Python's own). ``profile_steps``: the first and last to profile.
    """

    max_steps: int = 1000
    max_tokens: int | None = None
    batch_size: int = 32
    micro_batch_size: int | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    tf32: bool = True
    deterministic: bool = False
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    threads: int | None = None
    gradient_clip: float = 1.0
    z_loss: float = 0.0
    compile: bool = False
    log_every: int = 10
    checkpoint_every: int = 100
    checkpoint_minutes: float | None = None
    keep_checkpoints: int = 2
    keep_every: int | None = None
    keep_best: int = 0
    async_checkpoint: bool = True
    max_time: str | None = None
    step_timeout: float | None = 1800.0
    rewind_after: int | None = None
    gc_every: int | None = 1000
    profile_steps: list[int] = field(default_factory=list)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem(f"trainer.{key}", f"expected 1 or more, got {value}.")
            for key in COUNTS
            if (value := getattr(self, key)) is not None and value < 1
        ]
        if self.gradient_clip < 0 or self.z_loss < 0:
            found.append(Problem("trainer.gradient_clip, trainer.z_loss", "expected 0 or more."))
        if self.keep_best < 0:
            found.append(Problem("trainer.keep_best", f"expected 0 or more, got {self.keep_best}."))
        found += [
            Problem(f"trainer.{key}", f"expected {unit}, got {value}.")
            for key, unit in (("step_timeout", "seconds"), ("checkpoint_minutes", "minutes"))
            if (value := getattr(self, key)) is not None and not value > 0
        ]
        if self.max_time is not None and not TIME.fullmatch(self.max_time):
            found.append(
                Problem(
                    "trainer.max_time",
                    f"expected hours:minutes:seconds such as 23:50:00, got {self.max_time!r}.",
                )
            )
        steps = self.profile_steps
        if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= self.max_steps):
            found.append(
                Problem(
                    "trainer.profile_steps",
                    f"expected the first and the last of steps 1 to {self.max_steps}, such as "
                    f"[10, 13], got {steps}.",
                )
            )
        if not found and self.batch_size % (self.micro_batch_size or self.batch_size):
            found.append(
                Problem(
                    "trainer.micro_batch_size",
                    f"{self.micro_batch_size} does not divide trainer.batch_size "
                    f"{self.batch_size}.",
                )
            )
        return found

    def accumulation(self, ranks: int = 1) -> int:
        """Forward passes of a rank in an optimizer step."""
        return self.batch_size // ((self.micro_batch_size or self.batch_size // ranks) * ranks)


def seconds_of(time: str) -> float:
    """Seconds in ``hours:minutes:seconds``."""
    hours, minutes, seconds = map(int, time.split(":"))
    return 3600 * hours + 60 * minutes + seconds


@dataclass(frozen=True)
class StrategyConfig:
    """How a run spreads over devices.

    ``name``: one device; a copy on every rank (``ddp``); parameters, gradients and optimizer
    sharded over all ranks (``fsdp2``), or over ``shard_size`` of them (null: those of a node) and
    copied between such groups (``hsdp``). ``cpu_offload``: sharded parameters and optimizer live on
    the CPU. ``reduce_gradients``: of sharded parameters after every ``micro_batch``, or once a
    ``step``, for which every rank keeps whole gradients, 4 bytes a parameter; ``auto``: once a step
    where these fit into a tenth of a GPU. ``activation_checkpointing``: recompute in backward
    nothing, everything but matrix products and attention (``selective``), or whole blocks
    (``full``). ``timeouts``: how long ranks wait for each other.
    """

    name: Literal["single", "ddp", "fsdp2", "hsdp"] = "single"
    shard_size: int | None = None
    cpu_offload: bool = False
    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = self.timeouts.problems()
        if self.shard_size is not None and (self.name != "hsdp" or self.shard_size < 1):
            found.append(
                Problem("strategy.shard_size", "a number of ranks, for strategy=hsdp only.")
            )
        if self.cpu_offload and self.name not in ("fsdp2", "hsdp"):
            found.append(
                Problem(
                    "strategy.cpu_offload",
                    f"strategy={self.name} does not shard; choose fsdp2 or hsdp.",
                )
            )
        return found
