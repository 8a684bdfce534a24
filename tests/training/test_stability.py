"""Broken stretches are left out, and stuck processes say where."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.program import run as run_process
from tests.training.test_run import checkpoint_of, rows_of
from trainer.data.dataset import TrainingSamples
from trainer.errors import UserError
from trainer.runs.checkpoints import read_state
from trainer.training.callbacks import stability


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
    assert state["tally"]["_skipped"] == 0
    # Step 7 begins with sample 36 now, and the run still has its twelve steps.
    again = read[len(range(36)) :]
    assert [n for n in again if n >= 36][:24] == list(range(36, 60))
    rows = rows_of(config)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert unused(config) == ["unused-step-000009"]


def unused(config):
    found = (Path(config.run_dir) / "checkpoints").glob("unused-*")
    return sorted(path.name for path in found)


def test_the_last_sound_step_is_kept_and_the_first_broken_one_is_not(run, monkeypatch):
    """With a checkpoint after every step: updates 8 and 9 (samples 28 to 35) break."""
    poison(monkeypatch, range(28, 36).__contains__)
    config, _ = run(trainer={"rewind_after": 2, "log_every": 1, "checkpoint_every": 1})
    assert unused(config) == ["unused-step-000008", "unused-step-000009"]
    assert read_state(checkpoint_of(config))["skips"] == [[7, 8]]


def test_a_run_that_goes_on_breaking_asks_for_a_person(run, monkeypatch):
    poison(monkeypatch, lambda number: number >= 28)
    monkeypatch.setattr("trainer.training.run.MAX_REWINDS", 2)
    with pytest.raises(UserError, match=r"went back 2 times.*learning rate"):
        run(trainer={"rewind_after": 2, "log_every": 1})


def test_a_stuck_step_ends_the_process_with_its_stacks(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from trainer.training.callbacks.stability import Watchdog\n"
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


def test_a_heartbeat_says_how_far_the_run_is(finished):
    config, _ = finished
    beat = json.loads((Path(config.run_dir) / "heartbeat.json").read_text())
    assert beat["step"] == 12
    assert beat["pid"] == os.getpid()


def test_a_heartbeat_on_a_full_disk_stops_no_run(run, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stability, "write_atomically", full)
    _, trained = run(trainer={"log_every": 1})
    assert trained.checkpoint.name == "step-000012"
    said = [r.getMessage() for r in caplog.records if "heartbeat" in r.getMessage()]
    assert said == ["heartbeat.json: No space left on device; the run goes on"]
