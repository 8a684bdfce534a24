#!/usr/bin/env python
"""Run the tests that touch other packages with the oldest and the newest versions of them.

    python scripts/check_versions.py --write

Creates two virtual environments. The first gets the oldest version of every package that
pyproject.toml admits (the one after ``>=``); the second gets the newest that pyproject.toml admits
and the registry has. pip chooses the versions of their dependencies. Prints a table, and with
``--write`` also writes it to docs/versions.md. Exits with 1 if an installation or a test failed.
Needs only Python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
EXTRAS = "test", "gguf", "transformers", "export", "eval", "tensorboard", "dashboards"
"""Extras that the tests use; ``flash`` needs a GPU, ``cloud`` an account, ``slurm`` a cluster."""
LEFT_TO_PIP = {
    "torch": "its older builds bring several GB of CUDA",
}
"""Packages that are newer than their oldest version in the oldest environment, and the reason."""
LEFT_OUT = {
    "wandb-workspaces": "it needs a newer wandb than the oldest, which works without it",
}
"""Packages that the oldest environment lacks, and the reason."""
TESTS = (
    "tests/interchange",
    "tests/data",
    "tests/commands/test_configuration.py",
    "tests/commands/test_running.py",
    "tests/training/test_lightning_trainer.py",
    "tests/training/test_loggers.py",
    "tests/training/test_user_callbacks.py",
    "tests/training/test_run.py",
    "tests/evaluation/test_harness.py",
    "tests/workflows/test_adapted_models.py",
    "tests/scripts/test_wandb_dashboard.py",
    "tests/analysis/clusters/test_measure.py",
    "tests/plotting",
    "tests/report/test_pages.py",
    "tests/test_house.py",
)
REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)\s*>=\s*([\w.]+)\s*(,.*)?")
SUMMARY = re.compile(r"(?m)^=*\s*((?:\d+ \w+, )*\d+ (?:passed|failed|errors?)\b.*) in [\d.]+s")
WIDTH = 100


def canonical(name: str) -> str:
    """Return the normalized form of a package's name, in which registries compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lower_bounds(requirements: Iterable[str]) -> dict[str, str]:
    """Return the oldest version admitted of each package.

    Raises:
        ValueError: a requirement has no oldest version, or two requirements disagree about it.
    """
    bounds: dict[str, str] = {}
    for requirement in requirements:
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"pyproject.toml: {requirement!r} does not begin with NAME>=VERSION.")
        name, bound = canonical(match[1]), match[2]
        if bounds.setdefault(name, bound) != bound:
            raise ValueError(f"pyproject.toml: {name} from {bounds[name]} and from {bound}.")
    return bounds


def oldest_versions(bounds: Mapping[str, str], torch: str | None) -> list[str]:
    """Return the requirements of the oldest environment; pip chooses torch if ``torch`` is None."""
    pinned = {n: v for n, v in bounds.items() if n not in LEFT_TO_PIP and n not in LEFT_OUT}
    if torch is not None:
        pinned["torch"] = torch
    return [f"{name}=={version}" for name, version in pinned.items()]


