"""The one path from a command's words to its work: help, composition, checks, one job or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.commands.command import Command
from trainer.commands.config_files import ConfigFiles
from trainer.commands.help import help_text
from trainer.commands.options import split_options
from trainer.errors import UserError


def run_command(command: Command[Any], words: Sequence[str]) -> None:
    """Do what the words say.

    Raises:
        UserError: with every problem, of all jobs; nothing was started.
    """
    options, overrides = split_options(words, command.flags)
    files = ConfigFiles(options.config_dir)
    if options.help:
        print(
            help_text(
                command.root,
                command.help,
                overrides,
                files,
                described=command.described,
                several=not command.alone,
            )
        )
        return
    # Here, so that help needs none of Hydra.
    from trainer.commands import hydra_main
    from trainer.commands.configuration import compose_words

    root, problems = command.root, options.problems
    if options.multirun and command.alone:
        raise UserError(*problems, f"--multirun: {command.alone}")
    if options.multirun:
        hydra_main.run_jobs(command, overrides, files, problems)
    elif options.hydra:
        hydra_main.show(command, overrides, files, problems, options.hydra)
    else:
        composed = compose_words(overrides, root, files, problems, options.flags)
        command.execute(command.read(composed))
