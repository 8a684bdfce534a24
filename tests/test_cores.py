"""A job has the cores that it was given, and not all there are."""

from __future__ import annotations

import os

import pytest

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
    ("given", "expected"), [("3", 3), ("4,2", 4), ("0", 5), ("all", 5), ("", 5), (None, 5)]
)
def test_threads_are_those_that_the_environment_asks_for_or_one_a_core(
    monkeypatch, given, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert usual_threads() == expected
