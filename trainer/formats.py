"""What is written to disk carries the number of its format; a newer one is refused, not misread."""

from __future__ import annotations

from typing import Any

from trainer.errors import UserError

FIRST = 1
"""The format of what was written before there were numbers."""


def check_format(found: Any, newest: int, what: str, otherwise: str) -> None:
    """Refuse what a newer version of this program wrote.

    Args:
        found: the number that stands there, :data:`FIRST` where there is none.
        newest: the last format that this version reads.
        what: names key and file, as an error begins.
        otherwise: what to do but installing a newer version.

    Raises:
        UserError: the number is newer, or no format's.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < FIRST:
        raise UserError(f"{what} is damaged: its format is {found!r}, expected a whole number.")
    if found > newest:
        raise UserError(
            f"{what} has format {found}, this version of unrope reads up to {newest}; install a "
            f"newer one, or {otherwise}."
        )
