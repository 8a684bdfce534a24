"""The first hour's commands are ones that the program takes, on any number of ranks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import first_hour
from trainer.commands.evaluate import COMMAND
from trainer.commands.hydra import composing as configuration
from trainer.commands.train import read_config
from trainer.model.masks import Mask
from trainer.model.softmax import PLAIN, eager
from trainer.runs.arms import spread_problems
from trainer.runs.phases import phases_of

KERNELS = "attention", "flex", "flex_fp32", "kernels"
BY_COMMANDS = [c for c in first_hour.CHECKS if c.name not in KERNELS]
ROWS = [{"loss": 1.0, "tokens_per_second": 1.0, "phase": phase} for phase in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("check", "ranks", "nodes", "quick"),
    [
        pytest.param(check, *place, id=f"{check.name} on {place[0]}")
        for check in BY_COMMANDS
        for place in ((1, 1, False), (2, 1, True), (8, 1, False), (32, 4, False))
        if place[0] > 1 or "ranks" not in check.needs
    ],
)
def test_every_command_of_a_check_is_taken(tmp_path, monkeypatch, check, ranks, nodes, quick):
    commands = []

    def run(self, name, *words, ranks=1, env=None):
        commands.append((words, ranks))
        marks = [word.rpartition("mark: ")[2].rstrip("}") for word in words if "mark: " in word]
        for mark in marks:
            Path(mark).touch()
            (self.out / name / "checkpoints" / "step-000010").mkdir(parents=True, exist_ok=True)
        return len(marks)

    monkeypatch.setattr(first_hour.Place, "run", run)
    monkeypatch.setattr(first_hour, "read_metrics", lambda _: ROWS)
    monkeypatch.setattr(first_hour, "first_difference", lambda *_, **__: "")
    monkeypatch.setattr(first_hour, "_losses", lambda _: [1.0])
    check.measure(first_hour.Place(tmp_path, ranks, nodes, quick))
    assert commands
    for words, processes in dict.fromkeys(commands):
        if words[0] == "evaluate":
            composed = configuration.compose_words(list(words[1:]), COMMAND.root)
            assert COMMAND.read(composed).request.evaluation.tasks == ["perplexity"]
            continue
        config = read_config([word for word in words if word != "prepare"])
        for phase in phases_of(config) if words[0] != "prepare" else ():
            assert not spread_problems(phase.config, processes, max(processes // nodes, 1))


WITHOUT_INSTALLATION = """
import runpy, sys
from pathlib import Path
sys.path = [path for path in sys.path if path and not Path(path, "pyproject.toml").is_file()]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
runpy.run_path(sys.argv[1])
import trainer
print(trainer.__file__)
"""


def test_it_runs_from_a_checkout_alone(tmp_path, monkeypatch):
    """Nothing is installed on a machine that one has for an hour, and no PYTHONPATH set."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script, root = Path(first_hour.__file__), Path(first_hour.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_INSTALLATION, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(root / "trainer" / "__init__.py"), done.stderr

    environments = []

    def run(words, *, env, **_):
        environments.append(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(first_hour.subprocess, "run", run)
    first_hour.Place(tmp_path, 1, 1, True).run("name", "--help")
    paths = environments[0]["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [str(root / "scripts"), str(root)]


def test_attention_is_compared_at_lengths_where_kernels_went_wrong(tmp_path, monkeypatch):
    cases = []

    def difference(name, mask, softmax, kv, dtype, shape):
        cases.append((name, shape[0], mask.is_plain))
        return 0.2 if (name, shape[0], mask.window) == ("sdpa", 576, 64) else 1e-6

    monkeypatch.setattr(first_hour, "_difference", difference)
    place = first_hour.Place(tmp_path, 1, 1, True)
    found, good = first_hour.attention(place)
    assert not good
    assert "sdpa bf16 window 576 2 heads of keys 2.0e-01" in found
    assert {length for _, length, _ in cases} == {320, 384, 576}

    cases.clear()
    monkeypatch.setattr(first_hour, "_missing_backend", lambda *_: None)
    first_hour.attention(place)
    assert {case for case in cases if case[0] == "cudnn"} == {("cudnn", 384, True)}
    cases.clear()
    first_hour.flex(place)
    assert len(cases) == 12 + 10  # each is compiled: more do not fit into ten minutes
    cases.clear()
    first_hour.flex_fp32(place)
    assert len(cases) == 12


def test_a_case_of_attention_is_measured_against_the_definition(monkeypatch):
    for name, dtype in (("sdpa", torch.float32), ("cudnn", torch.bfloat16)):
        for _, mask, softmax in first_hour._cases(name, 384, "cpu"):
            error = first_hour._difference(name, mask, softmax, 2, dtype, (384, "cpu"))
            assert 0 < error <= first_hour.ERRORS[dtype]

    def with_nan(q, k, v, mask, softmax):
        return eager(q, k, v, mask, softmax) + (v * 0).sqrt().sum()

    monkeypatch.setitem(first_hour.BACKENDS, "sdpa", with_nan)
    shape = 384, "cpu"
    error = first_hour._difference("sdpa", Mask(), PLAIN, 2, torch.float32, shape)
    assert math.isnan(error)  # of a gradient that is not the first


@pytest.mark.parametrize(
    ("gpu", "mfu", "good"),
    [
        ("NVIDIA H100 80GB HBM3", 0.30, False),  # enough for the small shape alone
        ("NVIDIA H100 80GB HBM3", 0.31, True),
        ("NVIDIA A100-SXM4-80GB", 0.41, False),
        ("NVIDIA A100-SXM4-80GB", 0.42, True),
        ("NVIDIA RTX 6000 Ada Generation", 0.01, True),  # nothing was counted for it
    ],
)
def test_the_speed_expected_is_that_of_the_shape_and_the_gpu(tmp_path, monkeypatch, gpu, mfu, good):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    rows = [row | {"mfu": mfu} for row in ROWS]
    monkeypatch.setattr(first_hour.Place, "train", lambda *_, **__: rows)
    assert first_hour.speed(first_hour.Place(tmp_path, 1, 1, False))[1] == good
