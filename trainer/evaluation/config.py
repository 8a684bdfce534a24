"""The ``evaluation`` configuration group."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.errors import did_you_mean
from trainer.positional.rescaling import RESCALINGS


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured, and how carefully.

    ``lengths``: multiples of the training length. ``trials``: retrieval trials a length, the same
    for every method; 0 leaves retrieval out. ``needles``: statements in each trial.
    ``loss_windows``: held-out windows a length. ``rescalings``: methods tried on models that
    rotate. ``temperature_grid``: coefficients c of 1 + c ln s tried on models without rotation, on
    validation text; empty leaves them out. ``fit_windows``: validation sequences a length for that.
    ``batch_tokens``: tokens in one forward pass. ``enabled``: whether a training run ends with an
    evaluation.
    """

    enabled: bool = True
    lengths: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    trials: int = 256
    needles: int = 4
    loss_windows: int = 96
    rescalings: list[str] = field(default_factory=lambda: ["pi", "ntk", "yarn"])
    temperature_grid: list[float] = field(
        default_factory=lambda: [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6]
    )
    fit_windows: int = 64
    batch_tokens: int = 16384
    seed: int = 1

    def problems(self, training_length: int | None = None) -> list[str]:
        """What is impossible (for models of that training length), one sentence each."""
        found = []
        if not self.lengths or min(self.lengths) < 1:
            found.append(
                "evaluation.lengths: expected multiples of the training length, 1 or more, "
                f"got {self.lengths}."
            )
        for key in ("loss_windows", "fit_windows", "batch_tokens", "needles"):
            if getattr(self, key) < 1:
                found.append(f"evaluation.{key}: expected 1 or more, got {getattr(self, key)}.")
        if any(c < 0 for c in self.temperature_grid):
            found.append("evaluation.temperature_grid: expected coefficients of 0 or more.")
        if self.trials < 0:
            found.append(f"evaluation.trials: expected 0 or more, got {self.trials}.")
        found += [
            f"evaluation.rescalings: unknown method {name!r}.{did_you_mean(name, RESCALINGS)}"
            for name in self.rescalings
            if name not in RESCALINGS
        ]
        if training_length is None or found or not self.trials:
            return found
        if 3 * self.needles + 2 > training_length * min(self.lengths):
            found.append(
                f"evaluation.needles: {self.needles} statements of 3 tokens do not fit "
                f"{training_length * min(self.lengths)} tokens."
            )
        return found
