"""LongRoPE's factors as they are published: read from a file in Hugging Face's form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.formats import read_plain

KEY = "evaluation.longrope.factors"


@dataclass(frozen=True)
class PublishedFactors:
    """``short``, ``long``: what every pair's frequency is divided by in sequences up to the length
    that the model was trained at, and in longer ones. ``attention``: what rotated channels are
    multiplied with, if given; else it follows from ``factor``, the extension that the factors are
    for, and that from the evaluated length where it is not given either. ``original_length``: that
    of training, if given."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    attention: float | None = None
    factor: float | None = None
    original_length: int | None = None

    def attention_at(self, factor: float, training_length: int) -> float:
        """sqrt(1 + ln s / ln C) unless it is given (LongRoPE, as transformers computes it)."""
        if self.attention is not None:
            return self.attention
        s = max(factor if self.factor is None else self.factor, 1.0)
        return math.sqrt(1 + math.log(s) / math.log(training_length))


def read_factors(file: str) -> PublishedFactors:
    """From a JSON file: ``rope_scaling`` (in transformers 5 ``rope_parameters``) with
    ``short_factor`` and ``long_factor``, or a whole config.json with it.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        content = read_plain(Path(file))
    except OSError as error:
        raise UserError(f"{KEY}: cannot read {file!r}: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{KEY}: {file!r}: {error}.") from None
    whole = content if isinstance(content, dict) else {}
    nested = next((whole[key] for key in ("rope_parameters", "rope_scaling") if key in whole), None)
    found = nested if isinstance(nested, dict) else whole
    short, long = found.get("short_factor"), found.get("long_factor")
    if not (_are_factors(short) and _are_factors(long) and len(short) == len(long)):
        raise UserError(
            f"{KEY}: {file!r} needs short_factor and long_factor, lists of as many positive "
            "numbers, as rope_scaling has them in a config.json of Hugging Face."
        )
    numbers = {
        key: {**whole, **found}.get(key)
        for key in (
            *("attention_factor", "factor"),
            *("max_position_embeddings", "original_max_position_embeddings"),
        )
    }
    for key, value in numbers.items():
        if value is not None and not _is_positive(value):
            raise UserError(f"{KEY}: {file!r}: {key}: expected a positive number, got {value!r}.")
    attention, factor, longest, original = numbers.values()
    if factor is None and longest and original:
        factor = longest / original
    return PublishedFactors(tuple(short), tuple(long), attention, factor, original)


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _are_factors(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_positive, value))
