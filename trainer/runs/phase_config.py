"""One of the ``phases`` of a run: how long it is, what it reads, and what changes at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.common.errors import Problem, did_you_mean
from trainer.positional.rescaling import RESCALINGS
from trainer.recalibration.config import ChangeConfig
from trainer.recalibration.schedule import ScheduleConfig

LARGEST_FACTOR = 1_000_000


@dataclass(frozen=True)
class RescaleConfig:
    """Frequencies slowed at the start of a phase, for good: ``method`` is pi, ntk, ntk_by_parts,
    yarn, llama3 or yarn_full_range; ``factor``: how much longer sequences get (null: as long as
    those of the phase are, against the longest that the model was trained on before)."""

    method: str = "yarn"
    factor: float | None = None

    def problems(self, key: str) -> list[Problem]:
        """What is impossible, one sentence each; ``key``: where the group stands."""
        found = []
        if self.method not in RESCALINGS:
            near = did_you_mean(self.method, RESCALINGS)
            found.append(Problem(f"{key}.method", f"unknown method {self.method!r}.", near))
        if self.factor is not None and not 1 < self.factor <= LARGEST_FACTOR:
            found.append(
                Problem(
                    f"{key}.factor",
                    "expected more than 1, which changes nothing, and at most "
                    f"{LARGEST_FACTOR:,}, got {self.factor:g}.",
                )
            )
        return found


@dataclass(frozen=True)
class UntilConfig:
    """When a phase ends before its steps are done, by its loss on the held-out sequences on which
    changes are measured, looked at every ``every`` steps: ``flat``: it has fallen by less than so
    many nats per token over the last ``patience`` looks; ``back_within``: it is no more than so
    many nats above what it was before the phase changed something."""

    every: int = 100
    flat: float | None = None
    patience: int = 3
    back_within: float | None = None

    def problems(self, key: str, changes: bool) -> list[Problem]:
        """What is impossible, one sentence each; ``changes``: whether its phase changes a model."""
        found = [
            Problem(f"{key}.{name}", f"expected 1 or more, got {value}.")
            for name in ("every", "patience")
            if (value := getattr(self, name)) < 1
        ]
        if self.flat is None and self.back_within is None:
            found.append(Problem(key, f"give {key}.flat or {key}.back_within, in nats per token."))
        if self.flat is not None and self.flat <= 0:
            found.append(
                Problem(f"{key}.flat", f"expected a positive number of nats, got {self.flat}.")
            )
        if self.back_within is not None and not changes:
            found.append(
                Problem(f"{key}.back_within", "the phase drops and rescales nothing; give flat.")
            )
        return found


@dataclass(frozen=True)
class PhaseConfig:
    """A part of a run; what is null is as the run has it.

    ``steps``, or ``tokens``, which counts where both are given: its length. ``sequence_length``,
    ``batch_size``, ``micro_batch_size``: as in ``data`` and ``trainer``. ``weights``: of the texts
    of ``data.mixture`` by name; one that is not named is not read. ``schedule``: a learning rate of
    its own (null: that of the run, laid out over all phases, goes on). ``drop``: what is dropped at
    its start. ``rescale``: how frequencies are slowed at its start. ``optimizer_state``: at its
    start keep, reset, or reset for what the drop adds. ``until``: when it ends before its steps are
    done. ``log_every``: steps between rows.
    """

    steps: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    weights: dict[str, float] | None = None
    schedule: ScheduleConfig | None = None
    drop: ChangeConfig | None = None
    rescale: RescaleConfig | None = None
    optimizer_state: Literal["keep", "reset", "reset_new"] = "keep"
    until: UntilConfig | None = None
    log_every: int | None = None

    def problems(self, key: str, texts: list[str]) -> list[Problem]:
        """What is impossible whatever the run is, one sentence each; ``texts``: names of those that
        are mixed, none where there is one alone."""
        if self.steps is None and self.tokens is None:
            return [Problem(key, f"how long is it? Give {key}.steps or {key}.tokens.")]
        counted = "steps" if self.tokens is None else "tokens"  # which the steps are made of
        found = [
            Problem(f"{key}.{name}", f"expected 1 or more, got {value}.")
            for name in (counted, "batch_size", "micro_batch_size", "log_every")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        length = self.sequence_length
        if length is not None and not 2 <= length < 1 << 31:
            found.append(
                Problem(f"{key}.sequence_length", f"expected 2 to 2^31 - 1 tokens, got {length}.")
            )
        if self.weights is not None:
            found += self._weight_problems(f"{key}.weights", self.weights, texts)
        if self.schedule is not None:
            found += self.schedule.problems(f"{key}.schedule")
        if self.rescale is not None:
            found += self.rescale.problems(f"{key}.rescale")
        if self.until is not None:
            changes = self.drop is not None or self.rescale is not None
            found += self.until.problems(f"{key}.until", changes)
        if self.rescale is not None and self.drop is not None:
            found.append(Problem(f"{key}.rescale", f"give it a phase apart from {key}.drop."))
        return found

    @staticmethod
    def _weight_problems(key: str, weights: dict[str, float], texts: list[str]) -> list[Problem]:
        if not texts:
            return [Problem(key, "there is one text; data.mixture names several.")]
        found = [
            Problem(f"{key}.{name}", "no text of data.mixture.", did_you_mean(name, texts))
            for name in weights
            if name not in texts
        ]
        found += [
            Problem(
                f"{key}.{name}",
                f"expected a positive number, got {weight}; leave out what is not read.",
            )
            for name, weight in weights.items()
            if weight <= 0
        ]
        return found or ([] if weights else [Problem(key, "nothing is read; name a text.")])
