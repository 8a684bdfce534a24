"""Guards: skip diverging samples, end stuck processes, collect garbage at fixed steps."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.program import run as run_process
from tests.training.test_run import checkpoint_of, rows_of
from trainer.common.errors import UserError
from trainer.data.dataset import TrainingSamples
from trainer.runs.checkpoints import read_state
from trainer.runs.config import RunConfig, TrainerConfig
from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.runs.saved_state import rewinds_of
from trainer.training import run as training
from trainer.training.callbacks import guards
from trainer.training.callbacks.guards import (
    GarbageCollection,
    Rewind,
    Watchdog,
)
from trainer.training.callbacks.transitions import Transitions
from trainer.training.module import LanguageModule, StepCallback


def poison(monkeypatch, bad):
    """Weights that are not numbers where the sample's number is ``bad``; all numbers read."""
    original, read = TrainingSamples.__getitems__, []

    def items(samples, counters):
        read.extend(counters)
        batch = original(samples, counters)
        for row, number in enumerate(counters):
            if bad(number):
                batch["weights"][row] = np.nan
        return batch

    monkeypatch.setattr(TrainingSamples, "__getitems__", items)
    return read


def test_a_broken_stretch_is_rewound_and_its_samples_left_out(run, monkeypatch):
    """Updates 7 and 8 (samples 28 to 35) break; the last checkpoint is from step 6."""
    read = poison(monkeypatch, range(28, 36).__contains__)
    config, _ = run(trainer={"rewind_after": 2, "log_every": 1})
    state = read_state(checkpoint_of(config))
    assert state["skips"] == [[6, 12]]
    assert state["tally"]["skipped"] == 0
    # Step 7 begins with sample 36 now, and the run still has its twelve steps.
    again = read[len(range(36)) :]
    assert [n for n in again if n >= 36][:24] == list(range(36, 60))
    rows = rows_of(config)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert unused(config) == ["unused-step-000009"]


def unused(config):
    paths = (Path(config.run_dir) / "checkpoints").glob("unused-*")
    return sorted(path.name for path in paths)


def test_a_rewind_resumes_from_the_last_sound_step(run, monkeypatch):
    """With a checkpoint after every step: updates 8 and 9 (samples 28 to 35) break."""
    poison(monkeypatch, range(28, 36).__contains__)
    config, _ = run(trainer={"rewind_after": 2, "log_every": 1, "checkpoint_every": 1})
    assert unused(config) == ["unused-step-000009"]
    assert read_state(checkpoint_of(config))["skips"] == [[7, 8]]


def test_a_second_broken_stretch_before_the_next_checkpoint_is_left_out_too(run, monkeypatch):
    """Updates 7 and 8 break, and on the samples after those updates 8 and 9: the run goes back to
    step 6, and then to the checkpoint before it, which knows of neither."""
    first, second = range(28, 36), range(40, 48)
    read = poison(monkeypatch, lambda number: number in first or number in second)
    config, _ = run(trainer={"rewind_after": 2, "log_every": 1})
    state = read_state(checkpoint_of(config))
    # Samples 24 to 35 first, and then 12 to 47.
    assert state["skips"] == [[3, 36]]
    assert state["tally"]["skipped"] == 0
    assert [n for n in read if n >= 48][:36] == list(range(48, 84))
    assert unused(config) == ["unused-step-000009"]
    assert [row["step"] for row in rows_of(config)] == list(range(1, 13))
    assert all(np.isfinite(row["loss"]) for row in rows_of(config))


def test_a_run_that_goes_on_breaking_asks_for_a_person(run, monkeypatch, caplog):
    poison(monkeypatch, lambda number: number >= 28)
    monkeypatch.setattr("trainer.training.run.MAX_REWINDS", 2)
    with pytest.raises(UserError, match=r"went back 2 times.*learning rate"):
        run(trainer={"rewind_after": 2, "log_every": 1})
    assert caplog.text.count("Going back to step") == 2


def test_a_rewind_over_two_orders_of_samples_is_one(run, monkeypatch):
    """The last update of a phase breaks, and the first of the next one, of longer sequences."""
    broken, original = {5, 6}, LanguageModule.training_step

    def step(module, batch, index):
        loss = original(module, batch, index)
        if module.global_step in broken:
            broken.remove(module.global_step)
            loss = loss * torch.nan
        return loss

    monkeypatch.setattr(LanguageModule, "training_step", step)
    phases = {"short": {"steps": 6}, "long": {"steps": 6, "sequence_length": 64}}
    changes = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}, "phases": phases}
    config, _ = run(trainer={"rewind_after": 2, "log_every": 1}, **changes)
    state = read_state(checkpoint_of(config))
    assert state["skips"] == [[3, 12], [6, 4]]
    assert rewinds_of(state) == 1
    del state["rewinds"]  # as an earlier version wrote it
    assert rewinds_of(state) == 2


