"""Coqui's training library, which has the import name ``trainer`` too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer.common.errors import UserError

DISTRIBUTIONS = "trainer", "coqui_tts_trainer"
"""How the metadata directories of Coqui's packages begin."""


def check_other_trainer() -> None:
    """Warn on standard error if Coqui's package is installed; only the first rank does.

    Lists the directories of ``sys.path``: importing ``importlib.metadata`` would slow ``--help``.

    Raises:
        UserError: it is installed into the same directory, so that one has overwritten the other.
    """
    own = Path(__file__).resolve().parents[2]
    for directory in dict.fromkeys(Path(entry).resolve() for entry in sys.path):
        try:
            names = os.listdir(directory)  # noqa: PTH208  pathlib takes three times as long
        except OSError:  # a directory that is not there, or an archive
            continue
        for name in names:
            distribution, _, version = name.removesuffix(".dist-info").partition("-")
            if distribution not in DISTRIBUTIONS or not name.endswith(".dist-info"):
                continue
            package = f"Coqui's package {distribution.replace('_', '-')} {version}"
            if directory == own:
                raise UserError.at(
                    "",
                    f"{package} is installed in the same directory as Unrope, {directory}, and "
                    "has the same import name, trainer: one has overwritten files of the other. "
                    "Install Unrope in a virtual environment of its own.",
                )
            if os.environ.get("RANK", "0") == "0":
                print(
                    f"warning: {package} in {directory} has the same import name as Unrope, "
                    "trainer. Install Unrope in a virtual environment of its own.",
                    file=sys.stderr,
                )
