"""When checkpoints are saved by time, and when they are complete, on several ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.program import run_ranks
from trainer.runs.config import RunConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training.callbacks import checkpointing, timed_checkpoints

ALONE = Ranks()


class Checkpoints(list):
    """The steps that were saved."""

    last_saved = 0

    def save(self, trainer, name):
        assert name == f"step-{trainer.global_step:06}"
        self.append(trainer.global_step)
        self.last_saved = trainer.global_step


def steps_saved(minutes, every=1000, ranks=ALONE, clock=1.0):
    """Of a run of 12 steps that take ``clock`` minutes each and save every ``every`` steps."""
    trainer = SimpleNamespace(global_step=0, max_steps=12, accumulate_grad_batches=1)
    config = RunConfig(trainer=TrainerConfig(checkpoint_minutes=minutes))
    now = SimpleNamespace(monotonic=lambda: 60 * clock * trainer.global_step)
    with mock.patch.object(timed_checkpoints, "time", now):
        saved = Checkpoints()
        callback = timed_checkpoints.TimedCheckpoints(config, ranks, saved)
        for trainer.global_step in range(1, 13):
            if trainer.global_step % every == 0:
                saved.save(trainer, f"step-{trainer.global_step:06}")
            callback.on_train_batch_end(trainer, None, None, None, 0)
    return saved


@pytest.mark.parametrize(
    ("minutes", "every", "expected"),
    [
        (None, 1000, []),
        (5, 1000, [5, 10]),
        (0.01, 1000, [*range(1, 12)]),  # the last step is saved anyhow
        (5, 4, [4, 8, 12]),  # no later than five minutes after any other
        (3, 5, [3, 5, 8, 10]),
    ],
)
def test_a_checkpoint_is_saved_so_long_after_the_last_one(minutes, every, expected):
    assert steps_saved(minutes, every) == expected


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:3", [torch.device("cuda:3")]), ("cpu", [])]
)
def test_the_thread_that_writes_uses_its_ranks_gpu(monkeypatch, tmp_path, device, expected):
    """By itself a new thread uses the first one, where every rank would then hold memory."""
    chosen, written = [], []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(checkpointing, "tensors_of", lambda *_: {})
    monkeypatch.setattr(
        checkpointing.Checkpointing,
        "_write",
        lambda self, *what: written.append((what, threading.current_thread().name)),
    )
    callback = checkpointing.Checkpointing(RunConfig(), tmp_path, lambda trainer: {"step": 7})
    module = SimpleNamespace(timer=SimpleNamespace(enter=lambda _: None), model=None)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(
        global_step=7, lightning_module=module, optimizers=[None], strategy=strategy
    )
    callback.save(trainer, "step-000007")
    assert callback.finish() is None
    ((what, thread),) = written
    assert what == ({}, {"step": 7}, "step-000007")
    assert thread.startswith("checkpoint")
    assert chosen == expected


@pytest.fixture(scope="module")
def said_by_two(tmp_path_factory):
    """What each of two ranks says in ``checkpoint_ranks.py``, by its subject."""
    script = Path(__file__).with_name("checkpoint_ranks.py")
    done = run_ranks(2, script, cwd=tmp_path_factory.mktemp("run"))
    assert [rank.returncode for rank in done] == [0, 0], done
    return [dict(line.split(": ", 1) for line in rank.stdout.splitlines()) for rank in done]


def test_ranks_save_after_the_same_step_by_the_clock_of_the_first(said_by_two):
    """It votes after its fifth minute, and all know of it one step later; the second rank's clock
    is nine times as fast."""
    assert [said["timed"] for said in said_by_two] == ["[6, 12]"] * 2


def test_a_checkpoint_is_complete_for_no_rank_before_it_is_for_the_first(said_by_two):
    """Its last files are written by that one, here to a disk that is slow, and then full."""
    for said in said_by_two:
        assert "step 7 could not be written" in said["written"]
        assert "No space left on device" in said["written"]


def test_a_file_that_one_rank_cannot_hash_is_said_by_all_and_none_waits(said_by_two):
    for said in said_by_two:
        assert "step 7 could not be written (process 1: Stale file handle)" in said["hashed"]
