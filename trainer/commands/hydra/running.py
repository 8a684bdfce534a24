"""The one path from a command's words to its work: help, composition, checks, one job or many."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.commands.hydra.command import COMPLETION, Command
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.hydra.help import help_text
from trainer.common.errors import Problem, UserError, did_you_mean, nearest, raise_all
from trainer.common.plugins import added_by_plugins
from trainer.common.words import override_value


def run_command(command: Command[Any], words: Sequence[str]) -> None:
    """Do what the words of a command line say.

    Raises:
        UserError: with every problem, of all jobs; nothing was started.
    """
    key = f"{command.verbatim}="
    verbatim = [word for word in words if command.verbatim and word.startswith(key)]
    others = [word for word in words if word not in verbatim]
    flags, overrides = split_flags(others, command.flags)
    bare = [word for word in overrides if command.bare and not _is_setting(word)]
    overrides = [word for word in overrides if word not in bare]
    files, problems = ConfigFiles(flags.config_dir), [*flags.problems]
    stray: list[str] = []
    if command.subject:
        overrides, stray = with_subject(command.subject, overrides)
        problems += [_stray(word, command, overrides) for word in stray]
    if flags.help:
        added: dict[str, list[str]] = {}
        if any(word.lstrip("+").startswith("plugins=") for word in overrides):
            from trainer.commands.hydra.composing import run_plugins

            raise_all(run_plugins(overrides))
            added = added_by_plugins()
            files = replace(files, encodings=tuple(added.get("positional", ())))
        print(help_text(command, overrides, files, added))
        return
    # Here, so that help needs none of Hydra.
    from trainer.commands.hydra import jobs as hydra_main
    from trainer.commands.hydra.composing import compose_words, plugin_encodings

    processes = _processes()
    if command.alone and processes > 1:
        raise UserError.at(
            "", f"this command uses one process, and {processes} were started; start one."
        )
    if flags.multirun and processes > 1:
        raise UserError.at(
            "--multirun",
            f"it starts all jobs from one process, and {processes} were started; start torchrun "
            "for each job, or an array of jobs (slurm/array.sbatch).",
        )
    encodings = plugin_encodings(overrides, files, problems)
    files = replace(files, encodings=encodings)
    if flags.multirun and command.single:
        raise UserError(*problems, Problem("--multirun", command.single))
    values = (*(word.removeprefix(key) for word in verbatim), *bare)
    # A stray word may be meant as the verbatim key, which is then not missing as well.
    values = (*values, *(stray if command.verbatim else ()))
    if flags.multirun:
        hydra_main.run_jobs(command, overrides, files, problems)
    elif flags.hydra:
        if command.completed is not None and COMPLETION not in flags.hydra:
            composed = compose_words(overrides, command.root, files, problems, command.verbatim)
            overrides = [*command.completed(replace(composed, verbatim=values))]
        hydra_main.show(command, overrides, files, problems, flags.hydra)
    else:
        composed = compose_words(overrides, command.root, files, problems, command.verbatim)
        request = command.read(replace(composed, flags=flags.of_command, verbatim=values))
        if command.wordless is not None and not words:
            raise UserError.at("", command.wordless(request))
        command.execute(request)


def _processes() -> int:
    """Return the number of processes that torchrun or srun started, without importing torch."""
    name = "WORLD_SIZE" if "RANK" in os.environ else "SLURM_STEP_NUM_TASKS"
    return int(os.environ.get(name, "1"))


def with_subject(key: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides, with ``key=`` before the first word without an equals sign, and every
    other such word.

    The first is among the others, too, if ``key`` is set already.
    """
    is_set = any(word.startswith(f"{key}=") for word in words)
    overrides, stray = [], []
    for word in words:
        if _is_setting(word) or word.startswith("~"):
            overrides.append(word)
        elif is_set:
            stray.append(word)
        else:
            is_set = True
            overrides.append(f"{key}={override_value(word)}")
    return overrides, stray


def _stray(word: str, command: Command[Any], overrides: Sequence[str]) -> Problem:
    """Return the problem of a word without a key beside the command's subject."""
    setting = next(word for word in overrides if word.startswith(f"{command.subject}="))
    meant = ""
    if command.verbatim:
        meant = f"A {command.verbatim} is given as {shlex.quote(f'{command.verbatim}={word}')}."
    return Problem(repr(word), f"expected KEY=VALUE, since {setting} is given already.", meant)


def _is_setting(word: str) -> bool:
    """Whether a word is KEY=VALUE and not an existing path such as runs/lr=0.1."""
    key, equals, _ = word.partition("=")
    return bool(equals) and not ("/" in key and Path(word).exists())


HYDRA = ("--cfg", "--info", "--hydra-help", COMPLETION)
"""Flags that Hydra answers by itself."""


def _instead_of_flag(word: str, names: Sequence[str]) -> str:
    """Return the flag that is meant, or how keys are written."""
    flag, _, value = word.partition("=")
    if not flag.startswith("--") or nearest(flag, names) is not None:
        return did_you_mean(flag, names)
    key = flag.removeprefix("--")
    return f"A key has no dashes: {key.replace('-', '_')}={value or 'VALUE'}."


DRY_RUN = "--dry-run"
"""A flag of other programs; this program has the command ``plan`` instead."""


@dataclass(frozen=True)
class Flags:
    """Flags beside the overrides."""

    help: bool
    multirun: bool
    config_dir: Path | None
    of_command: tuple[str, ...]
    """The flags among the words that only this command has."""
    hydra: tuple[str, ...]
    """Words of flags that Hydra answers."""
    problems: tuple[Problem, ...]
    """Flags that do not exist."""


def split_flags(words: Sequence[str], of_command: Iterable[str]) -> tuple[Flags, list[str]]:
    """Split the words into flags and overrides; ``of_command``: flags that only it has.

    Raises:
        UserError: a flag lacks its value.
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
    for flag in of_command:
        parser.add_argument(flag, action="store_true", dest=flag)
    names = [name for action in parser._actions for name in action.option_strings]
    try:
        parsed, unknown = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UserError.at(
            (error.argument_name or "").split("/")[0], f"{error.message}."
        ) from error
    overrides = [word for word in unknown if not word.startswith("-")]
    plan = shlex.join(["python", "-m", "trainer", "plan", *overrides])
    hydra = [flag for flag in HYDRA if getattr(parsed, flag[2:].replace("-", "_"))]
    if parsed.cfg:
        hydra += [parsed.cfg, *(["--package", parsed.package] if parsed.package else [])]
        hydra += ["--resolve"] if parsed.resolve else []
    elif parsed.info:
        hydra.append(parsed.info)
    problems = [
        Problem(DRY_RUN, f"to see what a run needs without starting it: {plan}")
        if word == DRY_RUN
        else Problem("", f"unknown flag {word!r}.", _instead_of_flag(word, names))
        for word in unknown
        if word.startswith("-")
    ]
    if (parsed.package or parsed.resolve) and not parsed.cfg:
        problems.append(Problem("--package, --resolve", "only with --cfg job."))
    if parsed.multirun and hydra:
        problems.append(Problem("--multirun", f"it cannot be joined with {hydra[0]}."))
    is_help = overrides[:1] == ["help"]
    return Flags(
        help=parsed.help or is_help,
        multirun=parsed.multirun,
        config_dir=Path(parsed.config_dir) if parsed.config_dir is not None else None,
        of_command=tuple(flag for flag in of_command if getattr(parsed, flag)),
        hydra=tuple(hydra),
        problems=tuple(problems),
    ), overrides[is_help:]
