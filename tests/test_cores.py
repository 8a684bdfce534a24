"""A job has the cores that it was given, and not all there are."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from trainer.cores import cores, usual_threads


@pytest.mark.parametrize(("given", "expected"), [({3, 5}, 2), (None, 64)])
def test_cores_are_those_that_the_process_may_use(monkeypatch, given, expected):
    """Where the system does not tell (macOS), they are those of the machine."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    if given is None:
        monkeypatch.delattr(os, "sched_getaffinity")
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: given)
    assert cores() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("3", 3), ("99999999", 1024), ("4,2", 4), ("0", 5), ("all", 5), ("", 5), (None, 5)],
)
def test_threads_are_those_that_the_environment_asks_for_or_one_a_core(
    monkeypatch, given, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert usual_threads() == expected


WAITS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["10000", "1"]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", "1"]),
        ({"OMP_WAIT_POLICY": "active"}, [None, None]),
    ],
)
def test_threads_wait_as_the_user_says_or_briefly(monkeypatch, given, expected):
    for name in (*WAITS, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    importlib.reload(trainer)
    assert [os.environ.get(name) for name in WAITS] == expected


def test_how_threads_wait_is_set_before_torch_is_loaded():
    """The runtime reads it when torch loads it; the program's first module sets it."""
    code = (
        "import os, sys, trainer.__main__\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    clean = {name: value for name, value in os.environ.items() if name not in WAITS}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "10000"
    imports = re.compile(r"^(?:import|from) (trainer|torch|lightning)\b", re.MULTILINE)
    for path in (ROOT / "scripts").glob("*.py"):
        text = path.read_text()
        if re.search(r"^(?:import|from) torch", text, re.MULTILINE):
            assert imports.search(text)[1] == "trainer", path.name
