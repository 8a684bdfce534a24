"""When checkpoints are saved by time, and when they are complete, on several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from trainer.config import RunConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training.callbacks import saving

ALONE = Ranks()
RUNNING = SimpleNamespace(phase_ended=False)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """Timeouts that the watchdog was armed with; it would end the process of the tests."""
    timeouts = []
    monkeypatch.setattr(saving, "watch", timeouts.append)
    return timeouts


def steps_saved(minutes, every=1000, ranks=ALONE, clock=1.0):
    """Return the saved steps of 12 that take ``clock`` minutes each."""
    trainer = SimpleNamespace(global_step=0, max_steps=12, accumulate_grad_batches=1)
    run = TrainerConfig(max_steps=12, checkpoint_every=every, checkpoint_minutes=minutes)
    now = SimpleNamespace(monotonic=lambda: 60 * clock * trainer.global_step)
    saved = []

    def save(callback, trainer, name):
        assert name == f"step-{trainer.global_step:06}"
        saved.append(trainer.global_step)
        callback.last_saved = trainer.global_step

    with mock.patch.object(saving, "time", now), mock.patch.object(saving.Saving, "save", save):
        callback = saving.Saving(RunConfig(trainer=run), ranks, None)
        for trainer.global_step in range(1, 13):
            callback.on_train_batch_end(trainer, RUNNING, None, None, 0)
    return saved


@pytest.mark.parametrize(
    ("minutes", "every", "expected"),
    [
        # The last step is saved anyhow.
        (None, 1000, [12]),
        (5, 1000, [5, 10, 12]),
        (0.01, 1000, [*range(1, 13)]),
        (5, 4, [4, 8, 12]),  # no later than five minutes after any other
        (3, 5, [3, 5, 8, 10, 12]),
    ],
)
def test_a_checkpoint_is_saved_so_long_after_the_last_one(minutes, every, expected):
    assert steps_saved(minutes, every) == expected


@pytest.fixture
def saved_by(monkeypatch, tmp_path):
    """Go through steps of two micro-batches, some of whose checkpoints cannot be written: by step
    what was saved, and of what was said to the timer."""

    def go(steps=7, permanent=(), failing=(), **options):
        config = RunConfig(run_dir=str(tmp_path), trainer=TrainerConfig(
            max_steps=steps, checkpoint_every=3, **options
        ))  # fmt: skip
        callback = saving.Saving(
            config, ALONE, lambda trainer: {"step": trainer.global_step}, frozenset(permanent)
        )
        written, entered, failed = [], [], []

        def save(name, model, optimizer, state):
            assert (model, optimizer) == ("model", "optimizer")
            if state["step"] in failing:
                failed.append(OSError("No space left"))
            else:
                written.append((name, state["step"]))

        def wait():
            if failed:
                raise failed.pop()

        monkeypatch.setattr(callback.writer, "save", save)
        monkeypatch.setattr(callback.writer, "wait", wait)
        trainer = SimpleNamespace(
            global_step=0,
            accumulate_grad_batches=2,
            optimizers=["optimizer"],
            lightning_module=SimpleNamespace(
                model="model", timer=SimpleNamespace(enter=entered.append)
            ),
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )
        for index in range(2 * steps):
            trainer.global_step += index % 2
            callback.on_train_batch_end(trainer, RUNNING, None, None, index)
        callback.teardown(trainer, None, "fit")
        assert entered == ["checkpoint", "data"] * (len(entered) // 2)
        return written, callback

    return go


def test_every_third_step_the_permanent_ones_and_the_last_are_saved(saved_by):
    saved, callback = saved_by(7, permanent=(2, 3))
    assert saved == [(f"step-{step:06}", step) for step in (2, 3, 6, 7)]
    assert callback.last_saved == 7
    assert saved_by(6)[0] == [("step-000003", 3), ("step-000006", 6)]
    assert saved_by(1)[0] == [("step-000001", 1)]


def test_only_the_last_checkpoint_must_be_written(saved_by, caplog):
    saved, _ = saved_by(7, failing=(3, 6))
    assert [step for _, step in saved] == [7]
    assert [r.getMessage() for r in caplog.records] == [
        "A checkpoint could not be written; the run goes on (No space left)"
    ] * 2
    with pytest.raises(OSError, match="No space left"):
        saved_by(7, failing=(7,))


def test_the_state_before_the_drop_is_saved(monkeypatch, tmp_path):
    callback = saving.Saving(RunConfig(run_dir=str(tmp_path)), ALONE, None)
    names = []
    monkeypatch.setattr(callback, "save", lambda trainer, name: names.append(name))
    callback.before_drop(None)
    assert names == ["before-drop"]
