"""Jobs that Hydra runs once every word is right: sweeps through its launcher, and ``--cfg``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from trainer.commands.exit_codes import MISTAKE, exit_codes
from trainer.commands.hydra.command import COMPLETION, Command
from trainer.commands.hydra.composing import (
    Composed,
    compose_with_hydra,
    compose_words,
    expand,
    is_for_hydra,
    parse_words,
    plain_groups,
)
from trainer.commands.hydra.files import ConfigFiles, config_directory
from trainer.common.errors import Problem, UserError, raise_all
from trainer.runs.sweep import Swept, noting_failure, open_sweep


def run_jobs(
    command: Command[Any], words: Sequence[str], files: ConfigFiles, known: Sequence[Problem]
) -> None:
    """Check the words of all jobs, then start the first.

    Raises:
        UserError: with the problems of all jobs, each once.
    """
    overrides, malformed = parse_words(words)
    jobs = expand([override for override in overrides if not is_for_hydra(override)])
    problems = dict.fromkeys([*known, *malformed])
    outputs: dict[str, list[str]] = {}
    for job in jobs:
        try:
            output = command.output(command.read(compose_words(job, command.root, files)))
        except UserError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        if output in outputs:
            name = _distinct_name(output, overrides, files)
            message = f"several jobs would write {output!r}; let its name hold what differs, for "
            problems |= {Problem("--multirun", f"{message}instance {name}."): None}
        outputs |= {output: job} if output else {}
    raise_all(problems)
    settings = [str(override.input_line) for override in overrides if is_for_hydra(override)]
    first = plain_groups(jobs[0], files.default_groups(command.root))
    composed = compose_with_hydra(command.root, [*first, *settings], files)
    several = ["--multirun", *words]
    drawn = any(o.is_sweep_override() and not o.is_discrete_sweep() for o in overrides)
    if command.together is None or len(outputs) < 2 or drawn:
        _main(command, several, files)
        return
    place = open_sweep(Path(composed.hydra.sweep.dir), _swept(outputs))
    failed = 0
    try:
        failed = _main(command, several, files, place)
    except SystemExit as stop:
        if stop.code != 1:  # interrupted, or asked to stop
            raise
        failed = 1
    command.together(place)
    if failed:
        sys.exit(failed)


def show(
    command: Command[Any],
    words: Sequence[str],
    files: ConfigFiles,
    known: Sequence[Problem],
    options: Sequence[str],
) -> None:
    """Answer ``--cfg job`` and its like.

    Raises:
        UserError: a word is wrong.
    """
    problems: Sequence[Problem] = known
    if COMPLETION not in options:  # its words are no overrides
        overrides, malformed = parse_words(words)
        plain = [str(override.input_line) for override in overrides if not is_for_hydra(override)]
        problems = compose_words(plain, command.root, files, [*known, *malformed]).problems
    raise_all(problems)
    _main(command, [*options, *words], files)


def _distinct_name(output: str, overrides: Sequence[Override], files: ConfigFiles) -> str:
    """Return a word for ``name`` or ``to`` with what a sweep varies, quoted for a shell."""
    groups = files.groups()
    swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
    parts = [f"${{{key}.name}}" if key in groups else f"${{{key}}}" for key in swept]
    key = "name" if Path(output).parent == Path("runs") else "to"
    return shlex.quote(f"{key}={'_'.join([Path(output).name, *parts])}")


def _swept(outputs: dict[str, list[str]]) -> list[Swept]:
    """Return the runs of a sweep, each with the words that only it has."""
    differing = [len(set(words)) > 1 for words in zip(*outputs.values(), strict=True)]
    runs = []
    for output, words in outputs.items():
        distinct = [word for word, differs in zip(words, differing, strict=True) if differs]
        pairs = (word.lstrip("+").partition("=") for word in distinct)
        settings = {key: value for key, _, value in pairs}
        # A run's name and place are settings only if nothing else differs.
        others = {key: settings[key] for key in settings if key not in ("name", "run_dir", "label")}
        runs.append(Swept(output, others or settings))
    return runs


def _main(
    command: Command[Any], words: Sequence[str], files: ConfigFiles, place: Path | None = None
) -> int:
    """Run Hydra. With the ``place`` of a sweep, jobs record their failures there, and a mistake
    in one does not keep the others in this process from starting. Return its exit code, or 0."""
    launcher, failed = os.getpid(), [0]

    @hydra.main(version_base=None, config_path=str(config_directory()), config_name=command.root)
    def job(composed: DictConfig) -> None:
        try:
            with exit_codes():
                request = command.read(Composed.from_hydra(composed))
                with (
                    noting_failure(place, str(command.output(request))) if place else nullcontext()
                ):
                    command.execute(request)
        except SystemExit as stop:
            if place is None or stop.code != MISTAKE or os.getpid() != launcher:
                raise
            failed[0] = MISTAKE

    directory = [] if files.user_directory is None else ["--config-dir", str(files.user_directory)]
    original = sys.argv
    sys.argv = ["unrope", *directory, *plain_groups(words, files.default_groups(command.root))]
    try:
        job()
    finally:
        sys.argv = original
    return failed[0]
