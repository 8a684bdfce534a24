"""Contents of a checkpoint's ``state.json``: what describes the model, and what training resumes
from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from trainer.checkpoint import versions
from trainer.config import RunConfig
from trainer.evaluation.results import Milestone, Reach
from trainer.model.decoder import Decoder
from trainer.runs.phases import tokens_at


def description(
    config: RunConfig,
    model: Decoder,
    tokenizer_json: str,
    end_of_text: int,
    token_files: Mapping[str, str],
    step: int,
) -> dict[str, Any]:
    """Return the part of ``state.json`` that evaluation and export need, in plain values.

    ``end_of_text``: id of the token after documents. ``token_files``: of the published model in
    which training began, see :mod:`~trainer.interchange.token_files`; empty without one.
    """
    return {
        "step": step,
        "tokens": tokens_at(config, step),
        "model": asdict(model.config),
        "layout": model.layout.to_dict(),
        "tokenizer": tokenizer_json,
        "end_of_text": end_of_text,
        "token_files": dict(token_files),
        "config": json.loads(json.dumps(asdict(config))),
        "versions": versions(),
    }


@dataclass(frozen=True)
class SavedSpikes:
    """Counter of spikes: steps seen, spikes since the last logged row, and the last values."""

    seen: int
    count: float | list[float]
    last: list[list[float]] | None


@dataclass(frozen=True)
class SavedTally:
    """Running statistics between two logged rows.

    ``loss`` is the sum over ``steps`` finite steps. ``sums`` holds (loss, weight), in total and by
    position in the sequence. ``skipped`` counts updates since the start of the run.
    """

    loss: float
    steps: float
    skipped: float
    skipped_in_a_row: float
    sums: list[list[float]] | None
    spikes: SavedSpikes


@dataclass(frozen=True)
class Effect:
    """Effect of a change at the start of a phase on the held-out loss.

    ``sequences``: the losses ``before``, ``after`` and at the ``end``, of each sequence.
    """

    step: int | None = None
    what: str | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    loss_end: float | None = None
    sequences: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunState:
    """Fields of ``state.json`` from which training resumes, besides the model's description.

    ``training/step.py`` collects and restores them.
    """

    data: dict[str, Any]
    """Fingerprints of the text that was read."""
    tally: SavedTally
    """Running statistics that the next row of metrics will contain."""
    pending_metrics: dict[str, float]
    """Other values for the next row of metrics."""
    effects: dict[str, Effect]
    """Effects of the changes so far, by phase."""
    lengths: list[Reach]
    """Measurements at several lengths so far."""
    benchmarks: list[Milestone]
    """Scores of benchmarks so far."""
    loss: float | None = None
    """Training loss in the last row of metrics."""
    world_size: int = 1
    """Number of ranks that trained."""
    user_callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of the user's callbacks, by their ``state_key``."""
    wandb_id: str | None = None
    """The run's id on Weights & Biases."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {
            "lengths": [reach.to_dict() for reach in self.lengths],
            "benchmarks": [milestone.to_dict() for milestone in self.benchmarks],
        }


def run_state(state: dict[str, Any]) -> RunState:
    """Return the part of ``state.json`` that training resumes from."""
    return TypeAdapter(RunState).validate_python(state)
