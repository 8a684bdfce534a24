"""Contents of a row of metrics, and the steps that write one."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
import torch

from trainer.config import RunConfig, TrainerConfig
from trainer.model.flops import training_flops
from trainer.positional.config import PositionalConfig
from trainer.runs.metrics_file import read_metrics, write_metrics
from trainer.training.callbacks import metrics
from trainer.training.callbacks.metrics import Metrics, flops_per_token


def test_operations_are_those_of_the_documents_in_the_batch(tiny_decoder):
    model = tiny_decoder(encodings=PositionalConfig().encodings)
    whole = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    once = training_flops(model.config, model.layout, 8) / 8
    assert flops_per_token(model, whole) == once
    apart = whole | {"documents": torch.tensor([[0] * 8, [0] * 3 + [1] * 5])}
    cut = training_flops(model.config, model.layout, 8, [3, 5]) / 8
    assert flops_per_token(model, apart) == pytest.approx((once + cut) / 2)
    assert cut < once


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that holds 3 GiB, at a fixed time."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(metrics, "flops_per_token", lambda model, batch: 6e6)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 16.0)


A100 = "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("device", "name", "precision", "other", "peak"),
    [
        ("cuda", A100, "bf16", 312e12, 624e12),
        ("cuda", A100, "fp32", 156e12, 312e12),
        ("cuda", A100, "fp32 without tf32", 19.5e12, 39e12),
        ("cuda", A100, "bf16", 125e12, 437e12),  # another GPU
        ("cuda", A100, "bf16", None, None),
        ("cuda", "another", "bf16", 312e12, None),
        ("cpu", "", "fp32", None, None),
    ],
)
def test_speed_is_tokens_and_operations_a_second(
    gpu, monkeypatch, device, name, precision, other, peak
):
    """Four steps in ten seconds, two of them of measuring, on two GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(metrics, "all_gather", lambda value: [value, other])
    run = TrainerConfig(precision=precision[:4], tf32=not precision.endswith("tf32"))
    config = RunConfig(trainer=run)
    callback = Metrics(config, Recorder(), None)
    timer = SimpleNamespace(read=lambda: {"compute": 8.0, "monitor": 2.0}, enter=lambda part: None)
    module = SimpleNamespace(timer=timer, device=torch.device(device), model=None)
    callback.on_train_start(SimpleNamespace(global_step=10), module)
    callback.last_time = 6.0
    speed = callback._speed(module, 14, None)
    rate = 4 * config.tokens_per_step / 8
    expected = {"tokens_per_second": round(rate, 1), "time/compute": 2.0, "time/monitor": 0.5}
    if device == "cuda":
        expected["memory"] = 3.0
    if peak:
        expected["mfu"] = pytest.approx(rate * 6e6 / peak)
    assert speed == expected
    assert (callback.last_time, callback.last_step) == (16.0, 14)


class Recorder:
    """Logger, progress bar and timer that remember their calls."""

    title = "Training"

    def __init__(self):
        self.rows, self.shown, self.entered = [], [], []

    def log_metrics(self, row, step):
        self.rows.append((step, row))

    def advance_to(self, step, loss=None):
        self.shown.append((step, loss))

    def enter(self, part):
        self.entered.append(part)

    def read(self):
        return {"monitor": 0.0}


def test_a_full_disk_keeps_what_was_measured_on_resuming_for_the_next_row(
    tmp_path, monkeypatch, caplog
):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows, resumed = [{"step": 2, "loss": 1.5}], SimpleNamespace(global_step=2, loggers=[None])
    write_metrics(tmp_path / "metrics.csv", rows)
    callback = Metrics(RunConfig(run_dir=str(tmp_path)), Recorder(), lambda step: {})
    callback.add({"measured": 3.0})
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "write_metrics", fail)
        callback._amend_row(resumed)
    assert (callback.pending, read_metrics(tmp_path / "metrics.csv")) == ({"measured": 3.0}, rows)
    assert caplog.messages == ["metrics.csv: No space left on device; the run goes on"]
    callback._amend_row(resumed)
    assert (callback.pending, read_metrics(tmp_path / "metrics.csv")) == (
        {},
        [{"step": 2, "loss": 1.5, "measured": 3.0}],
    )
