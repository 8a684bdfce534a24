"""Exit codes: an error that a person can mend is one line, without a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TextIO

from trainer.common.errors import REQUEUE_EXIT_CODE, PreemptedError, UserError, disk_problem
from trainer.common.processes import requeue, tell_torchrun
from trainer.common.words import same_command

MISTAKE = 2
"""The user can mend it."""
CLOSED_PIPE = 141
"""128 and the number of SIGPIPE, as in a shell: the reader of the output has gone."""
STOPPED = 143
"""128 and the number of SIGTERM."""


@contextmanager
def exit_codes(words: Collection[str] = ()) -> Iterator[None]:
    """Exit with 2 for a user's mistake or a disk's error, 130 when interrupted, 85 when stopped to
    be resumed, 143 when stopped with nothing kept, 141 when the reader of the output has gone.

    ``words``: the command line, which may have ``overwrite=true``.
    """
    command = same_command("overwrite=true" in words)
    for stream in (sys.stdout, sys.stderr):  # a terminal may lack a character
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        sys.exit(CLOSED_PIPE)
    except UserError as error:
        if not tell_torchrun(error):
            _say(*(f"error: {problem}" for problem in error.problems))
        sys.exit(MISTAKE)
    except OSError as error:  # a full disk, a forbidden directory
        if (problem := disk_problem(error)) is None:
            raise
        _say(f"error: {problem}")
        _discard(sys.stdout)
        sys.exit(MISTAKE)
    except PreemptedError as stop:
        resumed, anew = f"{command} goes on from there", "the same command begins anew"
        _say(f"{stop} {(resumed if stop.is_resumable else anew).capitalize()}.")
        if stop.is_resumable and stop.requeues and os.environ.get("RANK", "0") == "0":
            requeue()
        sys.exit(REQUEUE_EXIT_CODE if stop.is_resumable else STOPPED)
    except KeyboardInterrupt:
        _say(f"Interrupted; {command} goes on from what was kept, if anything.")
        sys.exit(130)


@contextmanager
def leaving_ranks() -> Iterator[None]:
    """End the process immediately if an error leaves its process group open: at an ordinary exit
    threads may wait for other ranks forever."""
    try:
        yield
    except BaseException as error:
        group = sys.modules.get("torch.distributed")  # not imported for every command
        if group is None or not group.is_initialized():
            raise
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def _say(*lines: str) -> None:
    """Print lines to standard error, if it can be written."""
    try:
        for line in lines:
            print(line, file=sys.stderr)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop the buffered output of a stream: Python would fail to write it at exit, and say so."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
