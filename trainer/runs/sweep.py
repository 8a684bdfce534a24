"""Record of a sweep: its runs, their settings, and the jobs that failed.

It lies in the directory of the sweep's comparison, which the jobs share with their readers.
"""

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
from trainer.common.files import write_atomically
from trainer.common.formats import check_format, read_as
from trainer.runs.directory import free_place

RECORD = "sweep.json"
FORMAT = 1


@dataclass(frozen=True)
class Swept:
    """A run of a sweep, finished or not.

    ``settings``: the words, by key, in which its command line differs from the other jobs'; empty
    if its configuration shows them.
    """

    run_dir: str
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Record:
    runs: list[Swept]
    format: int = FORMAT


def place_of_sweep(parent: Path, runs: Sequence[Swept]) -> Path:
    """Return the directory of a sweep under ``parent``, existing or not; the same runs give the
    same one.

    Its name is the common prefix of the run directories' names, or the first of them.
    """
    names = [Path(run.run_dir).resolve().name for run in runs]
    begins = os.path.commonprefix(names)
    common = re.sub("[_+=-][^_+=-]*$", "", begins) or begins or names[0]

    def is_same(place: Path) -> bool:
        record = place / RECORD
        return not record.exists() or _places(read_sweep(place)) == _places(runs)

    return free_place(parent / common, is_same)


def open_sweep(parent: Path, runs: Sequence[Swept]) -> Path:
    """Create the directory of a sweep under ``parent``, with its record."""
    place = place_of_sweep(parent, runs)
    text = json.dumps(asdict(_Record(list(runs))), indent=2, ensure_ascii=False)
    write_atomically(place / RECORD, text + "\n")
    return place


def read_sweep(place: Path) -> list[Swept]:
    """Read the runs of the sweep in ``place``.

    Raises:
        UserError: the record cannot be read.
    """
    path = place / RECORD
    try:
        record = read_as(path, _Record)
    except (OSError, ValueError) as error:
        raise UserError.at("runs", f"{str(path)!r} is damaged: {error}.") from None
    check_format(record.format, FORMAT, "runs", repr(str(path)), "name the runs themselves")
    return record.runs


@contextmanager
def noting_failure(place: Path, run_dir: str) -> Iterator[None]:
    """Record a job's failure beside the sweep until the job is tried again."""
    note = _note(place, run_dir)
    note.unlink(missing_ok=True)
    try:
        yield
    except PreemptedError:  # not a failure: it will resume
        raise
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        write_atomically(note, f"{kind}{next(iter(str(error).splitlines()), '')}\n")
        raise


def failure(place: Path, run_dir: str) -> str | None:
    """Return the last failure of a run's job in one line; None without one, or if the run finished
    since."""
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
