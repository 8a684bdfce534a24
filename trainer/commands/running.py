"""The one path from a command's words to its work: help, composition, checks, one job or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.commands.command import Command
from trainer.commands.config_files import ConfigFiles
from trainer.commands.help import help_text
from trainer.commands.options import split_options
from trainer.common.errors import Problem, UserError


def run_command(command: Command[Any], words: Sequence[str]) -> None:
    """Do what the words of a command line say.

    Raises:
        UserError: with every problem, of all jobs; nothing was started.
    """
    key = f"{command.verbatim}="
    verbatim = [word for word in words if command.verbatim and word.startswith(key)]
    others = [word for word in words if word not in verbatim]
    options, overrides = split_options(others, command.flags)
    bare = [word for word in overrides if command.bare and "=" not in word]
    overrides = [word for word in overrides if word not in bare]
    files, problems = ConfigFiles(options.config_dir), options.problems
    if options.help:
        several = not command.single
        about = command.root, command.help, overrides, files, command.described
        print(help_text(*about, several=several))
        return
    # Here, so that help needs none of Hydra.
    from trainer.commands import hydra_main
    from trainer.commands.configuration import compose_words

    if options.multirun and command.single:
        raise UserError(*problems, Problem("--multirun", command.single))
    if options.multirun:
        hydra_main.run_jobs(command, overrides, files, problems)
    elif options.hydra:
        hydra_main.show(command, overrides, files, problems, options.hydra)
    else:
        composed = compose_words(overrides, command.root, files, problems)
        given = (*(word.removeprefix(key) for word in verbatim), *bare)
        request = command.read(replace(composed, flags=options.flags, verbatim=given))
        if command.wordless is not None and not words:
            raise UserError.at("", command.wordless(request))
        command.execute(request)