def test_a_diverged_run_stops_and_keeps_its_last_healthy_checkpoint(run, monkeypatch):
    """Updates 8 to 12 break; the same run resumes with a rewind."""
    poison(monkeypatch, range(28, 48).__contains__)
    monkeypatch.setattr(guards, "MOST_SKIPPED", 4)
    changes = {"log_every": 1, "checkpoint_every": 1, "keep_checkpoints": 1}
    with pytest.raises(UserError) as error:
        run(trainer=changes)
    message = (
        r"not finite in steps 8 to 11; the last checkpoint before them is '\S+/step-000007'\. The "
        r"same command with trainer\.rewind_after=8 goes back to it .*optimizer\.lr\) below 0\.0003"
    )
    assert re.search(message, str(error.value))
    assert not error.value.is_transient  # SLURM does not requeue it
    config, _ = run(trainer={**changes, "rewind_after": 4, "keep_checkpoints": 100})
    assert read_state(checkpoint_of(config))["skips"] == [[7, 20]]
    assert unused(config) == ["unused-step-000012"]


def test_a_run_that_diverges_at_its_end_is_not_finished(run, monkeypatch):
    """Updates 8 to 12 of 12 break; the last one is no multiple of ``log_every``."""
    poison(monkeypatch, range(28, 48).__contains__)
    monkeypatch.setattr(guards, "MOST_SKIPPED", 5)
    for _ in range(2):  # the second command trains nothing
        with pytest.raises(UserError, match=r"not finite in steps 8 to 12; .*step-000006'"):
            run(trainer={"log_every": 5})
    config, _ = run(trainer={"log_every": 5, "rewind_after": 5})
    assert read_state(checkpoint_of(config))["skips"] == [[6, 24]]


def test_a_rewind_goes_past_a_checkpoint_whose_parameters_are_not_finite(run, monkeypatch):
    broken, original = [], Transitions.on_train_batch_end

    def break_once(callback, trainer, module, *arguments):
        original(callback, trainer, module, *arguments)
        if trainer.global_step == 9 and not broken:
            broken.append(module.model.norm.weight.data.fill_(torch.inf))

    monkeypatch.setattr(Transitions, "on_train_batch_end", break_once)
    config, _ = run(trainer={"rewind_after": 2, "log_every": 1})
    state = read_state(checkpoint_of(config))
    assert (state["skips"], state["finite_parameters"]) == ([[6, 20]], True)
    assert unused(config) == ["unused-step-000009"]


def test_a_stuck_step_ends_the_process_with_its_stacks(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from trainer.training.callbacks.guards import Watchdog\n"
        "from trainer.runs.config import RunConfig, TrainerConfig\n"
        "config = RunConfig(trainer=TrainerConfig(step_timeout=0.1))\n"
        "def waiting_for_a_rank():\n"
        "    time.sleep(60)\n"
        "Watchdog(config, Path('.'), True).on_train_start()\n"
        "waiting_for_a_rank()\n"
    )
    done = run_process(script, cwd=tmp_path)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "waiting_for_a_rank" in done.stderr


def steps_of(callback, module=None, steps=6, micro_batches=2):
    """Go through steps of two micro-batches, as Lightning does."""
    trainer = SimpleNamespace(
        global_step=0, max_steps=steps, accumulate_grad_batches=micro_batches, should_stop=False
    )
    for index in range(micro_batches * steps):
        yield trainer, index
        callback.on_train_batch_start(trainer, module, None, index)
        trainer.global_step += (index + 1) % micro_batches == 0
        callback.on_train_batch_end(trainer, module, None, None, index)


@pytest.mark.parametrize(
    ("limit", "in_a_row", "broken", "looked"),
    [
        (3, 3, (3, 6), [3, 6]),
        (3, 5, (1, 6), [3, 6]),  # before the first that was skipped, not the last three
        (4, 3, None, [3, 6]),
        (None, 31, None, [3, 6]),
        (None, 32, (-26, 6), [3, 6]),  # ends with an error
    ],
)
def test_skipped_updates_are_counted_where_metrics_are_logged(limit, in_a_row, broken, looked):
    """Every three steps; the sixth finds the last ones skipped."""
    seen, now = [], []

    def skipped():
        seen.append(now[0].global_step)
        return in_a_row if seen[-1] == 6 else 0

    callback = Rewind(RunConfig(trainer=TrainerConfig(rewind_after=limit, log_every=3)))
    tally = SimpleNamespace(skipped_in_a_row=skipped)
    module = SimpleNamespace(tally=tally, phase_ended=False)
    for trainer, _ in steps_of(callback, module):
        now[:] = [trainer]
    assert (callback.diverged, seen) == (broken, looked)
    assert now[0].should_stop == (broken is not None)


