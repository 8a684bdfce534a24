"""Groups ``optimizer``, ``trainer``, ``strategy``, ``logger`` and ``monitor`` of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from trainer.common.errors import Problem, did_you_mean, listed
from trainer.common.fields import (
    Count,
    Multiple,
    Natural,
    NotNegative,
    OptionalText,
    Positive,
    Processes,
    Rate,
    configuration,
)
from trainer.evaluation.config import task_names

TIME = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")
"""Hours, minutes and seconds."""
Beta = Annotated[NotNegative, Field(lt=1)]
"""Decay rate of a moving average."""


@configuration
class OptimizerConfig:
    """Optimizer and its rates."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon (for the matrices of the blocks, AdamW for the rest)."""
    lr: Rate = 3e-4
    """Learning rate of AdamW, times the schedule."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: Annotated[Positive, Field(le=1)] = 1e-8
    """Added to the denominator of AdamW's update."""
    weight_decay: Annotated[NotNegative, Field(le=1000)] = 0.1
    """Weight decay of matrices; norms and biases have none."""
    decay_embeddings: bool = False
    """Also decay embeddings and the head."""
    muon_lr: Rate = 0.02
    """Learning rate of Muon, times the schedule."""
    muon_momentum: Beta = 0.95
    """Momentum of Muon."""


Products = Literal["bf16", "tf32", "fp32"]
"""Precision in which a GPU multiplies matrices."""


@configuration
class TrainerConfig:
    """Length, batch, precision and rhythm of a run."""

    max_steps: Count = 1000
    """Optimizer steps of the run."""
    max_tokens: Count | None = None
    """Length of the run in tokens, instead of steps; null: see max_steps."""
    batch_size: Count = 32
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Count | None = None
    """Sequences per forward pass of one rank; null: all that the rank has."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32, or bf16 (computes in bfloat16 and keeps float32 weights)."""
    fp8: bool = False
    """Multiply in float8 within blocks; with precision=bf16, on Ada, Hopper and later GPUs, and the
    extra fp8 (torchao)."""
    tf32: bool = True
    """Multiply float32 matrices in TF32 on GPUs."""
    deterministic: bool = False
    """Compute the same bits every time, with slower GPU kernels."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device: auto (GPUs where torch sees them, otherwise the CPU), cpu, gpu."""
    threads: Processes | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores, shared by the ranks of a machine."""
    gradient_clip: NotNegative = 1.0
    """Largest norm of a gradient; 0: no clipping."""
    z_loss: Annotated[NotNegative, Field(le=1000)] = 0.0
    """Weight of the squared log-partition in the loss."""
    compile: bool = False
    """Compile the model with torch.compile."""
    log_every: Count = 10
    """Steps between logged rows."""
    checkpoint_every: Count = 100
    """Steps between checkpoints."""
    checkpoint_minutes: Positive | None = None
    """Minutes after a checkpoint until the next; null: by steps only."""
    keep_checkpoints: Count = 2
    """Number of most recent checkpoints to keep, and of those with finite weights and no update
    just skipped; the one before the drop is always kept."""
    keep_every: Count | None = None
    """Steps between checkpoints that are all kept; null: none."""
    max_time: OptionalText = None
    """Time as hours:minutes:seconds after which the run stops with a checkpoint; null: at the
    end of its SLURM job, if it has one."""
    step_timeout: Positive | None = 1800.0
    """Seconds after which a step counts as stuck and the process ends with its stacks; null:
    never."""
    profile_steps: list[Count] = field(default_factory=list)
    """First and last step to profile, such as [10, 13]."""

    @listed
    def problems(self) -> Iterator[Problem]:
        """Check the values."""
        if self.max_time is not None and not TIME.fullmatch(self.max_time):
            yield Problem(
                "trainer.max_time",
                f"expected hours:minutes:seconds such as 23:50:00, got {self.max_time!r}.",
            )
        steps = self.profile_steps
        if steps and (len(steps) != 2 or not steps[0] <= steps[1] <= self.max_steps):
            yield Problem(
                "trainer.profile_steps",
                f"expected the first and the last of steps 1 to {self.max_steps}, such as "
                f"[10, 13], got {steps}.",
            )
        if self.fp8 and self.precision != "bf16":
            yield Problem("trainer.fp8", "needs trainer.precision=bf16, for all other products.")
        if self.fp8 and self.accelerator == "cpu":
            yield Problem(
                "trainer.fp8", "float8 products need a GPU; leave out trainer.accelerator=cpu."
            )
        if self.batch_size % (self.micro_batch_size or self.batch_size):
            yield Problem(
                "trainer.micro_batch_size",
                f"{self.micro_batch_size} does not divide trainer.batch_size {self.batch_size}.",
            )

    @property
    def products(self) -> Products:
        """The precision in which a GPU multiplies matrices, apart from float8."""
        return "tf32" if self.precision == "fp32" and self.tf32 else self.precision

    def accumulation(self, ranks: int = 1) -> int:
        """Return the number of forward passes of a rank per optimizer step."""
        return self.batch_size // ((self.micro_batch_size or self.batch_size // ranks) * ranks)


def seconds_of(time: str) -> float:
    """Convert ``hours:minutes:seconds`` to seconds."""
    hours, minutes, seconds = map(int, time.split(":"))
    return 3600 * hours + 60 * minutes + seconds


@configuration
class StrategyConfig:
    """Distribution of a run over devices."""

    name: Literal["single", "ddp", "fsdp2", "hsdp"] = "single"
    """single (one device), ddp (a copy on every rank), fsdp2 (parameters, gradients and
    optimizer sharded over all ranks), hsdp (sharded in groups of ranks, copied between them)."""
    shard_size: Count | None = None
    """Ranks that share one copy of the parameters, for hsdp; null: those of a node."""
    cpu_offload: bool = False
    """Keep sharded parameters and optimizer on the CPU."""
    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients of shards are reduced: micro_batch, step (keeps whole gradients, 4 bytes a
    parameter), or auto (step, if these fit in a tenth of a GPU)."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward recomputes: none, selective (all but matrix products and attention), full
    (whole blocks)."""
    timeout: Positive = 1800.0
    """Seconds that ranks wait for each other in a collective."""

    @listed
    def problems(self) -> Iterator[Problem]:
        """Check the values."""
        if self.shard_size is not None and self.name != "hsdp":
            yield Problem("strategy.shard_size", "a number of ranks, for strategy=hsdp only.")
        if self.cpu_offload and self.name not in ("fsdp2", "hsdp"):
            yield Problem(
                "strategy.cpu_offload",
                f"strategy={self.name} does not shard; choose fsdp2 or hsdp.",
            )


