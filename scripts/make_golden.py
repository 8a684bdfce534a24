#!/usr/bin/env python3
"""Make the golden files in tests/golden, which the tests compare this program with.

    python scripts/make_golden.py ruler CHECKOUT     # of github.com/NVIDIA/RULER
    python scripts/make_golden.py drope CHECKOUT     # of github.com/SakanaAI/DroPE
    python scripts/make_golden.py rope               # transformers
    python scripts/make_golden.py families           # transformers
    python scripts/make_golden.py losses             # this program

tests/golden/README.md names the versions that made the files. Remake a file only after a deliberate
change, and review its diff.
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
    parser.add_argument(
        "checkout", nargs="?", type=Path, help="checkout of the program that makes them"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if (options.files in CHECKOUTS) != (options.checkout is not None):
        parser.error("expected a checkout for ruler and drope, and none for the others")
    options.out.mkdir(parents=True, exist_ok=True)
    make = importlib.import_module(f"golden.{options.files}").make
    if options.checkout:
        make(options.out, options.checkout)
    else:
        make(options.out)


if __name__ == "__main__":
    main()
