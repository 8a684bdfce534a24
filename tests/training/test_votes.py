"""What ranks agree on, and how long they wait, without ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.runs.config import RunConfig
from trainer.training.callbacks import limits, votes
from trainer.training.callbacks.limits import Limits
from trainer.training.callbacks.votes import Vote


@pytest.fixture
def others(monkeypatch):
    """Votes of another rank, added to one's own once they are waited for."""
    cast = []

    def all_reduce(mine, group, async_op):
        assert async_op
        assert group == "waiting"
        own = cast.pop(0)
        return SimpleNamespace(wait=lambda: mine.add_(own))

    monkeypatch.setattr(votes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(votes.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(votes.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(votes, "waiting_group", lambda: "waiting")
    return cast


def test_a_vote_is_known_one_step_later_on_all_ranks(others):
    others[:] = [0, 1, 0, 1, 0]
    vote = Vote()
    assert [vote.agreed(mine) for mine in (False, False, True, True, False)] == [
        *(False, False, True, True, True),
    ]


@pytest.mark.parametrize(("there", "size"), [(False, 2), (True, 1)])
def test_alone_it_is_known_at_once(monkeypatch, there, size):
    monkeypatch.setattr(votes.dist, "is_initialized", lambda: there)
    monkeypatch.setattr(votes.dist, "get_world_size", lambda: size)
    vote = Vote()
    assert [vote.agreed(mine) for mine in (False, True, False)] == [False, True, False]


def test_ranks_wait_longer_before_the_first_step_is_done_and_after_the_last(monkeypatch):
    said = []
    monkeypatch.setattr(limits, "limit_collectives", said.append)
    config = RunConfig()
    callback = Limits(config)
    trainer = SimpleNamespace(accumulate_grad_batches=2)
    for index in range(6):
        callback.on_train_batch_end(trainer, None, None, None, index)
        said.append(index)
    callback.on_train_end()
    times = config.strategy.timeouts
    assert times.collective != times.start
    assert said == [0, times.collective, 1, 2, 3, 4, 5, times.start]