@configuration
class LoggerConfig:
    """Destinations of metrics besides ``metrics.csv``."""

    wandb: bool = False
    """Log to Weights & Biases; offline without a key or connection."""
    project: str = "unrope"
    """Project at Weights & Biases."""
    entity: OptionalText = None
    """Team at Weights & Biases; null: the user's own."""
    offline: bool = False
    """Log offline in any case; `wandb sync` sends it later."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run directory."""


@configuration
class BenchmarksConfig:
    """Tasks that the model answers in training, also before and after the drop and at the end."""

    every: Count | None = None
    """Steps between them; null: never."""
    every_tokens: Count | None = None
    """Tokens between them, instead of steps; null: see every."""
    tasks: list[str] = field(default_factory=list)
    """Tasks on validation text, named as in evaluation.tasks."""
    lengths: list[Multiple] = field(default_factory=lambda: [1.0, 2.0])
    """Lengths of these tasks, in multiples of the training length."""
    multiple_choice: list[str] = field(default_factory=list)
    """Tasks of request files, for instance [arc_easy, piqa]."""
    directory: OptionalText = None
    """Directory of the request files; null: where scripts/fetch_benchmarks.py puts them."""
    harness: list[str] = field(default_factory=list)
    """Tasks of lm-eval."""
    include_path: OptionalText = None
    """Directory with more tasks of lm-eval; null: none."""
    limit: Count = 200
    """Questions, trials or windows of each task and length."""

    @property
    def enabled(self) -> bool:
        """Whether any measurement is enabled."""
        return self.every is not None or self.every_tokens is not None

    def is_due(self, before: int, tokens: int, step: int) -> bool:
        """Whether a measurement is due after ``step``, given the tokens before and after it."""
        if self.every is not None:
            return step % self.every == 0
        return self.every_tokens is not None and (
            before // self.every_tokens < tokens // self.every_tokens
        )

    @listed
    def problems(self) -> Iterator[Problem]:
        """Check the values."""
        names = [*self.tasks, *self.multiple_choice, *self.harness]
        if self.every is not None and self.every_tokens is not None:
            yield Problem(
                "monitor.benchmarks.every_tokens", "give steps (every) or tokens, not both."
            )
        if self.enabled and not names:
            yield Problem(
                "monitor.benchmarks",
                "expected tasks, multiple_choice or harness to name one or more, for "
                "instance 'monitor.benchmarks.multiple_choice=[piqa]'.",
            )
        if names and not self.enabled:
            yield Problem(
                "monitor.benchmarks.every",
                "expected the steps (or every_tokens) between them, for instance 1000.",
            )
        for name in self.tasks:
            if name not in task_names():
                near = did_you_mean(name, task_names())
                yield Problem("monitor.benchmarks.tasks", f"unknown task {name!r}.", near)
        if not self.lengths:
            yield Problem(
                "monitor.benchmarks.lengths",
                f"expected positive multiples of the training length, got {self.lengths}.",
            )


@configuration
class MonitorConfig:
    """Measurements of the model in training; they do not affect it."""

    lengths_every: Count | None = None
    """Steps between measurements of retrieval and held-out loss by length; null: never."""
    lengths: list[Annotated[Count, Field(le=1_000_000)]] = field(default_factory=lambda: [1, 2, 4])
    """Lengths to measure at, in multiples of the training length (the last phase's)."""
    trials: Annotated[Natural, Field(le=1_000_000)] = 64
    """Retrieval trials of a length, if the training text carries needles; 0: none."""
    windows: Count = 16
    """Windows of held-out text of a length."""
    probe_every: Count | None = None
    """Steps between looks at the attention of every layer; null: never."""
    probe_sequences: Count = 2
    """Sequences that such a look reads."""
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)
    """Tasks that the model answers in training; each kind may be empty."""

    @listed
    def problems(self) -> Iterator[Problem]:
        """Check the values."""
        yield from self.benchmarks.problems()
        if not self.lengths:
            yield Problem("monitor.lengths", "expected one or more, got none.")
