"""The program's code as it is now, kept for a job that may start days later."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from trainer.commands.hydra.files import config_directory

PACKAGE = Path(__file__).resolve().parent.parent


def slurm_directory() -> Path:
    """``slurm/``: inside the package where it is installed, beside it in a checkout."""
    inside = PACKAGE / "slurm"
    return inside if inside.is_dir() else PACKAGE.parent / "slurm"


def snapshot(directory: Path, own: Path | None = None) -> Path:
    """Copy the package, with ``conf/`` and ``slurm/`` inside it, to ``directory/<digest>``.

    ``own``: a user's directory of configurations, whose options become ones of ``conf/``.

    The place is named by its content and never changes: a job that waits keeps its code, and jobs
    with the same code share one copy. Returns the place, to be put on ``PYTHONPATH``. Raises
    ``OSError`` as the file system does.
    """
    files = dict(sorted(_files(own).items()))
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    place = directory / digest.hexdigest()[:12]
    if not place.is_dir():
        # Renamed when complete, so that an interrupted copy is never taken for the code.
        partial = directory / f".{place.name}.{os.getpid()}.partial"
        for name, content in files.items():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        partial.rename(place)
    return place


def _files(own: Path | None) -> dict[str, bytes]:
    """Return every file of the package by its path in the snapshot."""
    roots = [
        ("trainer", PACKAGE, "*"),
        ("trainer/conf", config_directory(), "*"),
        ("trainer/slurm", slurm_directory(), "*"),
        *([("trainer/conf", own, "*/*.yaml")] if own is not None else []),
    ]
    return {
        f"{place}/{path.relative_to(root).as_posix()}": path.read_bytes()
        for place, root, pattern in roots
        for path in root.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }
