"""What an experiment costs before it starts, and the settings that waste time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trainer.commands.hydra.composing import compose_words
from trainer.commands.train import read_run
from trainer.evaluation import engine
from trainer.evaluation.config import EvaluationConfig, task_names
from trainer.runs.arms import arms_of
from trainer.runs.config import RunConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.ranks import Ranks
from trainer.workflows import costs, experiment
from trainer.workflows.costs import (
    Device,
    evaluation_operations,
    remarks_on_costs,
    say_costs,
    training_operations,
)
from trainer.workflows.experiment import run_experiment

EVALUATION = {
    "tasks": ["perplexity", "statements", "standard", "multi_key"],
    "lengths": [4, 6], "windows": 3, "fit_windows": 2,
    "methods": ["none", "yarn", "temperature"],
    "needles": {"trials": 2, "depths": [0.0, 0.5, 1.0], "needles": 2},
}  # fmt: skip


def arms_of_words(*words):
    """Arms of a run without its weights, with a vocabulary."""
    config = read_run(compose_words(list(words)), [], weights=False)
    size = config.model.vocab_size or config.tokenizer.vocab_size
    return arms_of(replace(config, model=replace(config.model, vocab_size=size)), weights=False)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_an_evaluation_takes_the_operations_that_it_counts_for_its_own_estimate(
    base, tmp_path, monkeypatch, share
):
    """That is a forward pass over every sequence of distinct cells and of fits."""
    counted = []
    monkeypatch.setattr(
        engine, "say_duration", lambda model, lengths, total, *_: counted.append((model, total))
    )
    monkeypatch.setattr(experiment, "write_renderings", lambda *_: [])
    rope = {
        "rope": {"label": "RoPE", "drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    }
    changes = {"data": {"sequence_length": 64, "needles": {"share": share}}, "controls": rope}
    changes |= {"evaluation": EVALUATION, "run_dir": str(tmp_path)}
    config = parse(RunConfig, merged(base, changes))
    run_experiment(config)
    ((model, total),) = counted
    shape = replace(config.model, vocab_size=model.config.vocab_size)
    assert evaluation_operations(arms_of(replace(config, model=shape))) == pytest.approx(total)


def test_an_evaluation_that_is_off_takes_nothing():
    arms = arms_of_words("+experiment=drope_demo", "evaluation.enabled=false")
    assert evaluation_operations(arms) == 0


@pytest.mark.parametrize("task", task_names())
def test_every_task_is_counted(task):
    assert EvaluationConfig(tasks=[task]).sequences > 0


H100 = Device(True, True, 0.4 * 495e12)
LLAMA = (
    "model=llama3_8b",
    "data=fineweb_edu",
    "tokenizer.vocab_size=128256",
    "evaluation.enabled=false",
)


def remarks(*words, device=H100):
    arms = arms_of_words(*words)
    operations = training_operations(arms)
    return remarks_on_costs(arms, operations, evaluation_operations(arms), device)


def test_defaults_of_a_large_model_on_gpus_are_remarked():
    said = remarks(*LLAMA)
    assert [*said] == ["trainer.precision", "trainer.compile"]  # a step of 15 s on one GPU
    assert "trainer.precision=bf16" in said["trainer.precision"]
    assert "8,030,261,248 parameters" in said["trainer.compile"]
    assert "trainer.compile=true" in said["trainer.compile"]
    assert remarks(*LLAMA, "trainer.precision=bf16", "trainer.compile=true") == {}
    assert remarks(*LLAMA, device=replace(H100, is_gpu=False, has_bf16=False)) == {}
    assert [*remarks(*LLAMA, device=replace(H100, has_bf16=False))] == ["trainer.compile"]
    assert remarks(*LLAMA, "trainer.max_steps=10") == {}  # two and a half minutes


@pytest.mark.parametrize("is_gpu", [True, False])
def test_checkpoints_that_take_much_of_the_time_are_remarked(is_gpu):
    """96 GB take 96 s at 1 GB/s; eight GPUs make 100 steps in 193 s."""
    device = Device(is_gpu, is_gpu, 8 * H100.speed)
    words = (*LLAMA, "trainer.precision=bf16", "trainer.compile=true", "trainer.max_steps=2000")
    said = remarks(*words, device=device)
    assert said == {
        "trainer.checkpoint_every": "RoPE writes 96.4 GB about every 3 min; at 1 GB/s that takes "
        "50% of the time, and 10% with trainer.checkpoint_every=500"
    }
    assert remarks(*words, "trainer.checkpoint_every=500", device=device) == {}
    often = remarks(
        *words, "trainer.checkpoint_every=500", "trainer.checkpoint_minutes=1", device=device
    )
    assert often["trainer.checkpoint_every"].endswith("10% with trainer.checkpoint_minutes=17")
    both = remarks(*words, "trainer.checkpoint_minutes=1", device=device)
    assert both["trainer.checkpoint_every"].endswith(
        "10% with trainer.checkpoint_every=500 trainer.checkpoint_minutes=17"
    )


def test_an_evaluation_that_is_long_beside_the_training_is_remarked():
    long = ("+experiment=rope_id_128k", "evaluation.lengths=[1,2,4,8]")
    said = remarks(*long, "evaluation.needles.trials=256")
    assert [*said] == ["evaluation"]
    for part in (
        "5.4 times",
        "evaluation.lengths",
        "evaluation.needles.trials",
        "evaluation.quick",
    ):
        assert part in said["evaluation"]
    assert remarks("+experiment=rope_id_128k") == {}
    fast = replace(H100, speed=math.inf)
    assert remarks(*long, "evaluation.needles.trials=256", device=fast) == {}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("trainer.precision", {"trainer": {"precision": "fp32"}}),
        ("trainer.compile", {"trainer": {"compile": False}}),
    ],
)
def test_a_setting_of_a_control_is_remarked_once(key, changes):
    words = (*LLAMA, "trainer.precision=bf16", "trainer.compile=true", "+controls.b.label=B")
    arms = arms_of_words(*words, "+controls.c.label=C")
    assert remarks_on_costs(arms, training_operations(arms), 0.0, H100) == {}
    for name in ("b", "c"):
        arms[name] = replace(arms[name], trainer=replace(arms[name].trainer, **changes["trainer"]))
    said = remarks_on_costs(arms, training_operations(arms), 0.0, H100)
    assert [*said] == [key]
    assert said[key].startswith("B ")


@pytest.mark.parametrize(("name", "ranks"), [("NVIDIA H100 80GB HBM3", 2), ("another", 1)])
def test_remarks_before_a_run_are_of_its_gpus(monkeypatch, caplog, name, ranks):
    devices = []
    monkeypatch.setattr(costs, "device_type", lambda config: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: True)
    monkeypatch.setattr(costs, "training_operations", lambda arms: {"main": 1.0})
    monkeypatch.setattr(costs, "evaluation_operations", lambda arms: 0.0)
    monkeypatch.setattr(
        costs,
        "remarks_on_costs",
        lambda *arguments: devices.append(arguments[-1]) or {"a.key": "a remark"},
    )
    say_costs(arms_of_words(*LLAMA), 1024, Ranks(0, ranks, 0, ranks))
    assert caplog.messages == ["a.key: a remark"]
    (device,) = devices
    assert (device.is_gpu, device.has_bf16) == (True, True)
    assert device.speed == pytest.approx(0.4 * ranks * (494.7e12 if ranks == 2 else 1e14))


def test_the_demo_gets_no_remark_on_a_cpu_of_two_threads(caplog):
    config = arms_of_words("+experiment=drope_demo", "trainer.threads=2", "trainer.accelerator=cpu")
    say_costs(config, 1024, Ranks())
    assert caplog.messages == []
