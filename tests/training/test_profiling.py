"""Chosen steps are profiled; others cost nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from tests.training.test_run import assert_same_tensors, checkpoint_of, rows_of
from trainer.common.errors import UserError
from trainer.training.callbacks import guards
from trainer.training.callbacks.guards import Profiling


def test_a_trace_and_a_table_of_the_chosen_steps(run):
    config, _ = run(trainer={"profile_steps": [3, 4], "micro_batch_size": 2})
    directory = Path(config.run_dir) / "profile"
    assert sorted(p.name for p in directory.iterdir()) == [
        "steps-3-4-rank-0.json.gz",
        "steps-3-4-rank-0.txt",
    ]
    with gzip.open(directory / "steps-3-4-rank-0.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]
    assert {name for name in names if name.startswith("ProfilerStep")} == {
        "ProfilerStep#1",
        "ProfilerStep#2",
    }
    table = (directory / "steps-3-4-rank-0.txt").read_text()
    assert "Self CPU" in table
    assert "aten::mm" in table or "mkldnn" in table


@pytest.mark.parametrize("steps", [[3], [0, 2], [4, 3], [11, 13], [1, 2, 3]])
def test_steps_that_are_none_of_the_run_are_refused(run, steps):
    with pytest.raises(UserError, match=r"profile_steps(\[0\])?: expected .*, .*got "):
        run(trainer={"profile_steps": steps})


def test_a_profiled_run_is_the_run_without(run, monkeypatch):
    profiled, _ = run("profiled", trainer={"profile_steps": [1, 1]})
    monkeypatch.setattr(guards, "Profiling", pytest.fail)
    plain, _ = run("plain")
    assert rows_of(profiled) == rows_of(plain)
    assert_same_tensors(checkpoint_of(profiled), checkpoint_of(plain))


@pytest.fixture
def profiled(monkeypatch, tmp_path):
    """Go through steps of two micro-batches from a step on: what the profiler was told, and when,
    as (step, what), with the step that is under way."""

    def go(first, last, *, start=0, end=6, device="cpu"):
        calls, now = [], [start + 1]
        trainer = SimpleNamespace(global_step=start, accumulate_grad_batches=2)

        class Profile:
            def __init__(self, **options):
                self.options, self.done = options, 0
                calls.append((now[0], options))

            def start(self):
                calls.append((now[0], "start"))

            def step(self):
                self.done += 1
                calls.append((now[0], "step"))

            def stop(self):
                calls.append((now[0], "stop"))

        monkeypatch.setattr(guards, "profile", Profile)
        timer = SimpleNamespace(enter=lambda part: calls.append((now[0], part)))
        module = SimpleNamespace(device=torch.device(device), timer=timer)
        guard = Profiling(first, last, tmp_path, 3)
        for index in range(2 * (end - start)):
            now[0] = start + index // 2 + 1
            guard.on_train_batch_start(trainer, module, None, index)
            trainer.global_step += index % 2
            guard.on_train_batch_end(trainer, module, None, None, index)
        now[0] = "end"
        guard.on_train_end()
        guard.on_exception()
        return calls

    return go


def made(calls):
    """The options of the only profiler, its name, the step it was made in, and what followed."""
    ((step, options), *following) = calls
    actions = [options["schedule"](number) for number in range(5)]
    return step, actions, options["on_trace_ready"].args, following


NONE, WARMUP, RECORD, SAVE = (
    ProfilerAction.NONE,
    ProfilerAction.WARMUP,
    ProfilerAction.RECORD,
    ProfilerAction.RECORD_AND_SAVE,
)


@pytest.mark.parametrize(
    ("first", "last", "start", "begun", "actions", "name"),
    [
        # The step before the first warms it up.
        (3, 4, 0, 2, [WARMUP, RECORD, SAVE, NONE, NONE], "steps-3-4-rank-3"),
        (1, 2, 0, 1, [RECORD, SAVE, NONE, NONE, NONE], "steps-1-2-rank-3"),
        # A resume within them profiles the rest, one just before them what it would have.
        (2, 4, 2, 3, [RECORD, SAVE, NONE, NONE, NONE], "steps-3-4-rank-3"),
        (4, 4, 2, 3, [WARMUP, SAVE, NONE, NONE, NONE], "steps-4-4-rank-3"),
    ],
)
def test_the_profiler_records_the_chosen_steps_alone(
    profiled, first, last, start, begun, actions, name
):
    step, planned, (stem,), calls = made(profiled(first, last, start=start))
    assert (step, planned, stem) == (begun, actions, name)
    steps = [(number, "step") for number in range(begun, last)]
    assert calls == [
        *((begun, "start"), *steps),
        *((last, call) for call in ("monitor", "step", "stop", "data")),
    ]


def test_a_run_that_ends_among_the_steps_writes_what_there_is(profiled):
    *_, calls = made(profiled(3, 9, end=4))
    assert calls == [(2, "start"), (2, "step"), (3, "step"), (4, "step"), ("end", "stop")]


@pytest.mark.parametrize("start", [4, 5])
def test_steps_that_are_over_are_not_profiled(profiled, start):
    assert profiled(3, 4, start=start) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_is_profiled_where_the_model_is_on_one(profiled, device):
    (_, options), *_ = profiled(3, 4, device=device)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    assert options["activities"] == kinds
    assert options["record_shapes"]
    assert options["acc_events"]


@pytest.mark.parametrize("gpu", [False, True])
def test_the_table_has_the_forty_most_expensive_operators(tmp_path, gpu):
    """Sorted by their self time on the device; a full disk stops no run."""
    asked = []

    def table(**options):
        asked.append(options)
        return "the table"

    def trace(path):
        asked.append(Path(path).name)
        raise OSError("full")

    profiler = SimpleNamespace(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])],
        key_averages=lambda: SimpleNamespace(table=table),
        export_chrome_trace=trace,
    )
    Profiling(1, 2, tmp_path, 0)._write("name", profiler)
    by = "self_device_time_total" if gpu else "self_cpu_time_total"
    assert asked == [{"sort_by": by, "row_limit": 40}, "name.json.gz"]
    assert (tmp_path / "name.txt").read_text() == "the table"
