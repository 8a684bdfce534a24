"""Schema of a checkpoint's ``state.json``: what every reader needs, and what training needs.

The file may be damaged or forged: everything that is read from it is declared here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from tokenizers import Tokenizer

from trainer.common.errors import UserError, is_transient
from trainer.common.validation import adapter
from trainer.data.files import one_line
from trainer.data.tokenizer import end_of_text, vocabulary_size
from trainer.evaluation.results import Reach
from trainer.formats import Count, first_problem, read_plain
from trainer.model.config import ModelConfig
from trainer.positional.stored_layout import StoredLayout, in_todays_form, read_layout
from trainer.runs.metrics_file import BUCKETS

STATE = "state.json"
RECALIBRATION = "recalibrate"
"""The phase after the drop of a run that names no phases."""

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


@dataclass(frozen=True)
class SavedData:
    """Fingerprints of the text that was read."""

    corpus: str
    order: str
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Saved:
    """State that evaluation, generation and export need."""

    step: Count
    model: ModelConfig
    layout: StoredLayout
    tokenizer: str
    config: dict[str, Any]
    format: int = 1
    tokens: Count = 0
    loss: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    data: SavedData | None = None
    skips: list[tuple[Count, Count]] = field(default_factory=list)
    ends: dict[str, Count] = field(default_factory=dict)
    numerics: str = ""
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedSpikes:
    """State of the spike counter in ``training/tally.py``."""

    seen: Count
    count: float | Pair
    last: list[Pair] | None


Sums = Annotated[list[Pair], Field(min_length=1 + BUCKETS, max_length=1 + BUCKETS)]


@dataclass(frozen=True)
class SavedTally:
    """Running sums between two logged rows."""

    loss: Annotated[float, Field(alias="_loss")]
    steps: Annotated[float, Field(alias="_steps")]
    skipped: Annotated[float, Field(alias="_skipped")]
    in_a_row: Annotated[float, Field(alias="_in_a_row")]
    sums: Annotated[Sums | None, Field(alias="_sums")]
    spikes: SavedSpikes


@dataclass(frozen=True)
class SavedMetrics:
    """Metrics not logged yet."""

    pending: dict[str, float]
    last_loss: float | None


@dataclass(frozen=True)
class SavedCertificate:
    """Sums of hashes of samples."""

    samples: Hash
    last_step: Hash


@dataclass(frozen=True)
class SavedDrop:
    """Effects of the drops and other changes between phases so far."""

    step: Count | None = None
    what: str | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    loss_end: float | None = None
    sequences: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedTransitions:
    """Results of the changes between phases, and the layout of a drop in progress."""

    effects: dict[str, SavedDrop]
    before: StoredLayout | None = None


@dataclass(frozen=True)
class SavedUntil:
    """Held-out losses of the current phase."""

    phase: str
    losses: list[float]


@dataclass(frozen=True)
class SavedLengths:
    """Length measurements during training."""

    history: list[Reach] = field(default_factory=list)


@dataclass(frozen=True)
class SavedCallbacks:
    """States of the program's own callbacks."""

    Metrics: SavedMetrics
    Drop: SavedDrop | None = None
    Transitions: SavedTransitions | None = None
    Until: SavedUntil | None = None
    Lengths: SavedLengths = field(default_factory=SavedLengths)


@dataclass(frozen=True)
class Resumable:
    """State that training needs in addition to :class:`Saved`."""

    data: SavedData
    tally: SavedTally
    certificate: SavedCertificate
    callbacks: SavedCallbacks
    user_callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_saved(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's ``state.json`` and validate it; return its plain values.

    Raises:
        UserError: the values are damaged or contradict each other.
    """
    try:
        state = read_plain(checkpoint / STATE)
        _check(state)
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error
    return state


def check_resumable(checkpoint: Path, state: dict[str, Any]) -> None:
    """Check that training can resume from a valid state.

    Raises:
        UserError: something that training needs is damaged.
    """
    try:
        _as(Resumable, state)
        if re.fullmatch(r"step-\d+", checkpoint.name) and int(checkpoint.name[5:]) != state["step"]:
            raise ValueError(f"step: {state['step']}")
    except ValueError as error:
        raise _damaged(checkpoint, error) from error


def callback_states(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of the program's own callbacks by name.

    The single drop of earlier versions is read as that of a phase.
    """
    states = dict(state["callbacks"])
    if (drop := states.pop("Drop", None)) is not None:
        effects = {RECALIBRATION: drop} if drop else {}
        states.setdefault("Transitions", {"effects": effects})
    return states


def _damaged(checkpoint: Path, error: Exception) -> UserError:
    message = f"{STATE} of {checkpoint.name!r} is damaged: {error}."
    return UserError.at("checkpoint", message, transient=is_transient(error))


def _as(kind: type[Any], state: dict[str, Any]) -> Any:
    try:
        return adapter(kind).validate_json(json.dumps(state), strict=True)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def _check(state: Any) -> None:
    """Check the description of the model.

    Raises:
        ValueError: it describes no model.
    """
    if not isinstance(state, dict):
        raise ValueError("layout: expected the encodings of all layers")
    layout = in_todays_form(state.get("layout"))
    saved: Saved = _as(Saved, {**state, "layout": layout})
    model = saved.model
    if problems := model.problems():
        raise ValueError(f"{problems[0].key}: {problems[0].message}")
    if model.vocab_size is None:
        raise ValueError("model.vocab_size: expected a number")
    shape = model.num_hidden_layers, model.num_key_value_heads, model.head_size
    for layer in read_layout(layout, *shape).layers:
        if layer.qk_norm and model.qk_norm.when == "never":
            raise ValueError("layout: query and key norms are on, and the model has none")
    _check_tokenizer(saved.tokenizer, model.vocab_size)


def _check_tokenizer(text: str, vocab_size: int) -> None:
    try:
        tokenizer = Tokenizer.from_str(text)
        end_of_text(tokenizer)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"tokenizer: {one_line(error)}") from None
    if (size := vocabulary_size(tokenizer)) > vocab_size:
        raise ValueError(f"tokenizer: it has {size} tokens, the model {vocab_size} embeddings")
