"""Published LongRoPE factors, read from a file in Hugging Face's form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import Problem, UserError
from trainer.formats import read_plain

KEY = "evaluation.longrope.factors"
NEEDS = "needs short_factor and long_factor, as rope_scaling has them in a config.json"
LEAST, MOST = 1e-6, 1e12
"""Of every number in it, angles of others are no numbers any more."""
RANGE = "a positive number from 0.000001 to 10^12"


@dataclass(frozen=True)
class PublishedFactors:
    """Published factors.

    ``short``, ``long``: divisors of each pair's frequency in sequences up to the original training
    length, and in longer ones. ``attention``: scale of rotated channels; by default it follows from
    ``factor``, the extension that the factors are for, or else from the evaluated length.
    ``original_length``: the original training length, if given.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    attention: float | None = None
    factor: float | None = None
    original_length: int | None = None

    def attention_at(self, factor: float, training_length: int) -> float:
        """Return the attention factor, by default sqrt(1 + ln s / ln C), as in transformers."""
        if self.attention is not None:
            return self.attention
        s = max(factor if self.factor is None else self.factor, 1.0)
        return math.sqrt(1 + math.log(s) / math.log(training_length))


def read_factors(file: str) -> PublishedFactors:
    """Read factors from a JSON file.

    It contains ``rope_scaling`` (in transformers 5 ``rope_parameters``) with ``short_factor`` and
    ``long_factor``, or is a whole config.json with it.

    Raises:
        UserError: the file does not exist or holds something else.
    """
    try:
        content = read_plain(Path(file))
    except OSError as error:
        raise UserError.at(KEY, f"cannot read {file!r}: {error.strerror}.") from None
    except ValueError as error:
        raise UserError.at(KEY, f"{file!r}: {error}.") from None
    if not isinstance(content, dict):
        raise UserError.at(KEY, f"{file!r} holds no keys; it {NEEDS}.")
    group = next((key for key in ("rope_parameters", "rope_scaling") if key in content), "")
    nested = content.get(group)
    found = nested if isinstance(nested, dict) else content
    if problems := [*_list_problems(found, group)]:
        raise UserError(*(problem.in_file(f"{KEY}: {file!r}") for problem in problems))
    short, long = found["short_factor"], found["long_factor"]
    numbers = {
        key: {**content, **found}.get(key)
        for key in (
            *("attention_factor", "factor"),
            *("max_position_embeddings", "original_max_position_embeddings"),
        )
    }
    for key, value in numbers.items():
        if value is not None and not _is_positive(value):
            raise UserError.at(KEY, f"{file!r}: {key}: expected {RANGE}, got {value!r}.")
    attention, factor, longest, original = numbers.values()
    if factor is None and longest and original:
        factor = longest / original
    return PublishedFactors(tuple(short), tuple(long), attention, factor, original)


def _list_problems(found: dict[str, Any], group: str) -> Iterator[Problem]:
    """What is wrong with the two lists of ``found``, which is the ``group`` of a file, a clause
    each."""
    lists: dict[str, Any] = {key: found.get(key) for key in ("short_factor", "long_factor")}
    if missing := [key for key, value in lists.items() if value is None]:
        where = f"{group} has" if group else "there is"
        yield Problem("", f"{where} no {' and no '.join(missing)}; the file {NEEDS}.")
        return
    sound = True
    for key, value in lists.items():
        if not isinstance(value, list) or not value:
            sound = False
            yield Problem(key, f"expected a list of numbers, got {value!r}.")
        elif wrong := [place for place, one in enumerate(value, 1) if not _is_positive(one)]:
            sound = False
            yield Problem(key, f"number {wrong[0]} is {value[wrong[0] - 1]!r}; expected {RANGE}.")
    if sound and len(lists["short_factor"]) != len(lists["long_factor"]):
        counts = " and ".join(f"{key} has {len(value)}" for key, value in lists.items())
        yield Problem(
            "", f"{counts} numbers; expected as many in both, one for each pair that rotates."
        )


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and LEAST <= value <= MOST
