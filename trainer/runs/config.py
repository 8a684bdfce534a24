"""The whole configuration of a run and of its phases: the schema of every group, and the rules
between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.common.errors import Problem, did_you_mean, listed
from trainer.common.fields import (
    Count,
    FreeForm,
    Integer,
    Natural,
    Number,
    OptionalText,
    Positive,
    configuration,
)
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.method_config import LAYERS_KEY
from trainer.evaluation.results import STATEMENTS
from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, unknown_encodings
from trainer.positional.encodings import ENCODINGS
from trainer.positional.layout import LayerChoice, layer_problems
from trainer.positional.rescaling import RESCALINGS
from trainer.recalibration.config import ChangeConfig, DropConfig, ScheduleConfig
from trainer.runs.training_config import (
    LoggerConfig,
    MonitorConfig,
    OptimizerConfig,
    StrategyConfig,
    TrainerConfig,
)


@configuration
class RescaleConfig:
    """Frequencies slowed at the start of a phase, for good."""

    method: str = "yarn"
    """pi, ntk, ntk_by_parts, yarn, llama3, yarn_full_range, ntk_by_parts_turns, yarn_turns, or
    base (a new base, see base)."""
    factor: Annotated[Number, Field(gt=1, le=1_000_000)] | None = None
    """How much longer sequences get; null: the phase's sequences over the longest trained on
    before."""
    base: Annotated[Number, Field(gt=1)] | None = None
    """New base theta of the frequencies base^(-2i/d), for method base; null: see method."""
    layers: LayerChoice = None
    """Layers to rescale: all, full_attention (those without a window), or indices; null: the
    layers that see more than the longest sequences before."""

    @listed
    def problems(self, key: str, num_layers: int) -> Iterator[Problem]:
        """Check the values for a model of ``num_layers``; ``key``: path of the group."""
        yield from layer_problems(f"{key}.layers", self.layers, num_layers)
        if self.method == "base":
            if self.base is None:
                yield Problem(f"{key}.base", "expected the new base, such as 2e6.")
            if self.factor is not None:
                yield Problem(f"{key}.factor", "method base has none; leave it out.")
        elif self.base is not None:
            yield Problem(f"{key}.base", "is for method base; give that, or leave it out.")
        if self.method not in {*RESCALINGS, "base"}:
            near = did_you_mean(self.method, [*RESCALINGS, "base"])
            yield Problem(f"{key}.method", f"unknown method {self.method!r}.", near)


@configuration
class PhaseConfig:
    """A part of a run; what is null is as the run has it."""

    steps: Count | None = None
    """Optimizer steps of the phase; null: see tokens."""
    tokens: Count | None = None
    """Length in tokens, which takes precedence over steps; null: see steps."""
    sequence_length: Annotated[Integer, Field(ge=2, lt=1 << 31)] | None = None
    """Tokens of a sequence; null: data.sequence_length."""
    batch_size: Count | None = None
    """Sequences per optimizer step; null: trainer.batch_size."""
    micro_batch_size: Count | None = None
    """Sequences per forward pass of one rank; null: trainer.micro_batch_size."""
    weights: dict[str, Positive] | None = None
    """Weights of data.mixture's texts by name; a text that is not named is not read. Null: those
    of the run."""
    schedule: ScheduleConfig | None = None
    """Learning rate of the phase; null: the run's, laid out over all phases, continues."""
    drop: ChangeConfig | None = None
    """What is dropped at the start; null: nothing."""
    rescale: RescaleConfig | None = None
    """How frequencies are slowed at the start; null: not at all."""
    optimizer_state: Literal["keep", "reset", "reset_new"] = "keep"
    """State of the optimizer at the start: keep, reset, or reset_new (only of parameters that
    the drop adds)."""
    log_every: Count | None = None
    """Steps between logged rows; null: trainer.log_every."""

    @listed
    def problems(self, key: str, texts: list[str], num_layers: int) -> Iterator[Problem]:
        """Check what can be checked without the run.

        ``texts``: names of the mixture's texts; empty for a single text.
        """
        if self.steps is None and self.tokens is None:
            yield Problem(key, f"how long is it? Give {key}.steps or {key}.tokens.")
            return
        if self.weights is not None:
            yield from self._weight_problems(f"{key}.weights", self.weights, texts)
        if self.rescale is not None:
            yield from self.rescale.problems(f"{key}.rescale", num_layers)
        if self.rescale is not None and self.drop is not None:
            yield Problem(f"{key}.rescale", f"give it a phase apart from {key}.drop.")

    @staticmethod
    def _weight_problems(
        key: str, weights: dict[str, float], texts: list[str]
    ) -> Iterator[Problem]:
        if not texts:
            yield Problem(key, "there is one text; data.mixture names several.")
            return
        if not weights:
            yield Problem(key, "nothing is read; name a text.")
        for name in weights:
            if name not in texts:
                near = did_you_mean(name, texts)
                yield Problem(f"{key}.{name}", "no text of data.mixture.", near)


MAIN = "main"
"""Name of the run itself among its controls."""
NAME = re.compile(r"\w[\w.+-]*")
"""Names of runs and controls, which become names of directories."""


