"""Callbacks of a run: stops at step boundaries, skipped updates, the user's own, profiles, rows."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.comparing import assert_same_state, checkpoint_of, during, rows_of
from trainer.checkpoint import BEFORE_DROP, FORMAT, STATE, Writer, read_state, step_name
from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.processes import RECEIVED
from trainer.config import RunConfig, StrategyConfig
from trainer.lightning.module import LanguageModule
from trainer.model.flops import training_flops
from trainer.runs.directory import read_metrics
from trainer.training import rows as of_rows
from trainer.training.fit import user_callbacks
from trainer.training.rows import flops_per_token
from trainer.training.run import check_divergence


@pytest.mark.parametrize(
    ("number", "update"),
    [(signal.SIGTERM, 4), (signal.SIGUSR1, 5), (signal.SIGINT, 8)],
    ids=["before the drop", "at the drop", "after it"],
)
def test_a_signal_saves_at_the_next_boundary_and_the_same_command_goes_on(
    run, finished, monkeypatch, number, update
):
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        during(patch, lambda: os.kill(os.getpid(), number), update)
        with pytest.raises(PreemptedError, match=f"after step {update + 1}"):
            run()
    assert signal.getsignal(number) == before
    config, trained = run()
    assert_same_state(trained, checkpoint_of(finished[0]))
    assert rows_of(config) == rows_of(finished[0])


def test_a_second_interrupt_ends_the_run_as_python_would(run, monkeypatch):
    """Lightning exits with code 1 and no message."""

    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    during(monkeypatch, twice, 4)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert signal.getsignal(signal.SIGINT) == before
    assert not RECEIVED  # nothing stops the next run of this process


def test_a_signal_during_the_last_step_changes_nothing(run, monkeypatch):
    during(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM), 11)
    config, _ = run()
    assert checkpoint_of(config).is_dir()


def test_a_time_limit_stops_the_run(run):
    for step in (1, 2):
        with pytest.raises(PreemptedError, match=rf"after step {step} \(time limit\)"):
            run(trainer={"max_time": "00:00:00"})


@pytest.mark.slow
def test_a_diverged_run_stops_and_names_its_last_healthy_checkpoint(run, monkeypatch):
    original = LanguageModule.training_step

    def broken(module, batch, index):
        loss = original(module, batch, index)
        return loss * float("nan") if module.global_step >= 7 else loss

    def slow_disk(path):
        time.sleep(0.1)

    monkeypatch.setattr(LanguageModule, "training_step", broken)
    monkeypatch.setattr("trainer.checkpoint.synchronise", slow_disk)
    monkeypatch.setattr("trainer.training.run.MOST_SKIPPED", 4)
    message = r"not finite in steps 8 to 11; the last healthy checkpoint is \S+/step-000007"
    changes = {"log_every": 100, "checkpoint_every": 1, "keep_checkpoints": 1}
    with pytest.raises(DivergedError, match=message):
        run(trainer=changes)


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_its_error(run, monkeypatch):
    def full(path, data):
        raise OSError("No space left")

    monkeypatch.setattr("trainer.checkpoint.write_atomically", full)
    with pytest.raises(UserError, match=r"step-000002.*No space left"):
        run(trainer={"max_steps": 2}, drop={"at": None}, model={"qk_norm": {"when": "never"}})


def test_the_last_healthy_checkpoint_is_found_by_number(tmp_path):
    steps = {step_name(step): step for step in (999_998, 999_999, 1_000_000)}
    for name, step in (steps | {BEFORE_DROP: 60}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE).write_text(json.dumps({"format": FORMAT, "step": step}))
    healthy = {1_000_031: 999_999, 1_000_030: 999_998, 1_000_032: 1_000_000}
    names = {step: step_name(before) for step, before in healthy.items()}
    for step, name in {**names, 92: BEFORE_DROP, 91: "no healthy checkpoint"}.items():
        with pytest.raises(DivergedError, match=rf"{name}$"):
            check_divergence(32, step, tmp_path)
    check_divergence(31, 1_000_031, tmp_path)


def test_speed_is_that_of_steps_alone_also_in_the_first_row_of_a_phase(run, monkeypatch):
    """With a second a step, and a minute for each checkpoint, one of them between phases."""
    seconds = [0.0]

    def taking(duration, function):
        def slow(*args):
            seconds[0] += duration
            return function(*args)

        return slow

    clock = SimpleNamespace(perf_counter=lambda: seconds[0], monotonic=lambda: seconds[0])
    monkeypatch.setattr(of_rows, "time", clock)
    monkeypatch.setattr(LanguageModule, "training_step", taking(1, LanguageModule.training_step))
    monkeypatch.setattr(Writer, "save", taking(60, Writer.save))
    config, _ = run(trainer={"checkpoint_every": 4})
    rows = read_metrics(Path(config.run_dir) / "metrics.csv")
    assert [row["tokens_per_second"] for row in rows] == [128.0] * 6


class Shrink(L.Callback):
    """Multiplies the embeddings after every step, counts, and adds up losses."""

    def __init__(self, factor):
        self.factor, self.steps, self.sum = factor, 0, 0.0

    def state_dict(self):
        return {"steps": self.steps, "sum": self.sum}

    def load_state_dict(self, state):
        self.steps, self.sum = state["steps"], state["sum"]

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.steps += 1
        self.sum += float(outputs["loss"])
        with torch.no_grad():
            module.model.embed_tokens.weight.mul_(self.factor)
        module.log("mine/steps", float(self.steps))


MINE = {"callbacks": {"mine": {"_target_": f"{__name__}.Shrink", "factor": 0.9}}}


@pytest.mark.slow
def test_a_callback_of_ones_own_acts_before_rows_and_checkpoints_and_resumes(
    run, finished, monkeypatch
):
    whole, _ = run("whole", **MINE)
    assert [row["mine/steps"] for row in rows_of(whole)] == [2, 4, 6, 8, 10, 12]
    norms = [[row["parameter_norm"] for row in rows_of(c)] for c in (finished[0], whole)]
    assert all(changed < before for before, changed in zip(*norms, strict=True))
    with monkeypatch.context() as patch:
        during(patch, lambda: os.kill(os.getpid(), signal.SIGTERM), 6)
        with pytest.raises(PreemptedError):
            run("stopped", **MINE)
    stopped, _ = run("stopped", **MINE)
    assert_same_state(checkpoint_of(stopped), checkpoint_of(whole))
    states = [read_state(checkpoint_of(c))["lightning"]["callbacks"] for c in (whole, stopped)]
    assert states[0] == states[1]
    assert states[0]["Shrink"]["steps"] == 12


LIGHTNING = "lightning.pytorch.callbacks"


@pytest.mark.parametrize(
    "callback",
    [
        {"factor": 0.9},
        {"_target_": "Shrink"},
        {"_target_": "nowhere.Shrink"},
        {"_target_": f"{__name__}.Nothing"},
        {"_target_": f"{__name__}.Shrink"},
        {"_target_": f"{__name__}.Shrink", "factor": 0.9, "other": 1},
        {"_target_": f"{LIGHTNING}.EarlyStopping", "monitor": "loss", "mode": "odd"},
        {"_target_": "trainer.lightning.DropPositions", "at": 3},
        {"_target_": f"{LIGHTNING}.GradientAccumulationScheduler", "scheduling": {"0": 2}},
        {"_target_": f"{LIGHTNING}.EMAWeightAveraging"},
    ],
)
def test_a_callback_that_a_run_cannot_have_is_refused_by_its_name(callback):
    """Averages of weights are for whole ones alone."""
    sharded = {"strategy": StrategyConfig("fsdp2")}
    with pytest.raises(UserError, match=r"^callbacks\.mine: "):
        user_callbacks(RunConfig(callbacks={"mine": callback}, **sharded))


def test_callbacks_are_made_of_their_arguments_and_averages_of_whole_weights():
    average = {"_target_": f"{LIGHTNING}.EMAWeightAveraging", "decay": 0.25}
    callbacks = user_callbacks(RunConfig(callbacks={**MINE["callbacks"], "average": average}))
    assert [type(each) for each in callbacks] == [Shrink, EMAWeightAveraging]
    assert callbacks[0].factor == 0.9


@pytest.mark.slow
def test_operations_are_those_of_the_documents_in_the_batch(tiny_decoder):
    model = tiny_decoder()
    ids = torch.zeros(2, 8, dtype=torch.long)
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2], [1] * 8])
    batch = {"input_ids": ids, "documents": documents}
    config, layout = model.config, model.layout
    total = training_flops(config, layout, 8, [3, 5]) + training_flops(config, layout, 8, [8])
    assert flops_per_token(model, batch) == pytest.approx(total / 16)
    plain = training_flops(config, layout, 8) / 8
    assert flops_per_token(model, {"input_ids": ids}) == pytest.approx(plain)


def test_a_callback_that_cannot_work_without_a_logger_is_said_in_a_line(run):
    monitor = {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor"}
    with pytest.raises(UserError, match=r"^callbacks: .*LearningRateMonitor.* no logger"):
        run(callbacks={"rates": monitor})
