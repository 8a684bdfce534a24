"""Which runs belong to a sweep, what was set in each, and which of its jobs failed: the directory
of a comparison, which its jobs and those who look at it meanwhile share."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainer.common.errors import PreemptedError, UserError
from trainer.formats import check_format, read_as
from trainer.report.atomic import write_atomically
from trainer.runs.directory import free_place

RECORD = "sweep.json"
FORMAT = 1


@dataclass(frozen=True)
class Swept:
    """A run of a sweep, there or yet to come. ``settings``: the words by which its job differs from
    the others, as they were given, by their keys; empty where its configuration says so itself."""

    run_dir: str
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Record:
    runs: list[Swept]
    format: int = FORMAT


def place_of_sweep(parent: Path, runs: Sequence[Swept]) -> Path:
    """The directory of a sweep under ``parent``, there or not: always the same for the same runs,
    named by the words that the names of their directories begin with, or else by the first."""
    names = [Path(run.run_dir).resolve().name for run in runs]
    begins = os.path.commonprefix(names)
    common = re.sub("[_+=-][^_+=-]*$", "", begins) or begins or names[0]

    def is_same(place: Path) -> bool:
        record = place / RECORD
        return not record.exists() or _places(read_sweep(place)) == _places(runs)

    return free_place(parent / common, is_same)


def open_sweep(parent: Path, runs: Sequence[Swept]) -> Path:
    """The directory of a sweep under ``parent``, with its record."""
    place = place_of_sweep(parent, runs)
    text = json.dumps(asdict(_Record(list(runs))), indent=2, ensure_ascii=False)
    write_atomically(place / RECORD, text + "\n")
    return place


def read_sweep(place: Path) -> list[Swept]:
    """The runs of the sweep in ``place``.

    Raises:
        UserError: its record cannot be read.
    """
    path = place / RECORD
    try:
        found = read_as(path, _Record)
    except (OSError, ValueError) as error:
        raise UserError.at("runs", f"{str(path)!r} is damaged: {error}.") from None
    check_format(found.format, FORMAT, "runs", repr(str(path)), "name the runs themselves")
    return found.runs


@contextmanager
def noting_failure(place: Path, run_dir: str) -> Iterator[None]:
    """Keep what a job fails with beside the sweep, until the job is tried again."""
    note = _note(place, run_dir)
    note.unlink(missing_ok=True)
    try:
        yield
    except PreemptedError:  # to be continued
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        write_atomically(note, f"{kind}{lines[0]}\n")
        raise


def failure(place: Path, run_dir: str) -> str | None:
    """What the last job of a run failed with, in a line; None: with nothing so far, or the run was
    finished since."""
    note, finished = _note(place, run_dir), Path(run_dir, "report.json")
    if not note.is_file():
        return None
    if finished.is_file() and finished.stat().st_mtime > note.stat().st_mtime:
        return None
    return note.read_text(encoding="utf-8").strip()


def _note(place: Path, run_dir: str) -> Path:
    digest = hashlib.sha256(run_dir.encode()).hexdigest()[:8]
    return place / "failed" / f"{Path(run_dir).name}-{digest}.txt"


def _places(runs: Sequence[Swept]) -> list[Path]:
    return [Path(run.run_dir).resolve() for run in runs]
