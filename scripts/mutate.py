#!/usr/bin/env python
"""Measure how many small faults in the package its tests notice (mutation testing).

    python scripts/mutate.py --rooms data training --budget 30 --seed 0

Prints every room's score, which is the share of changes that made a test fail, and the changes that
no test noticed, for a person to judge. It works in a copy of the checkout. A first run of all tests
records which functions each test calls. For each change, the tests that call its function run until
one fails: first the room's tests, then the others, the quickest first. ``mutations.py`` defines the
changes.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import importlib
import importlib.util
import itertools
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mutations import KINDS, SEEN, SEEN_TO, SOURCE_OF_SEEN, Mutant, marked, mutants

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 45.0, 15.0
"""Limits on the tests of one change, in seconds of the first run: the room's tests, then others."""
PRELOADED = "torch", "lightning", "transformers", "hypothesis", "matplotlib.pyplot", "tokenizers"
NO_ERROR = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
GIB = 1 << 30
LARGE = 64 << 20
"""Bytes from which a file of the cache is linked."""
PARTS = "trainer/", "tests/", "conf/"
"""Parts of the checkout that affect which functions a test calls."""
Place = tuple[str, int]
"""A function: its file and line."""
Watched = tuple[dict[str, set[Place]], dict[str, float], set[str]]
"""Functions that each test calls, seconds that it takes, and the tests that fail."""


class Watch:
    """pytest plugin that records each test's duration and the marked functions that it calls.

    Calls in processes that a test starts count too, as do calls in its shared fixtures.
    """

    def __init__(self, to: Path) -> None:
        self.files: dict[str, Path] = {}
        self.fixtures: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.to = to
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()

    @contextmanager
    def _noted_for(self, name: str) -> Iterator[None]:
        before = os.environ.get(SEEN_TO, "")
        file = self.files.setdefault(name, self.to / str(len(self.files)))
        os.environ[SEEN_TO] = str(file)
        try:
            yield
        finally:
            os.environ[SEEN_TO] = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Record the calls and the duration of a test, fixtures included."""
        began = time.perf_counter()
        definitions = itertools.chain(*item._fixtureinfo.name2fixturedefs.values())
        self.fixtures[item.nodeid] = {_key(d) for d in definitions if d.scope != "function"}
        try:
            with self._noted_for(item.nodeid):
                return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """Record the functions that a shared fixture calls."""
        if fixturedef.scope == "function":
            return (yield)
        with self._noted_for(_key(fixturedef)):
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record a failed test: it cannot show whether a change is noticed."""
        if report.failed:
            self.failed.add(report.nodeid)

    def called(self) -> dict[str, set[Place]]:
        """Return the functions that each test called."""
        seen = {name: _places(file) for name, file in self.files.items()}
        return {
            test: seen[test].union(*(seen.get(name, ()) for name in fixtures))
            for test, fixtures in self.fixtures.items()
        }


def _places(file: Path) -> set[Place]:
    lines = file.read_text().splitlines() if file.exists() else []
    split = (line.rpartition(":") for line in lines)
    return {(name, int(number)) for name, _, number in split}


def _key(fixturedef: Any) -> str:
    return f"{fixturedef.baseid}::{fixturedef.argname}"


class Only:
    """pytest plugin that runs only the ``wanted`` tests, in that order."""

    def __init__(self, wanted: list[str]) -> None:
        self.place = {name: i for i, name in enumerate(wanted)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Deselect the other tests and sort the wanted ones."""
        items[:] = [item for item in items if item.nodeid in self.place]
        items.sort(key=lambda item: self.place[item.nodeid])


def in_a_child(job: Callable[[], int], seconds: float, output: Path) -> int | None:
    """Run ``job`` in a child process; return its result, or None after ``seconds``."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * GIB, 2 * GIB))
        resource.setrlimit(resource.RLIMIT_AS, (16 * GIB, 16 * GIB))
        try:
            code = int(job())
        except BaseException:  # a broken program may raise anything
            code = 1
        os._exit(code)
    over, ends = None, time.monotonic() + seconds
    try:
        while over is None and time.monotonic() < ends:
            time.sleep(0.02)
            over = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also ends the processes it started
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) if over else None


def copy_or_link(source: str, to: str) -> None:
    """Copy a file, or link one that takes long to copy: weights, which no test writes."""
    place = os.link if Path(source).stat().st_size > LARGE else shutil.copyfile
    place(source, to)


