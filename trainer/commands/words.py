"""The overrides of a command line, each looked at alone."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from contextlib import suppress

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer.common.errors import Problem


def parse_words(
    words: Sequence[str], experiments: Collection[str] = ()
) -> tuple[list[Override], list[Problem]]:
    """The overrides, and a sentence for each word that is not well formed. Where it only lacks
    quotes, the override that it means is among them, so that nothing else is said to be missing."""
    parser = OverridesParser.create()
    found, problems = [], []
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            problems.append(_no_override(word, experiments))
            with suppress(HydraException):
                meant = _quoted(word)
                found.append(parser.parse_override(meant))
                problems[-1] = Problem(
                    repr(word), f"a value with such characters stands in quotes: '{meant}'."
                )
        else:
            if override.key_or_group:
                found.append(override)
            else:
                problems.append(_no_override(word, experiments))
    return found, problems


def _no_override(word: str, experiments: Collection[str]) -> Problem:
    if word in experiments:
        return Problem(repr(word), f"an experiment is named by +experiment={word}.")
    quotes = "" if "=" in word else "; a value with blanks needs quotes, as in 'label=two words'"
    return Problem(repr(word), f"expected key=value, for instance seed=1{quotes}.")


def _quoted(word: str) -> str:
    """The word with its value in quotes; as it is where more is wrong with it."""
    key, equals, value = word.partition("=")
    closed = all(word.count(a) == word.count(b) for a, b in ("[]", "{}", "()"))
    if not equals or not value or not closed:
        return word
    if value.startswith("[") and value.endswith("]"):
        value = ",".join(f'"{one.strip()}"' for one in value[1:-1].split(","))
        value = f"[{value}]"
    else:
        value = f'"{value}"'
    return f"{key}={value}"


def is_for_hydra(override: Override) -> bool:
    """Whether it sets something of Hydra itself, such as its launcher."""
    return override.key_or_group.partition(".")[0].partition("/")[0] == "hydra"


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """The words of every job: one for each choice among ``seed=0,1`` and its like.

    What a sweeper draws by itself, such as ``interval(0,1)``, is left to it.
    """
    choices: list[list[str]] = []
    for override in overrides:
        if override.is_discrete_sweep():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        elif not override.is_sweep_override():
            choices.append([str(override.input_line)])
    return [list(job) for job in itertools.product(*choices)]
