"""``run.json``: says that a directory is a run of this program, and in which format."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.common.errors import UserError
from trainer.formats import check_format, read_plain
from trainer.report.atomic import write_atomically

MARK = "run.json"
FORMAT = 1
PROGRAM = "unrope"


def write_mark(directory: Path) -> None:
    """Mark a directory as a run."""
    write_atomically(directory / MARK, json.dumps({"program": PROGRAM, "format": FORMAT}) + "\n")


def check_mark(directory: Path, key: str = "run_dir") -> None:
    """Refuse a run of a newer format; those of before there was a mark have the first.

    ``key``: what named the directory.

    Raises:
        UserError: a newer version of this program wrote the directory, or the mark is damaged.
    """
    mark = directory / MARK
    if not mark.exists():
        return
    try:
        content = read_plain(mark)
        found, program = content["format"], content.get("program")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError.at(
            key, f"{str(mark)!r} is damaged; it should hold a format number."
        ) from None
    if program != PROGRAM:
        raise UserError.at(key, f"{str(mark)!r} is of another program, {program!r}.")
    check_format(found, FORMAT, key, repr(str(directory)), "choose another run")
