"""The options among the words of a command line: what begins with a hyphen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.common.errors import Problem, UserError, did_you_mean

COMPLETION = "--shell-completion"
HYDRA = ("--cfg", "--info", "--hydra-help", COMPLETION)
"""Options that Hydra answers by itself."""


@dataclass(frozen=True)
class Options:
    """What stands beside the overrides.

    ``flags``: those of the command's own that were given. ``hydra``: the words of options that
    Hydra answers. ``problems``: a sentence for every option that does not exist.
    """

    help: bool
    multirun: bool
    config_dir: Path | None
    flags: tuple[str, ...]
    hydra: tuple[str, ...]
    problems: tuple[Problem, ...]


def split_options(words: Sequence[str], flags: Sequence[str] = ()) -> tuple[Options, list[str]]:
    """The options among the words, and the overrides.

    Raises:
        UserError: an option lacks what belongs to it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--info", "-i", const="all", nargs="?")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument(COMPLETION, "-sc", action="store_true")
    for flag in flags:
        parser.add_argument(flag, action="store_true", dest=flag)
    names = [name for action in parser._actions for name in action.option_strings]
    try:
        given, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UserError.at(
            (error.argument_name or "").split("/")[0], f"{error.message}."
        ) from error
    overrides = [word for word in rest if not word.startswith("-")]
    hydra = [option for option in HYDRA if getattr(given, option[2:].replace("-", "_"))]
    if given.cfg:
        hydra += [given.cfg, *(["--package", given.package] if given.package else [])]
        hydra += ["--resolve"] if given.resolve else []
    elif given.info:
        hydra.append(given.info)
    problems = [
        Problem("", f"unknown option {word!r}.", did_you_mean(word, names))
        for word in rest
        if word.startswith("-")
    ]
    if (given.package or given.resolve) and not given.cfg:
        problems.append(Problem("--package, --resolve", "only with --cfg job."))
    if given.multirun and hydra:
        problems.append(Problem("--multirun", f"it cannot be joined with {hydra[0]}."))
    own = overrides[:1] == ["help"]
    return Options(
        help=given.help or own,
        multirun=given.multirun,
        config_dir=Path(given.config_dir) if given.config_dir is not None else None,
        flags=tuple(flag for flag in flags if getattr(given, flag)),
        hydra=tuple(hydra),
        problems=tuple(problems),
    ), overrides[own:]
