"""When checkpoints are saved by time, and when they are complete, on several ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.program import run_ranks
from trainer.common.errors import UserError
from trainer.runs.config import RunConfig, TrainerConfig
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


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:3", [torch.device("cuda:3")]), ("cpu", [])]
)
def test_the_thread_that_writes_uses_its_ranks_gpu(monkeypatch, tmp_path, device, expected):
    """By default a new thread uses GPU 0, where every rank would then hold memory."""
    chosen, written = [], []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(saving, "tensors_of", lambda *_: {})
    monkeypatch.setattr(
        saving.Saving,
        "_write",
        lambda self, *checkpoint: written.append((checkpoint, threading.current_thread().name)),
    )
    callback = saving.Saving(RunConfig(run_dir=str(tmp_path)), ALONE, lambda trainer: {"step": 7})
    module = SimpleNamespace(timer=SimpleNamespace(enter=lambda _: None), model=None)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(
        global_step=7, lightning_module=module, optimizers=[None], strategy=strategy
    )
    callback.save(trainer, "step-000007")
    assert callback.finish() is None
    ((checkpoint, thread),) = written
    assert checkpoint == ({}, {"step": 7}, "step-000007")
    assert thread.startswith("checkpoint")
    assert chosen == expected


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Lines that each of two ranks prints in ``checkpoint_ranks.py``, by their first word."""
    script = Path(__file__).with_name("checkpoint_ranks.py")
    done = run_ranks(2, script, cwd=tmp_path_factory.mktemp("run"))
    assert [rank.returncode for rank in done] == [0, 0], done
    return [dict(line.split(": ", 1) for line in rank.stdout.splitlines()) for rank in done]


def test_ranks_save_after_the_same_step_by_the_clock_of_the_first(outputs):
    """It votes after its fifth minute, and all know of it one step later; the second rank's clock
    is nine times as fast."""
    assert [output["timed"] for output in outputs] == ["[6, 12]"] * 2


def test_a_checkpoint_is_complete_for_no_rank_before_it_is_for_the_first(outputs):
    """Its last files are written by that one, here to a disk that is slow, and then full."""
    for output in outputs:
        assert "step 7 could not be written" in output["written"]
        assert "No space left on device" in output["written"]


def test_all_ranks_report_a_file_that_one_cannot_hash_and_none_waits(outputs):
    for output in outputs:
        assert "step 7 could not be written (process 1: Stale file handle)" in output["hashed"]


@pytest.fixture
def saved_by(monkeypatch, tmp_path):
    """Go through steps of two micro-batches, some of whose checkpoints cannot be written: by step
    what was saved, and of what was said to the timer."""

    def go(steps=7, permanent=(), failing=(), asynchronous=True, error=None, **options):
        config = RunConfig(run_dir=str(tmp_path), trainer=TrainerConfig(
            max_steps=steps, checkpoint_every=3, async_checkpoint=asynchronous, **options
        ))  # fmt: skip
        callback = saving.Saving(
            config, ALONE, lambda trainer: {"step": trainer.global_step}, frozenset(permanent)
        )
        written, entered, staged = [], [], []

        def write(tensors, state, name):
            if state["step"] in failing:
                raise error or OSError("No space left.\nMore.")
            written.append((name, state["step"], tensors))

        def stage(tensors):
            staged.append(tensors)
            return "copied"

        monkeypatch.setattr(saving, "tensors_of", lambda model, optimizer: (model, optimizer))
        monkeypatch.setattr(callback, "_write", write)
        monkeypatch.setattr(callback, "_staged", stage)
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
            if not asynchronous:
                assert callback._in_flight is None
        callback.teardown(trainer, None, "fit")
        assert staged == [("model", "optimizer")] * (len(entered) // 2)
        assert entered == ["checkpoint", "data"] * (len(entered) // 2)
        assert {tensors for *_, tensors in written} <= {"copied"}
        return [(name, step) for name, step, _ in written], callback

    return go


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_third_step_the_permanent_ones_and_the_last_are_saved(saved_by, asynchronous):
    saved, callback = saved_by(7, permanent=(2, 3), asynchronous=asynchronous)
    assert saved == [(f"step-{step:06}", step) for step in (2, 3, 6, 7)]
    assert callback.last_saved == 7
    assert saved_by(6)[0] == [("step-000003", 3), ("step-000006", 6)]
    assert saved_by(1)[0] == [("step-000001", 1)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_only_the_last_checkpoint_must_be_written(saved_by, caplog, asynchronous):
    saved, _ = saved_by(7, failing=(3, 6), asynchronous=asynchronous)
    assert [step for _, step in saved] == [7]
    assert [r.getMessage() for r in caplog.records] == [
        f"Checkpoint step-00000{step} could not be written (No space left); the run goes on, older "
        "checkpoints are untouched"
        for step in (3, 6)
    ]
    with pytest.raises(UserError, match=r"step 7 could not be written \(No space left\)"):
        saved_by(7, failing=(7,), asynchronous=asynchronous)


def test_errors_other_than_failed_writes_are_raised(saved_by):
    with pytest.raises(KeyError):
        saved_by(7, failing=(3,), error=KeyError("a mistake"))


def test_the_reason_of_a_failure_is_its_first_line():
    wrapped = saving.CheckpointException("write", {1: (OSError("full\nmore"), None)})
    assert saving.reason(wrapped) == "full"
    assert saving.reason(UserError.at("", "said.")) == "said."
    assert saving.reason(RuntimeError()) == "RuntimeError"
    assert saving.reason(RuntimeError("a\nb")) == "a"


def test_a_failed_write_leaves_nothing_on_a_full_disk(monkeypatch, tmp_path):
    def save(tensors, place, group):
        place.mkdir()
        (place / "__0_0.distcp").write_bytes(b"half")
        raise OSError("No space left")

    monkeypatch.setattr(saving, "save", save)
    callback = saving.Saving(RunConfig(run_dir=str(tmp_path)), ALONE, None)
    callback.directory.mkdir()
    with pytest.raises(OSError, match="No space left"):
        callback._write({}, {}, "step-000003")
    assert not list(callback.directory.iterdir())


def test_the_state_before_the_drop_is_saved(monkeypatch, tmp_path):
    callback = saving.Saving(RunConfig(run_dir=str(tmp_path)), ALONE, None)
    names = []
    monkeypatch.setattr(callback, "save", lambda trainer, name: names.append(name))
    callback.before_drop(None)
    assert names == ["before-drop"]


def test_copies_go_to_the_same_memory_while_names_stay(monkeypatch, tmp_path):
    made = []

    def stager(pinned):
        made.append(pinned)
        return SimpleNamespace(stage=lambda tensors: (len(made), tensors))

    monkeypatch.setattr(saving, "BlockingAsyncStager", stager)
    callback = saving.Saving(RunConfig(run_dir=str(tmp_path)), ALONE, None)
    copies = [callback._staged(dict.fromkeys(names))[0] for names in ("ab", "ba", "abc", "abc")]
    assert copies == [1, 1, 2, 2]
    assert made == [torch.cuda.is_available()] * 2
