"""Files through which a run informs the batch script that started it.

The environment names the files. Exit codes cannot be used: torchrun exits with 1 whatever the exit
codes of its workers.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


def ask_for_requeue() -> None:
    """Request a requeue: create an empty file at ``UNROPE_REQUEUE_FILE``.

    All ranks call this. On NFS the batch script's node may not see for a minute what another node
    creates, and the script decides within seconds after the workers exit.
    """
    _write("UNROPE_REQUEUE_FILE", "")


def say_mistake() -> None:
    """Report that a retry would fail as well: create an empty file at ``UNROPE_MISTAKE_FILE``."""
    _write("UNROPE_MISTAKE_FILE", "")


def say_run_directory(directory: Path) -> None:
    """Write the run directory, with its checkpoints and failures, to ``UNROPE_RUN_FILE``."""
    _write("UNROPE_RUN_FILE", f"{directory.absolute()}\n")


def tell_torchrun(error: Exception) -> bool:
    """Put what is wrong into the summary that torchrun ends with, behind a traceback of its own.

    Returns whether that suffices: the first worker of a machine also prints them to the terminal.
    """
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return False
    message = {"message": str(error), "extraInfo": {"timestamp": int(time.time())}}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _write(variable: str, text: str) -> None:
    if path := os.environ.get(variable):
        Path(path).write_text(text, encoding="utf-8")
