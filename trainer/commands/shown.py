"""Text that models or strangers wrote, on a terminal."""

from __future__ import annotations

import sys

CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
"""Pictures of characters that a terminal would obey."""


def show(text: str, end: str = "\n") -> None:
    """Print text immediately; escape control characters on a terminal."""
    print(text.translate(CONTROLS) if sys.stdout.isatty() else text, end=end, flush=True)
