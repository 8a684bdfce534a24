"""Schema of a checkpoint's ``state.json``: fields of every reader, and fields of training.

The file may be damaged or forged: everything that is read from it is declared here.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from tokenizers import Tokenizer

from trainer.common.errors import UserError, is_transient
from trainer.common.fields import adapter
from trainer.common.formats import FIRST, Count, first_problem, read_plain
from trainer.data.tokenizer import end_of_text, vocabulary_size
from trainer.evaluation.results import Milestone, Reach
from trainer.model.config import ModelConfig
from trainer.positional.stored_layout import StoredLayout, in_todays_form, read_layout
from trainer.runs.metrics_file import BUCKETS

STATE = "state.json"
FORMAT = 2
"""Number of the format of a checkpoint: fields of ``state.json``, and names of tensors.

Format 1 named fields after classes; it is read as well.
"""
RECALIBRATION = "recalibrate"
"""The phase after the drop of a run that names no phases."""

Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


@dataclass(frozen=True)
class SavedData:
    """Fingerprints of the text that was read."""

    corpus: str
    order: str
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Description:
    """Fields of ``state.json`` that evaluation, generation and export need."""

    step: Count
    model: ModelConfig
    layout: StoredLayout
    tokenizer: str
    config: dict[str, Any]
    token_files: dict[str, str] = field(default_factory=dict)
    end_of_text: Count | None = None
    format: int = FIRST
    tokens: Count = 0
    loss: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    data: SavedData | None = None
    numerics: str = ""
    lengths: list[dict[str, Any]] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SavedSpikes:
    """Counter of spikes: steps seen, spikes since the last logged row, and the last values."""

    seen: Count
    count: float | Pair
    last: list[Pair] | None


Sums = Annotated[list[Pair], Field(min_length=1 + BUCKETS, max_length=1 + BUCKETS)]


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
    sums: Sums | None
    spikes: SavedSpikes


@dataclass(frozen=True)
class Effect:
    """Effect of a change at the start of a phase on the held-out loss.

    ``sequences``: the losses ``before``, ``after`` and at the ``end``, of each sequence. Earlier
    versions kept neither ``what`` nor ``sequences``.
    """

    step: Count | None = None
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

    data: SavedData
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
    numerics: str = ""
    """What was computed in which dtype, for people."""
    loss: float | None = None
    """Training loss in the last row of metrics."""
    finite_parameters: bool = True
    """Whether all parameters are finite."""
    world_size: Count = 1
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


def read_saved(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's ``state.json`` and validate it; return its plain values.

    Fields of format 1 are renamed.

    Raises:
        UserError: the values are damaged or contradict each other.
    """
    try:
        state = read_plain(checkpoint / STATE)
        if isinstance(state, dict) and state.get("format", FIRST) == FIRST:
            state = _from_first_format(state)
        _check(state)
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error
    return state


def read_run_state(checkpoint: Path, state: dict[str, Any]) -> RunState:
    """Return the state that training resumes from; ``state``: the result of :func:`read_saved`.

    Raises:
        UserError: something that training needs is damaged.
    """
    try:
        run_state: RunState = _as(RunState, state)
        if re.fullmatch(r"step-\d+", checkpoint.name) and int(checkpoint.name[5:]) != state["step"]:
            raise ValueError(f"step: {state['step']}")
    except ValueError as error:
        raise _damaged(checkpoint, error) from error
    return run_state


def _from_first_format(state: dict[str, Any]) -> dict[str, Any]:
    """Rename the fields that format 1 named after classes and private attributes."""
    state = dict(state)
    if "callbacks" in state:
        callbacks = _dictionary("callbacks", state.pop("callbacks"))
        metrics, transitions, lengths, benchmarks = (
            _dictionary(f"callbacks.{name}", callbacks.get(name, {}))
            for name in ("Metrics", "Transitions", "Lengths", "Benchmarks")
        )
        if "Transitions" not in callbacks:  # the single drop of versions without phases
            drop = callbacks.get("Drop")
            transitions = {"effects": {RECALIBRATION: drop} if drop else {}}
        state |= {
            "effects": transitions.get("effects"),
            "lengths": lengths.get("history", []),
            "benchmarks": benchmarks.get("history", []),
        }
        if "pending" in metrics:
            state["pending_metrics"] = metrics["pending"]
    if isinstance(tally := state.get("tally"), dict):
        state["tally"] = {FIRST_TALLY.get(key, key): value for key, value in tally.items()}
    if "loggers" in state:
        state["wandb_id"] = _dictionary("loggers", state.pop("loggers")).get("WandbLogger")
    return state


FIRST_TALLY = {
    "_loss": "loss",
    "_steps": "steps",
    "_skipped": "skipped",
    "_in_a_row": "skipped_in_a_row",
    "_sums": "sums",
}
"""Names of the tally's fields, by those of format 1."""


def _dictionary(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected a dictionary")
    return value


def _damaged(checkpoint: Path, error: Exception) -> UserError:
    message = f"{STATE} of {checkpoint.name!r} is damaged: {error}."
    return UserError.at("checkpoint", message, transient=is_transient(error))


def _as(kind: type[Any], state: dict[str, Any]) -> Any:
    try:
        return adapter(kind).validate_json(json.dumps(state), strict=True)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def _check(state: Any) -> None:
    """Check the description of the model; raise ``ValueError`` if it describes none."""
    if not isinstance(state, dict):
        raise ValueError("layout: expected the encodings of all layers")
    layout = in_todays_form(state.get("layout"))
    saved: Description = _as(Description, {**state, "layout": layout})
    model = saved.model
    if problems := model.problems():
        raise ValueError(f"{problems[0].key}: {problems[0].message}")
    if model.vocab_size is None:
        raise ValueError("model.vocab_size: expected a number")
    shape = model.num_hidden_layers, model.num_key_value_heads, model.head_size
    for layer in read_layout(layout, *shape).layers:
        if layer.qk_norm and model.qk_norm.when == "never":
            raise ValueError("layout: query and key norms are on, and the model has none")
    _check_tokenizer(saved.tokenizer, saved_eos(state), model.vocab_size)


def saved_eos(state: dict[str, Any]) -> tuple[int, ...]:
    """Return the id of the token after documents, for
    :func:`~trainer.data.tokenizer.end_of_text`; empty for an earlier version's checkpoint, whose
    tokenizer names it."""
    end = state.get("end_of_text")
    return () if end is None else (end,)


def _check_tokenizer(text: str, eos: tuple[int, ...], vocab_size: int) -> None:
    try:
        tokenizer = Tokenizer.from_str(text)
        if tokenizer.id_to_token(end_of_text(tokenizer, eos)) is None:
            raise ValueError(f"it has no token {eos[0]}, the end of a text")
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"tokenizer: {error}") from None
    if (size := vocabulary_size(tokenizer)) > vocab_size:
        raise ValueError(f"tokenizer: it has {size} tokens, the model {vocab_size} embeddings")
