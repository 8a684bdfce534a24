"""Guards: skip diverging samples, end stuck processes, collect garbage at fixed steps."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.program import run as run_process
from trainer.common.errors import UserError
from trainer.config import RunConfig, TrainerConfig
from trainer.data.dataset import TrainingSamples
from trainer.runs.ranks import init_distributed
from trainer.training.callbacks import guards
from trainer.training.callbacks.guards import (
    Watchdog,
)
from trainer.training.module import StepCallback


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


def unused(config):
    paths = (Path(config.run_dir) / "checkpoints").glob("unused-*")
    return sorted(path.name for path in paths)


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
        "Watchdog(config.trainer.step_timeout).on_train_start()\n"
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
    callback = Watchdog(config.trainer.step_timeout)
    callback.on_train_start()
    for _ in steps_of(callback, steps=3):
        pass
    callback.on_train_end()
    callback.on_exception()
    assert armed == [50.0, 50.0, 5.0, 5.0, "over", "over"]
    armed.clear()
    Watchdog(None).on_train_start()
    assert armed == []


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


def with_group(original):
    def begin(config, branch):
        init_distributed(config)
        return original(config, branch)

    return begin


def test_a_diverged_run_stops_and_keeps_its_last_healthy_checkpoint(run, monkeypatch):
    """Updates 8 to 12 break."""
    poison(monkeypatch, range(28, 48).__contains__)
    monkeypatch.setattr(guards, "MOST_SKIPPED", 4)
    changes = {"log_every": 1, "checkpoint_every": 1, "keep_checkpoints": 9}
    with pytest.raises(UserError) as error:
        run(trainer=changes)
    message = r"not finite in steps 8 to 11; the last healthy checkpoint is \S+/step-000007"
    assert re.search(message, str(error.value))
