"""Lines of JSON as typed rows, from a directory, an archive or the hub."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from trainer.common.errors import UserError, first_line
from trainer.interchange.hub import cached_or_downloaded

HUB_NAME = "THUDM/LongBench"
HUB_FILE = "data.zip"
"""Holds ``data/TASK.jsonl``. The data set's loading script would be code of others."""

KEY = "evaluation.longbench.directory"
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One question as the benchmark distributes it.

    ``length``: number of words in total; ``all_classes``: classes of a classification task.
    """

    input: str
    context: str
    answers: Annotated[list[str], Field(min_length=1)]
    length: int
    all_classes: list[str] | None = None


def read_rows(file: Traversable, row: type[T], key: str) -> list[T]:
    """Read and validate the lines of a ``.jsonl`` file, without empty lines and unknown keys.

    Args:
        file: on disk or in an archive.
        row: a dataclass, whose fields are the keys of a line.
        key: configuration key for error messages.

    Raises:
        UserError: the file cannot be read, is empty, or has a malformed line; names the first.
    """
    adapter, rows = TypeAdapter(row), []
    try:
        with file.open("r", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(adapter, line, f"{key}: {str(file)!r} line {number}"))
    except UnicodeDecodeError:
        raise UserError.at(key, f"{str(file)!r} is not UTF-8 text.") from None
    except OSError as error:
        raise UserError.at(key, f"{str(file)!r} cannot be read ({error.strerror}).") from error
    if not rows:
        raise UserError.at(key, f"{str(file)!r} is empty.")
    return rows


def _row(adapter: TypeAdapter[T], line: str, where: str) -> T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first: Any = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError.at(where, f"{f'{place}: ' if place else ''}{first['msg']}.") from None


def root(directory: str | None) -> Traversable:
    """Return what contains ``TASK.jsonl``: the directory, or the archive on the hub or in its
    cache.

    Raises:
        UserError: the archive is unavailable.
    """
    if directory is not None:
        return Path(directory)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = cached_or_downloaded(hf_hub_download, HUB_NAME, HUB_FILE, repo_type="dataset")
        return zipfile.Path(path, "data/")
    except (OSError, ValueError, HfHubHTTPError, zipfile.BadZipFile) as error:
        raise UserError.at(
            KEY,
            f"{HUB_NAME} is not on this machine and could not be loaded from the hub "
            f"({first_line(error)}); give a directory with TASK.jsonl files.",
        ) from error
