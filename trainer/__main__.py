"""``python -m trainer [command] key=value ...``, also installed as ``unrope``."""

from __future__ import annotations

import importlib
import sys

import trainer
from trainer.commands import COMMANDS
from trainer.commands.exit_codes import exit_codes, leaving_ranks
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.hydra.running import run_command, split_flags
from trainer.common.errors import UserError, nearest


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit with 0, with 2 for a mistake of the user's, 85 when stopped to be
    continued, 130 when interrupted."""
    words = sys.argv[1:] if arguments is None else arguments
    if "--version" in words:
        print(f"unrope {trainer.__version__}")
        return
    with leaving_ranks(), exit_codes(words):
        command, words = split_command(words)
        run_command(importlib.import_module(f"trainer.commands.{command}").COMMAND, words)


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """Split the command line into a command, ``train`` if none is named, and its arguments.

    ``help WORDS`` is read as ``WORDS --help``.

    Raises:
        UserError: the first word is neither an override, an option nor a command.
    """
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    first = words[0] if words else ""
    if first in COMMANDS:
        return first, words[1:]
    if not first or "=" in first or first.startswith(("-", "+", "~")):
        return "train", words
    flags, _ = split_flags(words, ())
    experiments = ConfigFiles(flags.config_dir).options("experiment")
    near = nearest(first, [*COMMANDS, *experiments])
    if near in experiments:
        raise UserError.at("", f"unknown command {first!r}.", f"Did you mean +experiment={near}?")
    hint = "" if near is None else f" Did you mean {near!r}?"
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}} {text}" for name, text in COMMANDS.items())
    raise UserError.at("", f"unknown command {first!r}.{hint} The commands:\n{listed}")


if __name__ == "__main__":
    main()
