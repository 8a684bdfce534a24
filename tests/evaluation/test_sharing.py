"""Shares cover everything once, and are of nearly equal work."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation import sharing
from trainer.evaluation.sharing import Share, wait_for


@given(st.lists(st.integers(1, 100)), st.integers(1, 9))
def test_every_piece_is_one_processes_and_loads_differ_by_at_most_one_piece(works, processes):
    pieces = list(enumerate(works))
    shares = [Share(i, processes).of(pieces, lambda p: p[1]) for i in range(processes)]
    assert sorted(piece for share in shares for piece in share) == pieces
    loads = [sum(work for _, work in share) for share in shares]
    assert max(loads) - min(loads) <= max(works, default=0)


def test_the_first_waits_until_the_others_are_done(monkeypatch):
    monkeypatch.setattr(sharing, "POLL", 0.0)
    left = [3, 3, 2, 1, 0]
    wait_for(lambda: left.pop(0))
    assert not left
