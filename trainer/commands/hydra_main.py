"""What Hydra does by itself once every word is known to be right: several jobs through its sweeper
and launcher, and to show what it composed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import hydra
from omegaconf import DictConfig

from trainer.commands.command import Command
from trainer.commands.config_files import ConfigFiles, config_directory
from trainer.commands.configuration import Composed, compose_with_hydra, compose_words, plain_groups
from trainer.commands.exit_codes import exit_codes
from trainer.commands.options import COMPLETION
from trainer.commands.words import expand, is_for_hydra, parse_words
from trainer.errors import UserError


def run_jobs(
    command: Command[Any], words: Sequence[str], files: ConfigFiles, found: Sequence[str]
) -> None:
    """Check the words of all jobs, then start the first.

    Raises:
        UserError: with the problems of all jobs, each once.
    """
    overrides, malformed = parse_words(words)
    own = [override for override in overrides if is_for_hydra(override)]
    jobs = expand([override for override in overrides if not is_for_hydra(override)])
    problems = dict.fromkeys([*found, *malformed])
    outputs: set[str] = set()
    for job in jobs:
        try:
            output = command.output(command.read(compose_words(job, command.root, files)))
        except UserError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        if output in outputs:
            problems[
                f"--multirun: several jobs would write {output!r}; let its name hold what differs, "
                "for instance 'name=run_${seed}' or 'to=out_${dtype}'."
            ] = None
        outputs |= {output} if output else set()
    if problems:
        raise UserError(*problems)
    settings = [str(override.input_line) for override in own]
    first = plain_groups(jobs[0], files.default_groups(command.root))
    compose_with_hydra(command.root, [*first, *settings], files)
    _main(command, ["--multirun", *words], files)


def show(
    command: Command[Any],
    words: Sequence[str],
    files: ConfigFiles,
    found: Sequence[str],
    options: Sequence[str],
) -> None:
    """Answer ``--cfg job`` and its like.

    Raises:
        UserError: a word is wrong.
    """
    problems: Sequence[str] = found
    if COMPLETION not in options:  # its words are no overrides
        overrides, malformed = parse_words(words)
        plain = [str(override.input_line) for override in overrides if not is_for_hydra(override)]
        problems = compose_words(plain, command.root, files, [*found, *malformed]).problems
    if problems:
        raise UserError(*problems)
    _main(command, [*options, *words], files)


def _main(command: Command[Any], words: Sequence[str], files: ConfigFiles) -> None:
    @hydra.main(version_base=None, config_path=str(config_directory()), config_name=command.root)
    def job(composed: DictConfig) -> None:
        with exit_codes():
            command.execute(command.read(Composed.from_hydra(composed)))

    own = ["--config-dir", str(files.own)] if files.own is not None else []
    given = sys.argv
    sys.argv = ["unrope", *own, *plain_groups(words, files.default_groups(command.root))]
    try:
        job()
    finally:
        sys.argv = given
