"""Device of a run, and torch's settings for it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import lightning as L
import lightning.fabric.accelerators
import lightning.pytorch.accelerators
import pytest
import torch

from trainer.config import DataConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.model.config import ModelConfig
from trainer.runs.ranks import Ranks
from trainer.training import devices
from trainer.training.devices import (
    cpu_seconds,
    dense_peak,
    device_problems,
    device_type,
    numerics,
    open_gpus,
    set_environment,
    set_threads,
)
from trainer.training.lightning_trainer import make_trainer
from trainer.training.module import StepCallback

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
    (message,) = caplog.messages
    for part in ("32 x NVIDIA A100", "TF32 on", "expandable_segments:True", "flight_recorder"):
        assert part in message
    assert (tmp_path / "flight_recorder").is_dir()


def test_variables_that_the_user_has_set_stay(gpu, monkeypatch, tmp_path):
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


@pytest.mark.parametrize(("variable", "expected"), [(None, 7), ("3", 3)])
def test_blocks_are_compiled_by_a_ranks_share_of_the_cores(monkeypatch, variable, expected):
    from torch._inductor import config as inductor
    from torch._inductor.async_compile import get_compile_threads

    threads = torch.get_num_threads()
    if variable is None:
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    else:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", variable)
    with inductor.patch(compile_threads=3):
        set_threads(with_trainer(threads=7, compile=True), Ranks())
        assert get_compile_threads() == expected
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("threads", "ranks", "expected"),
    [(None, Ranks(), 6), (2, Ranks(), 2), (None, Ranks(1, 2), 3), (2, Ranks(1, 2), 2)],
)
def test_a_run_has_the_usual_threads_and_ranks_their_share(monkeypatch, threads, ranks, expected):
    """torchrun's OMP_NUM_THREADS is not the user's choice."""
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setattr(devices, "share_of_cores", lambda: 3)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    from torch._inductor import config as inductor

    before = torch.get_num_threads()
    with inductor.patch(compile_threads=9):
        set_threads(with_trainer(threads=threads, compile=True), ranks)
        assert inductor.compile_threads == (threads or 3)
    assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


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

    class Look(StepCallback):
        def end_step(self, *_):
            seen.append(torch.are_deterministic_algorithms_enabled())

    monkeypatch.setattr("trainer.training.callbacks.guards.Watchdog", lambda *_: Look())
    run(trainer={"deterministic": True})
    assert seen == [True] * 12
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_for_gpus_is_not_begun_on_a_cpu_by_itself(monkeypatch):
    """SmolLM-360M on 31.5 billion tokens, at the peak of a core: 6 N D operations."""
    monkeypatch.setattr(devices, "usual_threads", lambda: 2)
    large = ModelConfig(
        hidden_size=960, intermediate_size=2560, num_hidden_layers=32,
        num_attention_heads=15, num_key_value_heads=5, head_dim=64, vocab_size=49152,
    )  # fmt: skip
    long = RunConfig(
        model=large,
        data=DataConfig(sequence_length=2048),
        trainer=TrainerConfig(max_steps=30_000, batch_size=512),
    )
    assert cpu_seconds(long) == pytest.approx(6 * 362e6 * 30_000 * 512 * 2048 / 2e11, rel=0.01)
    (problem,) = device_problems(long)
    assert str(problem).startswith("trainer.accelerator: torch sees no GPU")
    assert "about 10.8 years" in problem.message
    asked = replace(long, trainer=replace(long.trainer, accelerator="cpu"))
    assert device_problems(asked) == device_problems(RunConfig()) == []


def test_a_precision_or_accelerator_that_the_machine_lacks_is_refused(gpu, monkeypatch):
    """A GPU without bfloat16; no GPU where one is asked for."""
    half = RunConfig(trainer=TrainerConfig(precision="bf16"))
    asked = []

    def supported(emulated):
        asked.append(emulated)
        return False

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(devices, "backend_problem", lambda *_: None)
    (problem,) = device_problems(half)
    assert "'bf16' is not supported by this GPU (NVIDIA A100)" in problem.message
    assert asked == [False]
    assert device_problems(replace(half, trainer=TrainerConfig(precision="fp32"))) == []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda _: True)
    assert device_problems(half) == []
    monkeypatch.setattr(devices, "backend_problem", lambda *arguments: f"{arguments}")
    assert device_problems(half) == [str((half.model.attention_backend, "cuda"))]
    monkeypatch.setattr(devices, "backend_problem", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = device_problems(RunConfig(trainer=TrainerConfig(accelerator="gpu")))
    assert str(problem).startswith("trainer.accelerator: 'gpu', but torch sees no GPU")


@pytest.mark.parametrize(("seconds", "is_logged"), [(3600.0, False), (3 * 3600.0, True)])
def test_the_duration_of_a_long_run_on_a_cpu_is_logged(monkeypatch, caplog, seconds, is_logged):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(devices, "cpu_seconds", lambda _: seconds)
    open_gpus(with_trainer(accelerator="cpu"), Ranks())
    assert [r.getMessage() for r in caplog.records] == [
        "On this machine's CPU about 3.0 hours"
    ] * is_logged


@pytest.mark.parametrize(
    ("precision", "is_fast", "seconds", "warns"),
    [
        ("bf16", False, 61.0, True),
        ("bf16", True, 61.0, False),
        ("bf16", False, 60.0, False),
        ("fp32", False, 61.0, False),
    ],
)
def test_bf16_on_a_cpu_without_its_instructions_is_warned_of(
    monkeypatch, caplog, precision, is_fast, seconds, warns
):
    monkeypatch.setattr(devices, "cpu_seconds", lambda _: seconds)
    monkeypatch.setattr(devices, "multiplies_bf16_fast", lambda threads: is_fast)
    open_gpus(with_trainer(accelerator="cpu", precision=precision), Ranks())
    assert ("trainer.precision=fp32 is faster" in caplog.text) == warns


def test_more_threads_take_less_time():
    single, four = (RunConfig(trainer=TrainerConfig(threads=threads)) for threads in (1, 4))
    assert cpu_seconds(single) == pytest.approx(4 * cpu_seconds(four))


# Name, multiprocessors or compute units, boost clock (GHz), and a unit's operations a clock in
# bf16 and fp32 by its architecture's whitepaper: 2 for each multiply-add, without sparsity.
UNITS = [
    ("NVIDIA A100-SXM4-80GB", 108, 1.410, 2048, 128),
    ("NVIDIA A10", 72, 1.695, 1024, 256),
    ("NVIDIA RTX A6000", 84, 1.800, 1024, 256),
    ("NVIDIA GeForce RTX 4090", 128, 2.520, 512, 256),
    ("NVIDIA L4", 60, 2.040, 1024, 256),
    ("NVIDIA L40S", 142, 2.520, 1024, 256),
    ("NVIDIA H100 80GB HBM3", 132, 1.980, 4096, 256),
    ("NVIDIA H100 PCIe", 114, 1.755, 4096, 256),
    ("NVIDIA H100 NVL", 132, 1.785, 4096, 256),
    ("NVIDIA B200", 148, 1.965, 8192, 256),
    ("AMD Instinct MI300X", 304, 2.100, 2048, 256),
]


@pytest.mark.parametrize(("name", "units", "clock", "bf16", "fp32"), UNITS)
def test_peaks_are_units_times_rate_times_clock(name, units, clock, bf16, fp32):
    """Under tensor load some clocks are lower, by less than a fifth; sparsity would be twofold."""
    assert dense_peak(name, "fp32") == pytest.approx(units * clock * fp32 * 1e9, rel=0.04)
    assert 0.8 < dense_peak(name, "bf16") / (units * clock * bf16 * 1e9) < 1.01


UNKNOWN = [
    *("cpu", "", "NVIDIA A10G", "NVIDIA A16", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    *("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA H100", "NVIDIA L40", "NVIDIA T400 4GB"),
    *("NVIDIA RTX 6000 Ada Generation", "NVIDIA GeForce RTX 4090 D"),
    *("NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300A", "AMD Instinct MI325X"),
]
"""Slices and siblings of devices with known peaks."""


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 19.5),
        ("A100-SXM4-40GB", 312, 19.5),  # drivers before 2021 leave the vendor out
        ("NVIDIA A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H200 NVL", 835.5, 60),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA GB200", 2500, 80),
        ("AMD Instinct MI300X VF", 1307.4, 163.4),
        ("Tesla V100-SXM2-32GB", None, 15.7),  # no bf16 units
        ("Tesla V100-PCIE-16GB", None, 14.0),
        ("Tesla V100S-PCIE-32GB", None, 16.4),
        ("Tesla T4", None, 8.1),
        *((name, None, None) for name in UNKNOWN),
    ],
)
def test_a_device_is_known_by_its_whole_name(name, bf16, fp32):
    for precision, tera in (("bf16", bf16), ("fp32", fp32)):
        expected = None if tera is None else pytest.approx(tera * 1e12)
        assert dense_peak(name, precision) == expected


@pytest.mark.parametrize(
    ("name", "tf32"),
    [
        ("NVIDIA A100-SXM4-80GB", 156),
        ("NVIDIA A10", 62.5),
        ("NVIDIA L40S", 183),
        ("NVIDIA H100 80GB HBM3", 494.7),
        ("NVIDIA H100 PCIe", 378),
        ("AMD Instinct MI300X", 653.7),
        ("Tesla T4", 8.1),  # no TF32: float32 as it is
        ("NVIDIA A16", None),
    ],
)
def test_tf32_peaks_are_those_of_data_sheets(name, tf32):
    assert dense_peak(name, "tf32") == (tf32 and pytest.approx(tf32 * 1e12, rel=0.02))
