"""``python -m trainer [command] key=value ...``, also installed as ``unrope``."""

from __future__ import annotations

from trainer.common import spinning  # noqa: F401 - before anything that may load torch

# isort: split
import os
import sys
from difflib import get_close_matches

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

import trainer
from trainer.commands import COMMANDS, help_text, run_command
from trainer.common.errors import UserError


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    An error of the command line, of files or of libraries is printed in a line and the exit code is
    1; ``HYDRA_FULL_ERROR=1`` shows the traceback, as any other error does.
    """
    words = sys.argv[1:] if arguments is None else arguments
    name = words[0] if words and words[0].isalpha() else "train"
    words = words[1:] if words[:1] == [name] else words
    if name not in COMMANDS:
        print(f"error: expected a command of {', '.join(COMMANDS)}, got {name!r}", file=sys.stderr)
        sys.exit(1)
    if "--version" in words:
        print(f"unrope {trainer.__version__}")
        return
    if {"--help", "-h"} & {*words}:
        print(help_text(name))
        return
    shows_traceback = os.environ.get("HYDRA_FULL_ERROR", "")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors
    of_user = ValueError, OSError, LookupError, ImportError, HydraException, OmegaConfBaseException
    try:
        run_command(name, words)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        if shows_traceback or not isinstance(error, of_user):
            leave_ranks(error)
            raise
        print(explain(error), file=sys.stderr)
        leave_ranks(SystemExit(1))
        sys.exit(1)
    finally:
        os.environ["HYDRA_FULL_ERROR"] = shows_traceback


def explain(error: BaseException) -> str:
    """Return an error's message as lines; the nearest key of one that is unknown follows."""
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
    text = str(cause)
    if isinstance(cause, HydraException | OmegaConfBaseException):
        lines = text.partition("\nConfig search path")[0].splitlines()
        text = ", ".join(line.strip() for line in lines if line and "object_type=" not in line)
    elif not isinstance(cause, UserError):
        text = f"{type(cause).__name__}: {text}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        known = [str(key) for key in cause.parent_node]
        for near in get_close_matches(str(cause.key), known, 1):
            text += f"; the nearest is {near!r}"
    return "\n".join(f"error: {line}" for line in text.splitlines())


def leave_ranks(error: BaseException) -> None:
    """End the process immediately if the error leaves its process group open: at an ordinary exit
    threads may wait for other ranks forever."""
    group = sys.modules.get("torch.distributed")  # not imported for every command
    if group is None or not group.is_initialized():
        return
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


if __name__ == "__main__":
    main()