@pytest.mark.parametrize(("rewind_after", "broken"), [(None, None), (8, (0, 100))])
def test_a_control_goes_on_unless_it_rewinds(rewind_after, broken):
    config = RunConfig(trainer=TrainerConfig(rewind_after=rewind_after))
    callback = Rewind(config, is_control=True)
    callback.judge(100, 100)
    assert callback.diverged == broken


def test_every_step_is_watched_and_the_first_for_longer(monkeypatch, tmp_path):
    armed = []
    later = {"exit": True, "file": guards.sys.__stderr__}

    def arm(seconds, **options):
        assert options == later
        armed.append(seconds)

    monkeypatch.setattr(guards.faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(
        guards.faulthandler, "cancel_dump_traceback_later", lambda: armed.append("over")
    )
    config = RunConfig(trainer=TrainerConfig(step_timeout=5.0))
    callback = Watchdog(config, tmp_path, False)
    callback.on_train_start()
    for _ in steps_of(callback, steps=3):
        pass
    callback.on_train_end()
    callback.on_exception()
    assert armed == [50.0, 50.0, 5.0, 5.0, "over", "over"]
    armed.clear()
    Watchdog(RunConfig(trainer=TrainerConfig(step_timeout=None)), tmp_path, False).on_train_start()
    assert armed == []


@pytest.mark.parametrize("rank_zero", [True, False])
def test_a_heart_beats_every_logged_step_and_at_the_end(monkeypatch, tmp_path, rank_zero):
    beats, full = [], [False]

    def write(path, text):
        assert path == tmp_path / "heartbeat.json"
        beats.append(json.loads(text))
        if full[0]:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(guards, "write_atomically", write)
    monkeypatch.setattr(guards.time, "time", lambda: 12.5)
    callback = Watchdog(RunConfig(trainer=TrainerConfig(log_every=4)), tmp_path, rank_zero)
    for _ in steps_of(callback):
        pass
    beat = {"time": 12.5, "pid": os.getpid()}
    assert beats == ([beat | {"step": 4}, beat | {"step": 6}] if rank_zero else [])


def test_a_full_disk_is_logged_once_until_a_write_succeeds(monkeypatch, tmp_path, caplog):
    full = iter([True, True, False, True, False, False])

    def write(*_):
        if next(full):
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(guards, "write_atomically", write)
    callback = Watchdog(RunConfig(trainer=TrainerConfig(log_every=1)), tmp_path, True)
    for _ in steps_of(callback):
        pass
    assert [r.getMessage() for r in caplog.records] == 2 * ["heartbeat.json: full; the run goes on"]


class Watching(StepCallback):
    """Stands in for the watchdog, just before the collection: what a collection would find."""

    def __init__(self, *_):
        pass

    def on_train_start(self, *_):
        self.collected = []
        gc.callbacks.append(self.note)

    def note(self, phase, _):
        if phase == "start" and hasattr(self, "trainer"):
            self.collected.append(self.trainer.global_step)

    def end_step(self, trainer, module):
        self.trainer = trainer
        assert not gc.isenabled()

    def on_train_end(self, *_):
        gc.callbacks.remove(self.note)


@pytest.fixture
def watching(monkeypatch):
    guard = Watching()
    monkeypatch.setattr(guards, "Watchdog", lambda *_: guard)
    return guard


def test_garbage_is_collected_every_so_many_steps_and_never_in_between(run, watching):
    run(trainer={"gc_every": 5})
    assert watching.collected == [5, 10]
    assert gc.isenabled()


def test_a_collection_looks_at_what_training_has_made_only(run, watching, monkeypatch):
    looked_at = []
    note = lambda *_: looked_at.append(len(gc.get_objects()))  # noqa: E731
    monkeypatch.setattr(watching, "end_step", note)
    run()
    assert looked_at[-1] < gc.get_freeze_count() / 10


def test_a_run_may_leave_it_to_python(run, monkeypatch):
    monkeypatch.setattr(gc, "disable", pytest.fail)
    run(trainer={"gc_every": None})


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_no_step_leaves_a_tensor_in_a_reference_cycle(run, monkeypatch, strategy):
    """Such a tensor would stay in the GPU's memory until the next collection."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    tensors = []

    class Look(GarbageCollection):
        def end_step(self, trainer, module):
            if trainer.global_step in (4, 12):  # before and after drop and checkpoints
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                gc.set_debug(0)
                tensors.extend(x for x in gc.garbage if isinstance(x, torch.Tensor))
                gc.garbage.clear()

    monkeypatch.setattr(guards, "GarbageCollection", Look)
    if strategy != "single":
        monkeypatch.setattr(training, "starting_point", with_group(training.starting_point))
    try:
        run(strategy={"name": strategy})
    finally:
        shutdown_distributed()
    assert not tensors


def with_group(original):
    def begin(config, branch):
        init_distributed(config)
        return original(config, branch)

    return begin