@dataclass
class Environment:
    """A virtual environment, the versions in it and the outcome of its tests."""

    name: str
    place: Path
    started: float = field(default_factory=time.monotonic)
    versions: dict[str, str] = field(default_factory=dict)
    outcome: str = "not run"
    passed: bool = False

    @property
    def log(self) -> Path:
        return self.place.with_suffix(".log")

    def check(self, requirements: Iterable[str], tests: Iterable[str], workers: int) -> None:
        """Install the package and the requirements, run the tests and store their outcome."""
        self.log.write_text("")
        self.say("installing")
        python = self.place / "bin" / "python"
        if not python.exists():
            venv.create(self.place, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        if self.run(*pip, "install", "--upgrade", "--editable", ".", *requirements):
            self.outcome = "not installed"
            self.say(f"not installed: {self.last_line()}")
            return
        listed = subprocess.run(
            [*pip, "list", "--format", "json"], capture_output=True, text=True, check=True
        )
        packages = json.loads(listed.stdout[listed.stdout.index("[") :].splitlines()[0])
        self.versions = {canonical(p["name"]): p["version"] for p in packages}
        self.say(f"{len(self.versions)} packages; running the tests")
        options = ["-n", str(workers), "-rfE", "--tb=short", "--durations=15"]
        code = self.run(python, "-m", "pytest", *options, *tests)
        self.passed = code == 0
        summaries = SUMMARY.findall(self.log.read_text())
        self.outcome = summaries[-1] if summaries else f"pytest ended with {code}"
        self.say(self.outcome)

    def run(self, *command: str | Path) -> int:
        """Run a command in the checkout, append what it prints to the log, return its exit code."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("ab") as log:
            return subprocess.run(
                command, cwd=ROOT, env=variables, stdout=log, stderr=log, check=False
            ).returncode

    def last_line(self) -> str:
        """Return the last line of the log that is not blank."""
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def failures(self) -> list[str]:
        """Return pytest's lines about the tests that failed."""
        return re.findall(r"(?m)^(?:FAILED|ERROR) .*", self.log.read_text())

    def say(self, text: str) -> None:
        """Print a line about the progress, with minutes and seconds since the start."""
        minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
        print(f"[{minutes:2}:{seconds:02}] {self.name}: {text}"[:WIDTH], flush=True)


def table(bounds: Mapping[str, str], oldest: Environment, newest: Environment) -> str:
    """Return a Markdown table: a row for each package, and one for the tests."""
    rows = [("package", "admitted from", "oldest tried", "newest tried")]
    rows += [
        (name, bound, oldest.versions.get(name, ""), newest.versions.get(name, ""))
        for name, bound in sorted(bounds.items())
    ]
    rows.append(("**tests**", "", oldest.outcome, newest.outcome))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines)


def page(text: str, date: str) -> str:
    """Return docs/versions.md with this table."""
    reasons = [f"`{name}` is not tried at its oldest: {why}." for name, why in LEFT_TO_PIP.items()]
    reasons += [f"`{name}` is not tried with the oldest: {why}." for name, why in LEFT_OUT.items()]
    reason = "\n".join(reasons)
    return f"""# Versions of other packages

```sh
python scripts/check_versions.py --write
```

ran the tests that touch other packages with the oldest and the newest versions that
`pyproject.toml` admits, and wrote this page on {date} (Python {platform.python_version()},
{platform.system()} {platform.machine()}).
`requirements.lock` holds the versions that an installation of the checkout takes.

{reason}

{text}
"""


def main() -> None:
    """Test both environments, print the table and exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep environments and logs in DIR, and reuse those already in it",
    )
    parser.add_argument("--torch", metavar="VERSION", help="torch in the oldest environment")
    parser.add_argument("--only", choices=("oldest", "newest"), help="test one environment alone")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest (default: 0)")
    parser.add_argument("--write", action="store_true", help="write docs/versions.md")
    parser.add_argument(
        "tests", nargs="*", default=TESTS, help="tests to run instead of the usual ones"
    )
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs both environments, --only makes one.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [*project["dependencies"], *(needed for extra in EXTRAS for needed in extras[extra])]
    bounds = lower_bounds(used)
    with tempfile.TemporaryDirectory(prefix="versions-") as temporary:
        place = (options.keep or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        oldest, newest = (Environment(name, place / name) for name in ("oldest", "newest"))
        if options.only != "newest":
            oldest.check(oldest_versions(bounds, options.torch), options.tests, options.workers)
        if options.only != "oldest":
            newest.check(used, options.tests, options.workers)
        text = table(bounds, oldest, newest)
        print(text)
        tried = [e for e in (oldest, newest) if e.name == (options.only or e.name)]
        for environment in tried:
            for line in environment.failures():
                print(f"{environment.name}: {line}"[:WIDTH])
    if options.write:
        PAGE.write_text(page(text, datetime.now(UTC).date().isoformat()))
    sys.exit(not all(environment.passed for environment in tried))


if __name__ == "__main__":
    main()
