"""Jobs that Hydra runs once every word is right: sweeps through its launcher, and ``--cfg``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
    """Check the words of all jobs, then run them all.

    Raises:
        UserError: with the problems of all jobs, each once; none was started.
    """
    overrides, malformed = parse_words(words)
    jobs = expand([override for override in overrides if not is_for_hydra(override)], files)
    problems = [*known, *malformed]
    words_by_output: dict[str, list[str]] = {}
    for job in jobs:
        try:
            composed = compose_words(job, command.root, files)
            output = command.output(command.read(composed))
        except UserError as error:
            problems += error.problems
            continue
        if output is None:
            continue
        if output in words_by_output:
            message = f"several jobs would write {output!r}; let its name hold what differs"
            word = _distinct_output(command, composed, overrides, files)
            example = "" if word is None else f", for instance {shlex.quote(word)}"
            problems.append(Problem("--multirun", f"{message}{example}."))
        words_by_output[output] = job
    raise_all(problems)
    settings = [str(override.input_line) for override in overrides if is_for_hydra(override)]
    first = plain_groups(jobs[0], files.default_groups(command.root))
    # Also checks Hydra's settings, and so is done for every command.
    own_settings = compose_with_hydra(command.root, [*first, *settings], files).hydra
    sweep = own_settings.sweep
    several = ["--multirun", *words]
    drawn = [o for o in overrides if o.is_sweep_override() and not o.is_discrete_sweep()]
    if own_settings.sweeper._target_.endswith("BasicSweeper"):
        raise_all(
            Problem(
                str(override.input_line),
                "Hydra's basic sweeper draws no values; list them, as in "
                f"{override.get_key_element()}=1,2, or choose a sweeper that does, such as "
                "hydra/sweeper=optuna.",
            )
            for override in drawn
        )
    if command.together is None or len(words_by_output) < 2 or drawn:
        if exit_code := _main(command, several, files):
            sys.exit(exit_code)
        return
    place = open_sweep(Path(sweep.dir), _swept(words_by_output))
    try:
        exit_code = _main(command, several, files, place)
    except SystemExit as stop:
        if stop.code != 1:  # interrupted, or asked to stop
            raise
        exit_code = 1
    command.together(place)
    if exit_code:
        sys.exit(exit_code)


def show(
    command: Command[Any],
    words: Sequence[str],
    files: ConfigFiles,
    known: Sequence[Problem],
    flags: Sequence[str],
) -> None:
    """Let Hydra answer ``flags``, such as ``--cfg job``.

    Raises:
        UserError: a word is wrong.
    """
    problems: Sequence[Problem] = known
    if COMPLETION not in flags:  # its words are no overrides
        overrides, malformed = parse_words(words)
        plain = [str(override.input_line) for override in overrides if not is_for_hydra(override)]
        problems = compose_words(plain, command.root, files, [*known, *malformed]).problems
    raise_all(problems)
    _main(command, [*flags, *words], files)


def _distinct_output(
    command: Command[Any], composed: Composed, overrides: Sequence[Override], files: ConfigFiles
) -> str | None:
    """Return a word that gives each job of a sweep its own directory, if there is one.

    An experiment may fix the directory, which then does not follow from the name.
    """
    output, *names = command.output_keys
    groups = files.groups()
    swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
    parts = [f"${{{name}.name}}" if name in groups else f"${{{name}}}" for name in swept]
    for key in (*names, output):
        word = f"{key}={'_'.join([composed.values[key], *parts])}"
        others = [other for other in composed.words if not other.startswith(f"{key}=")]
        with suppress(UserError):  # an experiment has no name to refer to
            renamed = compose_words([*others, word], command.root, files)
            if renamed.values[output] != composed.values[output]:
                return word
    return None


def _swept(words_by_output: dict[str, list[str]]) -> list[Swept]:
    """Return the runs of a sweep, by their directories, each with the words that only it has."""
    differing = [len(set(words)) > 1 for words in zip(*words_by_output.values(), strict=True)]
    runs = []
    for output, words in words_by_output.items():
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
    """Run the jobs with Hydra; return the exit code of those that failed, or 0.

    After a mistake in one of them the next one of this process starts all the same. ``place``:
    directory of a sweep, where its jobs record their failures.
    """
    launcher, exit_code = os.getpid(), 0

    @hydra.main(version_base=None, config_path=str(config_directory()), config_name=command.root)
    def job(composed: DictConfig) -> None:
        nonlocal exit_code
        try:
            with exit_codes(words):
                request = command.read(Composed.from_hydra(composed))
                with (
                    noting_failure(place, str(command.output(request))) if place else nullcontext()
                ):
                    command.execute(request)
        except SystemExit as stop:
            if stop.code != MISTAKE or os.getpid() != launcher:
                raise
            exit_code = MISTAKE

    directory = [] if files.user_directory is None else ["--config-dir", str(files.user_directory)]
    plain = plain_groups(words, files.default_groups(command.root))
    with _called_with(["unrope", *directory, *plain]):
        job()
    return exit_code


@contextmanager
def _called_with(words: list[str]) -> Iterator[None]:
    """Let the process appear to be started with ``words``, from which Hydra reads its overrides."""
    original = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = original
