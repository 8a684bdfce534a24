#!/usr/bin/env python3
"""Make the golden files in tests/golden, which the tests hold this program against.

    python scripts/make_golden.py ruler CHECKOUT     # of github.com/NVIDIA/RULER
    python scripts/make_golden.py drope CHECKOUT     # of github.com/SakanaAI/DroPE
    python scripts/make_golden.py rope               # transformers
    python scripts/make_golden.py families           # transformers
    python scripts/make_golden.py losses             # this program's own

tests/golden/README.md names the versions that the files were made with. Make a file anew only to
follow a deliberate change, and read its difference.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

OUT = Path(__file__).parents[1] / "tests" / "golden"
CHECKOUTS = ("ruler", "drope")
OTHERS = ("rope", "families", "losses")


def main() -> None:
    """Make the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", choices=(*CHECKOUTS, *OTHERS))
    parser.add_argument("checkout", nargs="?", type=Path, help="of the program that makes them")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if (given.files in CHECKOUTS) != (given.checkout is not None):
        parser.error("expected a checkout for ruler and drope, and none for the others")
    given.out.mkdir(parents=True, exist_ok=True)
    make = importlib.import_module(f"golden.{given.files}").make
    make(given.out, *([given.checkout] if given.checkout else []))


if __name__ == "__main__":
    main()
