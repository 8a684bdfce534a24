"""The overrides of a command line, each looked at alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException


def parse_words(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides that are well formed, and a sentence for each that is not."""
    parser = OverridesParser.create()
    found, problems = [], []
    for word in words:
        try:
            found.append(parser.parse_override(word))
        except HydraException:
            problems.append(f"{word!r}: {_how(word)}")
    return found, problems


def _how(word: str) -> str:
    """What a word that is not well formed should have been."""
    key, equals, value = word.partition("=")
    closed = all(word.count(a) == word.count(b) for a, b in ("[]", "{}", "()"))
    if not equals or not value or not closed:
        return "expected key=value, for instance seed=1."
    if value.startswith("[") and value.endswith("]"):
        value = ",".join(f'"{one.strip()}"' for one in value[1:-1].split(","))
        value = f"[{value}]"
    else:
        value = f'"{value}"'
    return f"a value with such characters stands in quotes: '{key}={value}'."


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
