"""Python collects garbage at the same steps on all ranks, and a step leaves it nothing large."""

from __future__ import annotations

import gc

import pytest
import torch

from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.training import run as training
from trainer.training.callbacks import guards
from trainer.training.callbacks.guards import GarbageCollection, Guard


class Watching(Guard):
    """Stands in for the watchdog, just before the collection: what a collection would find."""

    def __init__(self, *_):
        pass

    def start(self):
        self.collected = []
        gc.callbacks.append(self.note)

    def note(self, phase, _):
        if phase == "start" and hasattr(self, "trainer"):
            self.collected.append(self.trainer.global_step)

    def end_step(self, trainer, module):
        self.trainer = trainer
        assert not gc.isenabled()

    def finish(self):
        gc.callbacks.remove(self.note)


@pytest.fixture
def watching(monkeypatch):
    found = Watching()
    monkeypatch.setattr(guards, "Watchdog", lambda *_: found)
    return found


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
def test_no_step_leaves_a_tensor_in_a_circle_of_references(run, monkeypatch, strategy):
    """It would stay in the GPU's memory until the next collection."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    left = []

    class Look(GarbageCollection):
        def end_step(self, trainer, module):
            if trainer.global_step in (4, 12):  # before and after drop and checkpoints
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                gc.set_debug(0)
                left.extend(x for x in gc.garbage if isinstance(x, torch.Tensor))
                gc.garbage.clear()

    monkeypatch.setattr(guards, "GarbageCollection", Look)
    if strategy != "single":
        monkeypatch.setattr(training, "starting_point", with_group(training.starting_point))
    try:
        run(strategy={"name": strategy})
    finally:
        shutdown_distributed()
    assert not left


def with_group(original):
    def begin(config, branch):
        init_distributed(config)
        return original(config, branch)

    return begin
