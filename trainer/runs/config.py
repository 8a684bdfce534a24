"""The whole configuration of a run: the schema of every group, and what is impossible in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trainer.common.errors import Problem, did_you_mean
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.head_units import units
from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, unknown_encodings
from trainer.positional.encodings import ENCODINGS
from trainer.recalibration.config import DropConfig
from trainer.recalibration.schedule import ScheduleConfig
from trainer.report.results import STATEMENTS
from trainer.runs.layouts import layout_problems
from trainer.runs.logger_config import LoggerConfig
from trainer.runs.monitoring import MonitorConfig
from trainer.runs.phase_config import PhaseConfig
from trainer.runs.training_config import OptimizerConfig, StrategyConfig, TrainerConfig

NAME = re.compile(r"\w[\w.+-]*")
"""Of runs and controls, which are names of directories."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run.

    ``label``: how the run is called in tables (null: by its encoding). ``run_dir``: where it
    lives; stable, so that the same command resumes. ``controls``: other runs of the same experiment
    by name, each a set of changes to this configuration, trained for the same budget and reported
    in the same table; one with ``branch: drop`` goes on from this run's state just before its drop,
    with ``branch: 320`` from that after step 320.
    ``phases``: the parts of the run by name, in order, where there are more than a drop makes;
    ``trainer.max_steps`` is then their sum, and ``drop`` a phase's.
    ``plugins``: Python files that register encodings. ``callbacks``: Lightning callbacks by name,
    each ``_target_``, a class, and its arguments; nothing but training makes them.
    """

    name: str = "run"
    label: str | None = None
    run_dir: str = "runs/run"
    seed: int = 0
    overwrite: bool = False
    plugins: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    positional: PositionalConfig = field(default_factory=PositionalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    drop: DropConfig = field(default_factory=DropConfig)
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step reads."""
        return self.trainer.batch_size * self.data.sequence_length

    @property
    def training_length(self) -> int:
        """Tokens that the model is trained for in the end: those of the longest sequences."""
        lengths = (phase.sequence_length or 0 for phase in self.phases.values())
        return max(self.data.sequence_length, *lengths, 0)

    @property
    def drop_step(self) -> int | None:
        """Steps trained before the drop, or None; of several the first."""
        if self.phases:
            steps = [phase.steps or 0 for phase in self.phases.values()]
            drops = [bool(phase.drop) for phase in self.phases.values()]
            return sum(steps[: drops.index(True)]) if any(drops) else None
        return self.drop.step(self.trainer.max_steps, self.tokens_per_step)

    def problems(self) -> list[Problem]:
        """All that is impossible in and between the groups, one sentence each."""
        model_problems = self.model.problems()
        drop_problems = self.drop.problems(
            self.trainer.max_steps,
            self.tokens_per_step,
            self.model.num_hidden_layers,
            self.model.num_key_value_heads,
            self.model.is_trained,
        )
        if self.drop.to not in {*ENCODINGS, *self.positional.encodings}:
            near = did_you_mean(self.drop.to, ENCODINGS)
            drop_problems.append(Problem("drop.to", f"unknown encoding {self.drop.to!r}.", near))
        found = []
        if not NAME.fullmatch(self.name):
            found.append(
                Problem(
                    "name",
                    f"{self.name!r} names a directory under runs/; expected letters, digits and "
                    "._+- only (run_dir= may be any path).",
                )
            )
        if not self.run_dir:
            found.append(
                Problem("run_dir", "expected a directory, got nothing; leave it out for runs/NAME.")
            )
        found += [
            *model_problems,
            *self.data.problems(),
            *self.tokenizer.problems(),
            *self.optimizer.problems(),
            *self.schedule.problems("schedule"),
            *self.trainer.problems(),
            *self.strategy.problems(),
            *self.monitor.problems(),
            *drop_problems,
            *self.evaluation.problems(
                self.training_length if 1 < self.training_length < 1 << 31 else None
            ),
        ]
        if self.evaluation.enabled and "none" not in (self.evaluation.methods or ["none"]):
            found.append(
                Problem(
                    "evaluation.methods",
                    "expected 'none' among them; a run is reported as it is first.",
                )
            )
        dope = self.evaluation.dope
        heads = units(self.model, dope) * self.model.num_hidden_layers
        if self.evaluation.enabled and "dope" in self.evaluation.parts and dope.heads > heads:
            found.append(
                Problem(
                    "evaluation.dope.heads",
                    f"expected at most {heads}, the heads of the model, got {dope.heads}.",
                )
            )
        unheard = set(self.evaluation.tasks) == {STATEMENTS} and not self.data.needles.share
        if self.evaluation.enabled and unheard:
            found.append(
                Problem(
                    "evaluation.tasks",
                    "nothing but statements, which the training text does not carry; set "
                    "data.needles.share, or add perplexity.",
                )
            )
        if self.model.attention_backend == "flash" and self.trainer.precision == "fp32":
            found.append(
                Problem(
                    "model.attention_backend",
                    "'flash' computes in 16 bits only; set trainer.precision=bf16, or choose "
                    "'auto' or 'sdpa'.",
                )
            )
        no_drop = self.drop.at is None and self.drop.at_tokens is None and self.drop_step is None
        if self.model.qk_norm.when == "after_drop" and no_drop:
            found.append(
                Problem(
                    "model.qk_norm.when",
                    "'after_drop', but there is no drop; set drop.at, or choose 'never' or "
                    "'always'.",
                )
            )
        found += unknown_encodings(self.positional)
        if not model_problems and self.data.sequence_length > 1:
            # Layouts of published weights come with them; phases are checked by themselves.
            drops = self.drop.step(1, 1) is not None and self.model.from_pretrained is None
            drop = {"drop": self.drop} if drops and not drop_problems else {}
            problems = layout_problems(self.positional, self.model, self.data.sequence_length, drop)
            found += [problem for problem in problems if problem not in found]
        return found
