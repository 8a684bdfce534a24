"""What tests compare of two training runs: checkpoints, rows of metrics, resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from trainer.checkpoint import read_state, readers, step_name
from trainer.lightning.module import LanguageModule
from trainer.runs.directory import read_metrics


def checkpoint_of(config, step=None):
    return Path(config.run_dir) / "checkpoints" / step_name(step or config.trainer.max_steps)


def contents_of(path):
    """Everything a checkpoint holds, by name."""
    return {name: read() for name, read in readers(path).items()}


def assert_same_tensors(first, second, only=""):
    a, b = ({k: v for k, v in contents_of(path).items() if only in k} for path in (first, second))
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


SAVED = "effects", "benchmarks"
TIMES = "tokens_per_second", "mfu", "memory"  # differ between runs of one configuration


def assert_same_state(a, b):
    assert_same_tensors(a, b)
    first, second = read_state(a), read_state(b)
    for part in ("step", "layout", "tally", "texts", "pending_metrics", *SAVED):
        assert first[part] == second[part], part


def rows_of(config):
    rows = read_metrics(Path(config.run_dir) / "metrics.csv")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def start_from(config, step, run_dir):
    """Copy the checkpoint of a step, and the metrics, of a run into the directory of another."""
    path = checkpoint_of(config, step)
    shutil.copytree(path, run_dir / "checkpoints" / path.name)
    shutil.copy(Path(config.run_dir) / "metrics.csv", run_dir)


def assert_resumes(run, whole, steps, directory, **changes):
    """Resume a run in ``directory`` from the checkpoint of each step; it ends as the whole run."""
    for step in steps:
        start_from(whole, step, directory / f"from{step}")
        resumed, trained = run(f"from{step}", **changes)
        last = resumed.trainer.max_steps
        assert_same_state(trained, checkpoint_of(whole, last))
        assert rows_of(resumed) == rows_of(whole)


def during(monkeypatch, action, update):
    """Call ``action`` in the middle of the forward pass of one update (from 0), once."""
    original, done = LanguageModule.training_step, []

    def step(module, batch, index):
        if module.global_step == update and not done:
            done.append(True)
            action()
        return original(module, batch, index)

    monkeypatch.setattr(LanguageModule, "training_step", step)
