"""Cores and threads of a process, and work that a signal ends."""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from tests.program import ROOT
from trainer.common import spinning
from trainer.common.errors import PreemptedError
from trainer.common.files import partial_directory
from trainer.common.processes import (
    check_signals,
    default_threads,
    requeue,
    stop_on_signals,
    use_cores,
)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("3", 3), ("4,2", 4), ("", 5), (None, 5)],
)
def test_threads_are_the_environments_or_one_a_core(monkeypatch, variable, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert default_threads() == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again():
    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 24)  # 64 MiB, 16,384 pages
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    threads = torch.get_num_threads()
    for number in (3, 1):
        use_cores(number)
        assert torch.get_num_threads() == number
    torch.set_num_threads(threads)
    # glibc's cache of seven small blocks, cut off in front of aligned ones, has to fill up first.
    assert min(faults() for _ in range(12)) < 100


WAITS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["10000", "1"]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", "1"]),
        ({"OMP_WAIT_POLICY": "active"}, [None, None]),
    ],
)
def test_threads_wait_as_the_user_says_or_briefly(monkeypatch, variables, expected):
    for name in (*WAITS, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    importlib.reload(spinning)
    assert [os.environ.get(name) for name in WAITS] == expected


def test_waiting_of_threads_is_set_before_torch_is_loaded():
    """The runtime reads the variables when torch loads it; a command's first import sets them."""
    code = (
        "import os, sys, trainer.__main__\n"
        "assert 'torch' not in sys.modules\n"
        "assert os.environ['GOMP_SPINCOUNT'] == '10000'"
    )
    clean = {name: value for name, value in os.environ.items() if name not in WAITS}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, check=True)
    imports = re.compile(r"^(?:import|from) ((?:trainer|torch|lightning)\b.*?)(?:  #|$)", re.M)
    for path in (ROOT / "scripts").glob("*.py"):
        modules = imports.findall(path.read_text())
        if "torch" in modules:
            assert modules[0] == "trainer.common import spinning", path.name


@pytest.fixture
def handlers_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.usefixtures("handlers_as_before")
def test_a_signal_ends_the_work_and_removes_what_is_half_written(tmp_path, name):
    def work():
        stop_on_signals()
        with partial_directory(tmp_path / "model") as partial:
            (partial / "weights").write_text("half")
            signal.raise_signal(getattr(signal, name))

    with pytest.raises(PreemptedError, match=rf"Stopped \({name}\)") as stop:
        work()
    assert stop.value.reason == name
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("handlers_as_before")
def test_the_first_of_ignored_signals_counts_until_the_next_command():
    stop_on_signals()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with suppress(PreemptedError):
            signal.raise_signal(number)
    with pytest.raises(PreemptedError, match="SIGUSR1") as stop:
        check_signals()
    assert stop.value.reason == "SIGUSR1"
    stop_on_signals()
    check_signals()


def test_a_task_of_an_array_requeues_itself_alone(monkeypatch):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    for name, value in (("JOB_ID", "9"), ("ARRAY_JOB_ID", "7"), ("ARRAY_TASK_ID", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    requeue("time limit")
    requeue("SIGTERM")
    assert commands == [["scontrol", "requeue", "7_2"]]
