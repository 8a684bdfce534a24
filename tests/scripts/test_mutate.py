"""The mutation run: what it changes, and that it tells changes that a test notices from others."""

from __future__ import annotations

import ast
import os
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


KEYS = """
def plan_key(model, task, n):
    return {"model": model, "task": [task, n]}


def fingerprint_of(*parts):
    return sha256(parts[0] + parts[1], seed(0))


def stored(config, layout):
    order = [config, layout]
    sizes = [config, layout]
    return digest(dumps(order)), sizes


def is_found(a, b, wanted):
    found = (a.name, a.length) == (b.name, b.length) and a.model == wanted
    return found and all(getattr(a, one) == getattr(b, one) for one in ("x", "y"))
"""


def changes(source):
    return [(m.line, m.change) for m in mutants(source.encode(), "a.py")]


def test_a_field_is_left_out_of_what_is_hashed_or_compared():
    found = changes(KEYS)
    left_out = [
        (3, "{'model': model, 'task': [task, n]}  ->  {'task': [task, n]}"),
        (3, "{'model': model, 'task': [task, n]}  ->  {'model': model}"),
        (3, "[task, n]  ->  [n]"),
        (3, "[task, n]  ->  [task]"),
        (7, "sha256(parts[0] + parts[1], seed(0))  ->  sha256(seed(0))"),
        (7, "sha256(parts[0] + parts[1], seed(0))  ->  sha256(parts[0] + parts[1])"),
        (7, "parts[0] + parts[1]  ->  parts[0]"),
        (7, "parts[0] + parts[1]  ->  parts[1]"),
        (11, "[config, layout]  ->  [layout]"),
        (11, "[config, layout]  ->  [config]"),
        (17, "(a.name, a.length) == (b.name, b.length)  ->  (a.length,) == (b.length,)"),
        (17, "(a.name, a.length) == (b.name, b.length)  ->  (a.name,) == (b.name,)"),
        (18, "('x', 'y')  ->  ('y',)"),
        (18, "('x', 'y')  ->  ('x',)"),
    ]
    assert [change for change in found if change in left_out] == left_out
    kinds = {(m.line, m.change): m.kind for m in mutants(KEYS.encode(), "a.py")}
    assert {kinds[change] for change in left_out} == {"field"}
    # Sizes are no key: line 12 stays as it is.
    assert [change for line, change in found if line == 12] == []
    both = "(a.name, a.length) == (b.name, b.length) and a.model == wanted"
    assert (17, f"{both}  ->  (a.name, a.length) == (b.name, b.length)") in found
    assert (17, f"{both}  ->  a.model == wanted") in found


PHASES = """
def problems(config):
    found = [spread(phase.config) for phase in phases_of(config)]
    return found + [memory(arm) for arm in config.arms] + [length(model.config), self.config]


def problems_of(phase):
    return spread(phase.config)
"""


def test_the_configuration_of_the_run_takes_the_place_of_a_phases_and_a_controls():
    found = changes(PHASES)
    assert [(line, change) for line, change in found if change.endswith("->  config")] == [
        (3, "phase.config  ->  config"),
        (4, "arm  ->  config"),
    ]
    assert [m.line for m in mutants(PHASES.encode(), "a.py") if m.kind == "phase"] == [3, 4]


RESETS = """
def batches(rows):
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        if len(batch) > size:
            yield batch
            batch, size = [], 0
            seen = 0
    batch = []
    seen = first(rows)


def read(self):
    total = self.count = self.last = None
    self.loss[:] = 0.0
    self.rows.clear()
"""


def test_what_is_reset_keeps_its_value():
    found = [
        (line, change.replace("  ->  ", " -> ").split(" -> "))
        for line, change in changes(RESETS)
        if " = " in change or "clear" in change
    ]
    assert found == [
        (8, ["batch, size = ([], 0)", "size, = (0,)"]),
        (8, ["batch, size = ([], 0)", "batch, = ([],)"]),
        (9, ["seen = 0", "seen = locals().get('seen', 0)"]),
        (10, ["batch = []", "pass"]),
        (15, ["total = self.count = self.last = None", "total = self.last = None"]),
        (15, ["total = self.count = self.last = None", "total = self.count = None"]),
        (16, ["self.loss[:] = 0.0", "pass"]),
        (17, ["self.rows.clear()", "pass"]),
    ]
    kinds = {(m.line, m.kind) for m in mutants(RESETS.encode(), "a.py")}
    assert {line for line, kind in kinds if kind == "reset"} == {8, 9, 10, 15, 16, 17}


def test_a_variable_that_is_reset_once_in_a_loop_keeps_what_it_had():
    """What the change does: the first round begins with the value, the second goes on."""
    source = "def sizes(rows):\n    for row in rows:\n        size = 0\n        size += row\n"
    source += "        yield size\n"
    (mutant,) = [m for m in mutants(source.encode(), "a.py") if "locals" in m.change]
    names = {}
    exec(compile(mutant.applied(source.encode()), "a.py", "exec"), names)
    assert [*names["sizes"]([1, 2, 3])] == [1, 3, 6]


def test_the_suite_starts_without_plugins_of_other_packages():
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, "--collect-only", "tests/common/test_words.py"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


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
    # Options meant for the project that runs this test must not reach the copy's pytest.
    environment = os.environ | {"PYTEST_ADDOPTS": "--no-such-option"}

    def run():
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
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
