"""Origin of a page: time, command, state of the program, and checkpoints."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import trainer
from trainer.runs.descriptions import without_home
from trainer.runs.models import Candidate

ROOT = Path(trainer.__file__).resolve().parent.parent


def origin(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Describe the origin as terms and values, without anything that identifies a person."""
    places = [
        f"{candidate.name}: {candidate.path}"
        + (f", step {candidate.state['step']:,}" if "step" in candidate.state else "")
        + (f", computed by {candidate.computed_by}" if candidate.computed_by else "")
        for candidate in candidates
    ]
    return made_now() | {"Of": without_home("; ".join(places))}


def made_now() -> dict[str, str]:
    """Describe time, command and state of the program."""
    return {
        "Made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "Command": without_home(command(sys.argv)),
        "Program": f"unrope {trainer.__version__}{commit(ROOT)}",
    }


def command(argv: Sequence[str]) -> str:
    """Return this process's command line, ready to be typed again."""
    program = Path(argv[0])
    inside = program.name == "__main__.py"
    begins = ["python", "-m", program.parent.name] if inside else [program.name]
    return shlex.join([*begins, *argv[1:]])


def commit(root: Path) -> str:
    """Return ``, commit 1a2b3c4`` of the checkout that contains the package.

    Adds a word if files were changed since. Empty for an installed package and without git.
    """
    if not (root / ".git").exists():  # a repository further up belongs to another program
        return ""
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", commit {head.stdout.strip()}{' and changes since' if changed.stdout else ''}"
