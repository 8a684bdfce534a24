"""Where a page comes from: when it was made, by which command, by which state of the program, and
of which checkpoints."""

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
    """Terms and what they were, in words; nothing that identifies a person."""
    places = [
        f"{candidate.name}: {candidate.path}"
        + (f", step {candidate.state['step']:,}" if "step" in candidate.state else "")
        + (f", computed by {candidate.computed_by}" if candidate.computed_by else "")
        for candidate in candidates
    ]
    return made_now() | {"Of": without_home("; ".join(places))}


def made_now() -> dict[str, str]:
    """When, by which command and by which state of the program."""
    found: dict[str, str] = without_home(
        {
            "Made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "Command": command(sys.argv),
            "Program": f"unrope {trainer.__version__}{commit(ROOT)}",
        }
    )
    return found


def command(argv: Sequence[str]) -> str:
    """The command line of this process, to be typed again."""
    program = Path(argv[0])
    inside = program.name == "__main__.py"
    begins = ["python", "-m", program.parent.name] if inside else [program.name]
    return shlex.join([*begins, *argv[1:]])


def commit(root: Path) -> str:
    """``, commit 1a2b3c4`` of a checkout that holds the package, with a word where files were
    changed since; empty for an installed package and where there is no git."""
    if not (root / ".git").exists():  # a repository further up is another program's
        return ""
    git = ["git", "-C", str(root)]
    try:
        found = subprocess.run(
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
    return f", commit {found.stdout.strip()}{' and changes since' if changed.stdout else ''}"
