"""The one path from a command's words to its work: help, composition, checks, one job or many."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.commands.hydra.command import COMPLETION, Command
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.hydra.help import help_text
from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.common.words import override_value


def run_command(command: Command[Any], words: Sequence[str]) -> None:
    """Do what the words of a command line say.

    Raises:
        UserError: with every problem, of all jobs; nothing was started.
    """
    key = f"{command.verbatim}="
    verbatim = [word for word in words if command.verbatim and word.startswith(key)]
    others = [word for word in words if word not in verbatim]
    options, overrides = split_options(others, command.flags)
    bare = [word for word in overrides if command.bare and not _is_setting(word)]
    overrides = [word for word in overrides if word not in bare]
    files, problems = ConfigFiles(options.config_dir), [*options.problems]
    stray: list[str] = []
    if command.subject:
        overrides, stray = with_subject(command.subject, overrides)
        problems += [_stray(word, command, others) for word in stray]
    if options.help:
        several = not command.single
        about = command.root, command.help, overrides, files, command.described
        print(help_text(*about, several=several))
        return
    # Here, so that help needs none of Hydra.
    from trainer.commands.hydra import jobs as hydra_main
    from trainer.commands.hydra.composing import compose_words, plugin_encodings

    if command.alone and (processes := _processes()) > 1:
        raise UserError.at(
            "", f"this command uses one process, and {processes} were started; start one."
        )
    encodings = plugin_encodings(overrides, files, problems)
    files = replace(files, encodings=encodings)
    if options.multirun and command.single:
        raise UserError(*problems, Problem("--multirun", command.single))
    # A stray word may be meant as the verbatim key, which is then not missing as well.
    given = (*(word.removeprefix(key) for word in verbatim), *bare)
    given = (*given, *(stray if command.verbatim else ()))
    if options.multirun:
        hydra_main.run_jobs(command, overrides, files, problems)
    elif options.hydra:
        if command.completed is not None and COMPLETION not in options.hydra:
            composed = compose_words(overrides, command.root, files, problems)
            overrides = [*command.completed(replace(composed, verbatim=given))]
        hydra_main.show(command, overrides, files, problems, options.hydra)
    else:
        composed = compose_words(overrides, command.root, files, problems)
        request = command.read(replace(composed, flags=options.flags, verbatim=given))
        if command.wordless is not None and not words:
            raise UserError.at("", command.wordless(request))
        command.execute(request)


def _processes() -> int:
    """Return the number of processes that torchrun or srun started, without importing torch."""
    name = "WORLD_SIZE" if "RANK" in os.environ else "SLURM_STEP_NUM_TASKS"
    return int(os.environ.get(name, "1"))


def with_subject(key: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides, with ``key=`` before the first word that has none, and all other such
    words."""
    given = next((word for word in words if word.startswith(f"{key}=")), None)
    found, stray = [], []
    for word in words:
        if _is_setting(word) or word.startswith("~"):
            found.append(word)
        elif given is not None:
            stray.append(word)
        else:
            given = f"{key}={override_value(word)}"
            found.append(given)
    return found, stray


def _stray(word: str, command: Command[Any], words: Sequence[str]) -> Problem:
    """Return the problem of a word without a key beside the command's subject."""
    subject = f"{command.subject}="
    given = next((one for one in words if one.startswith(subject)), None)
    if given is None:
        first = next(one for one in words if not _is_setting(one) and one[:1] not in ("~", "-"))
        given = f"{subject}{override_value(first)}"
    meant = ""
    if command.verbatim:
        meant = f"A {command.verbatim} is given as {shlex.quote(f'{command.verbatim}={word}')}."
    return Problem(repr(word), f"expected KEY=VALUE, since {given} is given already.", meant)


def _is_setting(word: str) -> bool:
    """Whether a word is KEY=VALUE, and no existing path with an equals sign in it, runs/lr=0.1."""
    key, equals, _ = word.partition("=")
    return bool(equals) and not ("/" in key and Path(word).exists())


HYDRA = ("--cfg", "--info", "--hydra-help", COMPLETION)
"""Options that Hydra answers by itself."""
DRY_RUN = "--dry-run"
"""An option of other programs; here the command plan does that."""


def _plan(words: Sequence[str]) -> str:
    """Return the command that plans the run of these words."""
    overrides = [word for word in words if not word.startswith("-")]
    return shlex.join(["python", "-m", "trainer", "plan", *overrides])


@dataclass(frozen=True)
class Options:
    """Options beside the overrides."""

    help: bool
    multirun: bool
    config_dir: Path | None
    flags: tuple[str, ...]
    """The command's own flags that were given."""
    hydra: tuple[str, ...]
    """Words of options that Hydra answers."""
    problems: tuple[Problem, ...]
    """Options that do not exist."""


def split_options(words: Sequence[str], flags: Sequence[str] = ()) -> tuple[Options, list[str]]:
    """Split the words into options and overrides.

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
        Problem(DRY_RUN, f"to see what a run needs without starting it: {_plan(rest)}")
        if word == DRY_RUN
        else Problem("", f"unknown option {word!r}.", did_you_mean(word, names))
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
