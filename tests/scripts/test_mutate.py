"""The mutation run: what it changes, and that it tells changes that a test notices from others."""

from __future__ import annotations

import ast
import pickle
import shutil
import subprocess
import sys

from scripts.mutations import mutants
from tests.program import ROOT

SOURCE = '''"""Text: 1 + 1."""
import logging

log = logging.getLogger(__name__)
SIZE = 1 << 20


@once(3)
def share(low: int, high: int = 2, *, é=("ü", 1)) -> float:
    """Not 3 > 2."""
    if low >= high and é:
        raise ValueError(f"{low + 1} is not below {high}")
    log.info("%d", low + 1)
    found = [x for x in (low, high) if ready(x)]
    sort(found, reverse=True)
    return max(found) / 2.5
'''


def test_every_change_is_of_one_place_and_leaves_what_is_said_and_sized_alone():
    found = mutants(SOURCE.encode(), "a.py")
    assert [(m.line, m.change, m.function) for m in found] == [
        (9, "1  ->  2", None),
        (9, "2  ->  3", None),
        (11, "low >= high and é  ->  low >= high or é", 9),
        (11, "low >= high  ->  low > high", 9),
        (11, "low  ->  high", 9),
        (11, "high  ->  low", 9),
        (12, "raise ValueError(f'{low + 1} is not below {high}')  ->  pass", 9),
        (14, "ready(x)  ->  not ready(x)", 9),
        (14, "low  ->  high", 9),
        (14, "high  ->  low", 9),
        (15, "sort(found, reverse=True)  ->  pass", 9),
        (15, "sort(found, reverse=True)  ->  sort(found)", 9),
        (15, "True  ->  False", 9),
        (16, "max(found) / 2.5  ->  max(found) * 2.5", 9),
        (16, "max  ->  min", 9),
        (16, "2.5  ->  3.75", 9),
    ]
    before = ast.dump(ast.parse(SOURCE))
    after = {ast.dump(ast.parse(m.applied(SOURCE.encode()))) for m in found}
    assert len(after) == len(found)
    assert before not in after


def test_how_large_something_is_drawn_is_left_alone():
    source = 'axes.plot(x, linewidth=0.5, marker=low(2))\nlook = {"lines.alpha": 1, "b": 3}'
    assert [m.change for m in mutants(source.encode(), "a.py")] == [
        "axes.plot(x, linewidth=0.5, marker=low(2))  ->  pass",
        "axes.plot(x, linewidth=0.5, marker=low(2))  ->  axes.plot(x, linewidth=0.5)",
        "2  ->  3",
        "3  ->  4",
    ]


PACKAGE = {
    "trainer/__init__.py": "",
    "trainer/small/__init__.py": "",
    "trainer/small/sums.py": (
        "def doubled(x):\n    return x + x\n\n\ndef unseen(x):\n    return x - 1\n"
    ),
    "tests/__init__.py": "",
    "tests/other/__init__.py": "",
    "tests/other/test_elsewhere.py": (
        "import subprocess\nimport sys\n\n\ndef test_unseen():\n"
        "    said = 'from trainer.small.sums import unseen; assert unseen(0) != 1'\n"
        "    subprocess.run([sys.executable, '-c', said], check=True)\n"
    ),
    "tests/small/__init__.py": "",
    "tests/small/test_sums.py": (
        "import pytest\nfrom trainer.small.sums import doubled\n\n\n"
        "@pytest.fixture(scope='module')\ndef two():\n    return doubled(1)\n\n\n"
        "def test_one(two):\n    assert two > 0\n\n\ndef test_two(two):\n    assert two == 2\n\n\n"
        "def test_broken():\n    assert doubled(2) == 5\n"
    ),
}


def test_a_run_works_in_a_copy_and_says_what_no_test_noticed(tmp_path):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("mutate.py", "mutations.py"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    script = tmp_path / "scripts" / "mutate.py"
    words = [sys.executable, script, "--rooms", "small", "--preload"]
    words += ["--keep", "kept"]

    def run():
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done

    done = run()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.py")} == before
    assert "left out, as it does not pass: tests/small/test_sums.py::test_broken" in done.stderr
    # The other room's test notices x + 1.
    assert "| small | 3 | 3 | 2 | 66.7% |" in done.stdout
    assert done.stdout.splitlines()[-1:] == ["- `trainer/small/sums.py:6`: `1  ->  2`"]
    # What the first run of the tests has found is kept: here most of it is taken away.
    seen = {}
    for kept in (tmp_path / "kept").iterdir():
        called, seconds, failed = pickle.loads((kept / "watched.pickle").read_bytes())
        seen |= called
        one = {name: seen for name, seen in called.items() if name.endswith("test_one")}
        (kept / "watched.pickle").write_bytes(pickle.dumps((one, seconds, failed)))
    # A shared fixture's calls count for its tests, and those of a process that a test starts.
    assert seen == {
        "tests/other/test_elsewhere.py::test_unseen": {("trainer/small/sums.py", 5)},
        "tests/small/test_sums.py::test_one": {("trainer/small/sums.py", 1)},
        "tests/small/test_sums.py::test_two": {("trainer/small/sums.py", 1)},
    }
    said = run().stderr
    assert "tests/other: 0 tests, " in said
    assert "tests/small: 1 tests, " in said