@dataclass
class Checkout:
    """Copy of the checkout in ``root``; the functions that each test calls, and its seconds."""

    root: Path
    called: dict[str, set[Place]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def copied(cls, to: Path) -> Checkout:
        """Copy every file that git tracks or does not ignore."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, to / name)
        compileall.compile_dir(to / "trainer", quiet=1)
        return cls(to)

    def pytest(self, words: list[str], plugin: Any) -> int:
        """Run tests in this process."""
        os.chdir(self.root)
        sys.path[:] = [str(self.root), *(p for p in sys.path if p and Path(p) != ROOT)]
        options = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", "--tb=line"]
        base = f"--basetemp={self.root.parent / 'tmp'}"
        return int(pytest.main([*words, *options, base], plugins=[plugin]))

    def tests(self) -> list[str]:
        """Return the directories and files of tests."""
        places = sorted((self.root / "tests").iterdir())
        test_paths = [path for path in places if path.is_dir() or path.name.startswith("test_")]
        return [str(path.relative_to(self.root)) for path in test_paths]

    def watch(self, tests: str, records: Path | None) -> None:
        """Run the tests of a directory or file once, and record what each test calls.

        Tests that fail are left out. If ``records`` has a record for the same files, use it
        instead, with the text that the tests prepared.
        """
        record = self.root.parent / "watched.pickle"
        place = None if records is None else records / self.fingerprint(tests)
        if place is not None and place.is_dir():
            shutil.copytree(place / "cache", os.environ["UNROPE_CACHE"], dirs_exist_ok=True)
            self._know(tests, place / "watched.pickle")
            return

        before = {path: (path.read_bytes(), path.stat()) for path in self.files()}
        (self.root / f"{SEEN}.py").write_text(SOURCE_OF_SEEN)
        for path, (source, _) in before.items():
            path.write_text(marked(source, str(path.relative_to(self.root))))
        try:
            called, seconds, failed = self._watched([tests])
        finally:
            (self.root / f"{SEEN}.py").unlink()
            for path, (source, times) in before.items():
                path.write_bytes(source)
                os.utime(path, (times.st_atime, times.st_mtime))  # keep compiled files valid
        if failed:
            # Marks break torch.compile. A test that passes without them counts as calling all known
            # functions of the files that it reached.
            _, again, broken = self._watched(sorted(failed))
            seconds |= again
            for name in failed - broken:
                reached = {file for file, _ in called[name]}
                called[name] = {p for places in called.values() for p in places if p[0] in reached}
            failed &= broken
        called = {name: seen for name, seen in called.items() if name not in failed}
        record.write_bytes(pickle.dumps((called, seconds, failed)))
        if place is not None:
            unfinished = Path(tempfile.mkdtemp(dir=records))
            shutil.copytree(os.environ["UNROPE_CACHE"], unfinished / "cache")
            shutil.copyfile(record, unfinished / "watched.pickle")
            with suppress(OSError):  # another run was quicker
                unfinished.rename(place)
        self._know(tests, record)

    def _watched(self, tests: list[str]) -> Watched:
        """Run these tests; return their calls, their durations, and which of them fail."""
        output, record = self.root.parent / "output.txt", self.root.parent / "calls.pickle"

        def job() -> int:
            watch = Watch(self.root.parent / "seen")
            sys.dont_write_bytecode = True
            if (code := self.pytest(tests, watch)) not in (0, *NO_ERROR):
                return code
            record.write_bytes(pickle.dumps((watch.called(), watch.seconds, watch.failed)))
            return 0

        if in_a_child(job, 3600, output) != 0:
            sys.exit(f"{' '.join(tests)} cannot be run:\n{output.read_text()[-2000:]}")
        watched: Watched = pickle.loads(record.read_bytes())
        return watched

    def fingerprint(self, tests: str) -> str:
        """Return a hash of these tests and of all files that may change their calls."""
        digest = hashlib.sha256(tests.encode())
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            # Test modules and data serve their directory alone; helper modules may serve others.
            is_local = path.name.startswith("test_") or path.suffix != ".py"
            other = name.startswith("tests/") and is_local and not name.startswith(tests)
            if name.startswith(PARTS) and path.is_file() and path.suffix != ".pyc" and not other:
                digest.update(f"\0{name}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    def _know(self, tests: str, record: Path) -> None:
        called, seconds, failed = pickle.loads(record.read_bytes())
        self.called |= called
        self.seconds |= seconds
        print(f"{tests}: {len(called)} tests, {sum(seconds.values()):.0f} s", file=sys.stderr)
        for name in sorted(failed):
            print(f"left out, as it does not pass: {name}", file=sys.stderr)

    def files(self, room: str = "") -> list[Path]:
        """Return the sources of a room, or of all rooms."""
        return sorted((self.root / "trainer" / room).rglob("*.py"))

    def tests_of(self, mutant: Mutant) -> list[list[str]]:
        """Return the tests that call the changed function: those of its room, then the others.

        The quickest come first. If no test calls it, or the change is outside functions, return the
        tests that call any function of the file or are named after it; without any, all tests.
        """
        place = mutant.file, mutant.function
        names = [name for name, called in self.called.items() if place in called]
        if not names:  # a test may use a module without calling its functions
            path = Path(mutant.file)
            mirror = f"tests/{path.parts[1]}/test_{path.stem}.py::"
            names = [
                name
                for name, seen in self.called.items()
                if any(file == place[0] for file, _ in seen) or name.startswith(mirror)
            ]
        names = sorted(names or self.called, key=lambda name: self.seconds[name])
        room = f"tests/{Path(mutant.file).parts[1]}/"
        room_tests = [name for name in names if name.startswith(room)]
        other_tests = [name for name in names if not name.startswith(room)]
        groups = zip((room_tests, other_tests), LONGEST, strict=True)
        return [self._first(group, seconds) for group, seconds in groups if group]

    def _first(self, names: list[str], seconds: float) -> list[str]:
        """Return the first tests that fit into ``seconds`` together, at least one."""
        ends = itertools.accumulate(self.seconds[name] for name in names)
        return [name for name, end in zip(names, ends, strict=True) if end < seconds] or names[:1]

    def notices(self, mutant: Mutant) -> bool:
        """Whether a test fails with this change."""
        return any(self._fails(mutant, tests) for tests in self.tests_of(mutant))

    def _fails(self, mutant: Mutant, tests: list[str]) -> bool:
        path = self.root / mutant.file
        source, times = path.read_bytes(), path.stat()

        def job() -> int:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            cache = self.root.parent / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            # A changed program may write wrong text to the cache.
            shutil.copytree(os.environ["UNROPE_CACHE"], cache, copy_function=copy_or_link)
            os.environ["UNROPE_CACHE"] = str(cache)
            return self.pytest(["-x", *dict.fromkeys(n.split("::")[0] for n in tests)], Only(tests))

        try:
            path.write_bytes(mutant.applied(source))
            os.utime(path, (times.st_atime, times.st_mtime + 10))
            seconds = 60 + 3 * sum(self.seconds[name] for name in tests)
            code = in_a_child(job, seconds, self.root.parent / "output.txt")
        finally:
            path.write_bytes(source)
            os.utime(path, (times.st_atime, times.st_mtime))
        return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def score(room: str, checkout: Checkout, minutes: float, options: Any) -> list[Mutant]:
    """Try changes to a room in random order until the time is over; return the unnoticed ones."""
    names = [str(path.relative_to(checkout.root)) for path in checkout.files(room)]
    every = [m for name in names for m in mutants((checkout.root / name).read_bytes(), name)]
    every = [m for m in every if m.kind in options.kinds]
    if options.at is not None:
        every = [m for m in every if f"{m.file}:{m.line}:".startswith(f"{options.at}:")]
    random.Random(options.seed).shuffle(every)
    lived, tried, ends = [], 0, time.monotonic() + 60 * minutes
    for mutant in every:
        if time.monotonic() > ends:
            break
        tried += 1
        noticed = checkout.notices(mutant)
        lived += [] if noticed else [mutant]
        verdict = "noticed" if noticed else "LIVES"
        print(
            f"{room} {tried} {verdict} {mutant.file}:{mutant.line} {mutant.change}", file=sys.stderr
        )
    share = (tried - len(lived)) / max(tried, 1)
    print(f"| {room} | {len(every)} | {tried} | {tried - len(lived)} | {share:.1%} |", flush=True)
    return lived


def main() -> None:
    """Try changes to each room for its share of the time; print the table."""
    rooms = sorted(path.parent.name for path in ROOT.glob("trainer/*/__init__.py"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", default=rooms, choices=rooms, metavar="ROOM")
    parser.add_argument(
        "--budget", type=float, default=60, metavar="MINUTES", help="time for changes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND")
    parser.add_argument("--at", metavar="FILE[:LINE]", help="only changes to this file or line")
    parser.add_argument("--tests", nargs="+", metavar="PLACE", help="tests to run; all by default")
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="keep records of the first run"
    )
    parser.add_argument("--preload", nargs="*", default=PRELOADED, metavar="MODULE")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep = options.keep.resolve()
        options.keep.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ.pop("PYTEST_ADDOPTS", None)  # options of another project
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    for name in options.preload:  # once, instead of in every process
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    lived: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="unrope-mutants-") as directory:
        place = Path(directory)
        for name in (
            "HOME",
            "UNROPE_CACHE",
            "TMPDIR",
        ):  # a changed program may write anything there
            (place / name).mkdir()
            os.environ[name] = str(place / name)
        os.environ["PYTHONPATH"] = str(place / "checkout")
        checkout = Checkout.copied(place / "checkout")
        for tests in options.tests or checkout.tests():
            checkout.watch(tests, options.keep)
        print("| room | changes | tried | noticed | score |\n| --- | ---: | ---: | ---: | ---: |")
        for room in options.rooms:
            minutes = options.budget / len(options.rooms)
            lived += score(room, checkout, minutes, options)
    for mutant in sorted(lived, key=lambda m: (m.file, m.line, m.change)):
        print(f"- `{mutant.file}:{mutant.line}`: `{mutant.change}`")


if __name__ == "__main__":
    main()