@configuration
class RunConfig:
    """Everything that defines a run."""

    name: str = "run"
    """Name of the run and its directory."""
    label: OptionalText = None
    """What tables call the run; null: its encoding."""
    run_dir: str = "runs/run"
    """Directory of the run; the same command resumes what is there."""
    seed: Natural = 0
    """Seed of the weights and of the order of samples."""
    overwrite: bool = False
    """Start again in a directory that holds a run."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register encodings of your own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the decoder, or weights to start from."""
    positional: PositionalConfig = field(default_factory=PositionalConfig)
    """Encodings over layers and heads."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, and how it becomes sequences."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer, read from a file or trained."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and its rates."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate of the run, before a drop."""
    drop: DropConfig = field(default_factory=DropConfig)
    """When the encoding is dropped, what replaces it, and how training resumes."""
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    """Parts of the run by name, in order, for more than one change (docs/phases.md);
    trainer.max_steps is then their sum."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Length, batch, precision and rhythm of the run."""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    """How the run spreads over devices."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where metrics go besides metrics.csv."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What the run is measured by at its end."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What is measured during training."""
    callbacks: dict[str, FreeForm] = field(default_factory=dict)
    """Lightning callbacks of your own by name: {name: {_target_: module.Class, argument:
    value}}."""
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other runs to train and report beside this one: {name: changes}. branch: drop, or a step,
    resumes from this run's state there."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.trainer.batch_size * self.data.sequence_length

    @property
    def training_length(self) -> int:
        """C: tokens of the sequences that the model is trained on last."""
        lengths = [phase.sequence_length for phase in self.phases.values()]
        return (lengths[-1] if lengths else None) or self.data.sequence_length

    @property
    def longest_sequence(self) -> int:
        """Largest number of tokens per sequence that the model is trained on, over all phases."""
        lengths = (phase.sequence_length or 0 for phase in self.phases.values())
        return max(self.data.sequence_length, *lengths, 0)

    @property
    def drop_step(self) -> int | None:
        """Number of steps trained before the first drop, or None."""
        if self.phases:
            steps = [phase.steps or 0 for phase in self.phases.values()]
            drops = [bool(phase.drop) for phase in self.phases.values()]
            return sum(steps[: drops.index(True)]) if any(drops) else None
        return self.drop.step(self.trainer.max_steps, self.tokens_per_step)

    def problems(self) -> list[Problem]:
        """Check within and between the groups."""
        model_problems = self.model.problems()
        group_problems = [
            *self._name_problems(),
            *model_problems,
            *self.data.problems(),
            *self.tokenizer.problems(),
            *self.trainer.problems(),
            *self.strategy.problems(),
            *self.monitor.problems(),
            *self.drop_problems(),
            *self.evaluation.problems(
                self.training_length if 1 < self.training_length < 1 << 31 else None
            ),
            *(self._evaluation_problems() if self.evaluation.enabled else ()),
            *self._model_problems(),
            *unknown_encodings(self.positional),
        ]
        if model_problems:
            return group_problems
        of_model = self._float8_problems() if self.trainer.fp8 else []
        if self.evaluation.enabled:
            of_model += layer_problems(
                LAYERS_KEY, self.evaluation.layers, self.model.num_hidden_layers
            )
        return list(dict.fromkeys([*group_problems, *of_model]))

    def _name_problems(self) -> Iterator[Problem]:
        if not NAME.fullmatch(self.name):
            yield Problem(
                "name",
                f"{self.name!r} names a directory under runs/; expected letters, digits and ._+- "
                "only (run_dir= may be any path).",
            )
        if not self.run_dir:
            yield Problem(
                "run_dir", "expected a directory, got nothing; leave it out for runs/NAME."
            )

    @listed
    def drop_problems(self) -> Iterator[Problem]:
        """Check the drop of a run without phases."""
        yield from self.drop.problems(
            self.trainer.max_steps,
            self.tokens_per_step,
            self.model.num_hidden_layers,
            self.model.num_key_value_heads,
            self.data.sequence_length,
            self.model.is_trained,
        )
        if self.drop.to not in {*ENCODINGS, *self.positional.encodings}:
            near = did_you_mean(self.drop.to, ENCODINGS)
            yield Problem("drop.to", f"unknown encoding {self.drop.to!r}.", near)

    def _evaluation_problems(self) -> Iterator[Problem]:
        evaluation, dope = self.evaluation, self.evaluation.dope
        if "none" not in (evaluation.methods or ["none"]):
            yield Problem(
                "evaluation.methods",
                "expected 'none' among them; a run is reported as it is first.",
            )
        heads = self.model.num_attention_heads * self.model.num_hidden_layers
        if "dope" in evaluation.parts and dope.heads > heads:
            yield Problem(
                "evaluation.dope.heads",
                f"expected at most {heads}, the heads of the model, got {dope.heads}.",
            )
        if set(evaluation.tasks) == {STATEMENTS} and not self.data.needles.share:
            yield Problem(
                "evaluation.tasks",
                "nothing but statements, which the training text does not carry; set "
                "data.needles.share, or add perplexity.",
            )

    def _model_problems(self) -> Iterator[Problem]:
        if self.model.attention_backend == "flash" and self.trainer.precision == "fp32":
            yield Problem(
                "model.attention_backend",
                "'flash' computes in 16 bits only; set trainer.precision=bf16, or choose 'auto' or "
                "'sdpa'.",
            )
        no_drop = self.drop.at is None and self.drop.at_tokens is None and self.drop_step is None
        if self.model.qk_norm.when == "after_drop" and no_drop:
            yield Problem(
                "model.qk_norm.when",
                "'after_drop', but there is no drop; set drop.at, or choose 'never' or 'always'.",
            )

    def _float8_problems(self) -> list[Problem]:
        """Check that the inputs and outputs of all linear layers of a block suit float8."""
        model = self.model
        sizes = {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_key_value_heads * head_dim": model.num_key_value_heads * model.head_size,
        }
        odd = ", ".join(f"model.{key} = {size}" for key, size in sizes.items() if size % 16)
        reason = f"float8 products need sizes that are multiples of 16, got {odd}."
        return [Problem("trainer.fp8", reason)] if odd else []
