"""A short run of the fuzzer over the index of checkpoints, which notices what it is there for."""

from __future__ import annotations

import pickle

import pytest

from scripts import fuzz_checkpoints
from scripts.fuzz_checkpoints import KINDS, fuzz


def test_the_reader_gives_an_index_or_refuses_it_and_does_nothing_else():
    counts = fuzz(0, seed=0, rounds=400)
    assert sum(counts.values()) == 400
    assert {kind for kind, _ in counts} == {*KINDS}
    assert sum(number for (_, outcome), number in counts.items() if outcome == "refused") > 300


def test_a_reader_that_runs_what_it_reads_is_found_out(monkeypatch):
    class Harmful:
        def __reduce__(self):
            return open, ("/dev/null",)

    monkeypatch.setattr(fuzz_checkpoints, "KINDS", {"one": lambda *_: pickle.dumps(Harmful())})
    monkeypatch.setattr(
        fuzz_checkpoints,
        "read_index",
        lambda directory: pickle.loads((directory / ".metadata").read_bytes()),
    )
    with pytest.raises(AssertionError, match="/dev/null"):
        fuzz(0, seed=0, rounds=1)
