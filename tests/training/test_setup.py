"""Threads, precision, compilation and the environment of a run, by its keys and its machine."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from trainer.common.processes import Ranks
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.runs.parsing import merged, parse
from trainer.training import setup
from trainer.training.setup import (
    compiles,
    distribute,
    make_decoder,
    make_module,
    optimizer_settings,
    precision_of,
    quiet_lightning,
    set_environment,
    set_threads,
)
from trainer.training.strategies import make_strategy

SRUN = {"SLURM_CPUS_PER_TASK": "16", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("ranks", "threads", "environment", "used", "compiling"),
    [
        (Ranks(), None, {}, None, 32),
        (Ranks(), 3, {}, 3, 3),
        (Ranks(), 40, {}, 40, 32),
        (Ranks(1, 6, 1, 4), None, {}, 10, 10),
        (Ranks(1, 6, 1, 4), 3, {}, 3, 3),
        (Ranks(1, 6, 1, 4), None, SRUN, 40, 32),
        (Ranks(1, 90, 1, 90), None, {}, 1, 1),
    ],
)
def test_ranks_share_the_cores_of_a_machine(
    monkeypatch, ranks, threads, environment, used, compiling
):
    """Of 40 cores; those of srun have cores of their own."""
    asked, inductor = [], SimpleNamespace(compile_threads=None)
    for name in SRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(setup, "current_ranks", lambda: ranks)
    monkeypatch.setattr(setup, "cores", lambda: 40)
    monkeypatch.setattr(setup, "use_cores", asked.append)
    monkeypatch.setitem(sys.modules, "torch._inductor", SimpleNamespace(config=inductor))
    set_threads(TrainerConfig(threads=threads, compile=False))
    assert (asked, inductor.compile_threads) == ([used], None)
    set_threads(TrainerConfig(threads=threads, compile=True))
    assert inductor.compile_threads == compiling


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("best", ["fp32", "bf16"])
def test_auto_follows_the_device(monkeypatch, device, best):
    monkeypatch.setattr(setup, "device_type", lambda accelerator: device)
    monkeypatch.setattr(setup, "best_precision", lambda of_device: best)
    chosen = {p: precision_of(TrainerConfig(precision=p)) for p in ("auto", "fp32", "bf16")}
    assert chosen == {"auto": best, "fp32": "fp32", "bf16": "bf16"}
    compiled = {c: compiles(TrainerConfig(compile=c)) for c in ("auto", True, False)}
    assert compiled == {"auto": device == "cuda", True: True, False: False}


ALLOCATOR, CUBLAS = "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("cpu", {}, {}),
        ("cuda", {}, {ALLOCATOR: "expandable_segments:True", CUBLAS: ":4096:8"}),
        ("cuda", {ALLOCATOR: "a", CUBLAS: "b"}, {ALLOCATOR: "a", CUBLAS: "b"}),
        (
            "cuda",
            {"PYTORCH_CUDA_ALLOC_CONF": "a"},
            {"PYTORCH_CUDA_ALLOC_CONF": "a", CUBLAS: ":4096:8"},
        ),
    ],
)
def test_what_the_user_has_set_in_the_environment_stays(monkeypatch, device, before, after):
    environment = dict(before)
    monkeypatch.setattr(setup, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(setup, "device_type", lambda accelerator: device)
    set_environment("auto")
    assert environment == after


def test_a_module_and_its_model_have_the_settings_of_their_run(base):
    changes = {
        "run_dir": "x",
        "model": {"attention_backend": "sdpa"},
        "trainer": {"gradient_clip": 0.25},
        "optimizer": {
            **{"name": "muon", "lr": 0.5, "betas": (0.5, 0.6), "muon_lr": 0.125},
            **{"weight_decay": 0.3, "decay_embeddings": True},
        },
    }
    run = parse(merged(base, changes))
    module = make_module(run, make_decoder(run, 300))
    assert (module.attention, module.gradient_clip) == ("sdpa", 0.25)
    assert module.optimizer_options == changes["optimizer"]
    assert module.schedule(1) == run.phases.at(1).factor(1)
    assert module.model.config.vocab_size == 300
    larger = parse(merged(base, {"run_dir": "x", "model": {"vocab_size": 320}}))
    assert make_decoder(larger, 300).config.vocab_size == 320


@pytest.mark.parametrize(("shard_size", "expected"), [(None, 4), (2, 2)])
def test_groups_that_share_a_copy_are_nodes_unless_they_are_configured(
    monkeypatch, base, shard_size, expected
):
    asked = []
    monkeypatch.setattr(setup, "parallelize", lambda *given, **options: asked.append(options))
    monkeypatch.setattr(setup, "current_ranks", lambda: Ranks(0, 8, 0, 4))
    strategy = {"name": "hsdp", "shard_size": shard_size, "activation_checkpointing": "full"}
    trainer = {"precision": "bf16", "compile": True}
    run = parse(merged(base, {"run_dir": "x", "strategy": strategy, "trainer": trainer}))
    distribute(run, make_decoder(run, 300))
    options = {"half": True, "compile": True, "activation_checkpointing": "full"}
    assert asked == [options | {"shard_size": expected}]


@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_are_summed_in_the_same_order_in_every_step_if_they_must(deterministic):
    """A first step that looks for unused parameters has the buckets of the rest."""
    strategy = make_strategy("ddp", torch.device("cpu"), deterministic)
    assert strategy._ddp_kwargs["find_unused_parameters"] is deterministic


def test_the_log_of_lightning_is_quiet_within_a_run_alone():
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with quiet_lightning():
            assert logger.level == logging.WARNING
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def test_arguments_of_an_optimizer_take_the_place_of_its_keys():
    settings = optimizer_settings(OptimizerConfig(lr=0.5, arguments={"betas": (0.5, 0.6)}))
    assert (settings["lr"], settings["betas"]) == (0.5, (0.5, 0.6))
    assert "muon_lr" not in settings
