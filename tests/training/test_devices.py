"""Which device a run takes, and what is set for it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import lightning as L
import lightning.fabric.accelerators
import lightning.pytorch.accelerators
import pytest
import torch

from trainer.runs.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training.devices import (
    device_type,
    numerics,
    open_gpus,
    set_environment,
)
from trainer.training.run import make_trainer

SHARDED = RunConfig(strategy=StrategyConfig(name="fsdp2"))


def with_trainer(**values):
    return replace(SHARDED, trainer=TrainerConfig(**values))


@pytest.fixture
def gpu(monkeypatch):
    """A machine where torch sees a GPU, and nobody has set anything for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    for name in [*os.environ]:
        if name.startswith(("PYTORCH_", "TORCH_", "CUBLAS_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_apple_silicon_computes_on_its_cpu(monkeypatch, accelerator):
    """Lightning would take the GPU, which has no float64."""
    for accelerators in (lightning.pytorch.accelerators, lightning.fabric.accelerators):
        there = staticmethod(lambda: True)
        monkeypatch.setattr(accelerators.MPSAccelerator, "is_available", there)
    theirs = L.Trainer(logger=False, enable_checkpointing=False).accelerator
    assert isinstance(theirs, lightning.pytorch.accelerators.MPSAccelerator)
    config = RunConfig(trainer=TrainerConfig(accelerator=accelerator))
    assert device_type(config) == "cpu"
    ours = make_trainer(config, Ranks(), [], []).accelerator
    assert isinstance(ours, lightning.pytorch.accelerators.CPUAccelerator)


@pytest.mark.parametrize(("accelerator", "expected"), [("auto", "cuda"), ("cpu", "cpu")])
def test_auto_is_the_gpu_where_torch_sees_one(gpu, accelerator, expected):
    assert device_type(with_trainer(accelerator=accelerator)) == expected


def test_a_gpu_run_sets_the_allocator_and_records_its_collectives(gpu, tmp_path, caplog):
    config = replace(SHARDED, run_dir=str(tmp_path))
    before = set(os.environ)
    set_environment(config)
    assert {name: os.environ[name] for name in set(os.environ) - before} == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder/rank_",
    }
    with caplog.at_level(logging.INFO):
        open_gpus(config, Ranks(0, 32, 0, 8))
    (said,) = caplog.messages
    for part in ("32 x NVIDIA A100", "TF32 on", "expandable_segments:True", "flight_recorder"):
        assert part in said
    assert (tmp_path / "flight_recorder").is_dir()


def test_what_the_user_has_set_stays(gpu, monkeypatch, tmp_path):
    mine = {
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",  # the older names count too
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/trace_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    set_environment(with_trainer(deterministic=True))
    assert dict(os.environ) == before


def test_a_run_on_the_cpu_sets_nothing():
    before = dict(os.environ)
    set_environment(with_trainer(accelerator="cpu", deterministic=True))
    assert dict(os.environ) == before


@pytest.mark.parametrize(("tf32", "expected"), [(True, "high"), (False, "highest")])
def test_tf32_holds_for_training_on_a_gpu_only(gpu, tf32, expected):
    with numerics(with_trainer(tf32=tf32)):
        # As Lightning asks for it when it sets a GPU up; torch refuses where two ways are mixed.
        assert torch.get_float32_matmul_precision() == expected
        assert torch.backends.cuda.matmul.allow_tf32 == tf32
    assert torch.get_float32_matmul_precision() == "highest"
    with numerics(with_trainer(tf32=tf32, accelerator="cpu")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_deterministic_algorithms_are_asked_for_while_training(gpu, run, monkeypatch):
    set_environment(with_trainer(deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, *_):
            seen.append(torch.are_deterministic_algorithms_enabled())

    monkeypatch.setattr("trainer.training.run.Watchdog", lambda *_: Look())
    run(trainer={"deterministic": True})
    assert seen == [True] * 12
    assert not torch.are_deterministic_algorithms_enabled()
