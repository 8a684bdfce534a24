"""Where the golden files are."""

from pathlib import Path

GOLDEN = Path(__file__).parent
