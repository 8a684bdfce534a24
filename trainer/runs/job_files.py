"""What a run tells the batch script that started it, by files that the environment names.

Exit codes do not reach the script: torchrun answers 1 whatever those of its workers were.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


def ask_for_requeue() -> None:
    """Ask that the job be started again: an empty file at ``UNROPE_REQUEUE_FILE``."""
    _write("UNROPE_REQUEUE_FILE", "")


def say_mistake() -> None:
    """Say that what failed would fail again: an empty file at ``UNROPE_MISTAKE_FILE``."""
    _write("UNROPE_MISTAKE_FILE", "")


def say_run_directory(directory: Path) -> None:
    """Say where the run lies, and so its checkpoints and its failures: in ``UNROPE_RUN_FILE``."""
    _write("UNROPE_RUN_FILE", f"{directory.absolute()}\n")


def tell_torchrun(error: Exception) -> bool:
    """Put what is wrong into the summary that torchrun ends with, behind a traceback of its own.

    Returns whether that is enough: the first worker of a machine says it on the terminal for all.
    """
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return False
    message = {"message": str(error), "extraInfo": {"timestamp": int(time.time())}}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _write(variable: str, text: str) -> None:
    if path := os.environ.get(variable):
        Path(path).write_text(text, encoding="utf-8")
