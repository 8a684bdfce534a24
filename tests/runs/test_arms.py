"""Checks see the run, its controls, and the phases of each."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.program import ROOT
from trainer.common.errors import Problem
from trainer.runs.arms import MAIN, arm_problems, arms_of, phase_configs
from trainer.runs.config import RunConfig
from trainer.runs.parsing import parse

PHASES = {"short": {"steps": 4}, "long": {"steps": 2, "batch_size": 6, "sequence_length": 128}}
CONTROLS = {
    "small": {"trainer": {"batch_size": 2}, "phases": None},
    "late": {"phases": {"long": {"batch_size": 3}}},
}
VALUES = {
    "run_dir": "runs/run",
    "trainer": {"batch_size": 4},
    "phases": PHASES,
    "controls": CONTROLS,
}
ALL = [
    (MAIN, 4, 64), (MAIN, 6, 128), ("small", 2, 64), ("late", 4, 64), ("late", 3, 128),
]  # fmt: skip
"""Arm, sequences of a batch and their length in every phase."""


@pytest.fixture
def arms():
    return arms_of(parse(RunConfig, VALUES))


def test_there_is_a_configuration_for_every_phase_of_every_arm(arms):
    assert [*arms] == [MAIN, *CONTROLS]
    assert arms["small"].run_dir == "runs/run/controls/small"
    found = [(n, c.trainer.batch_size, c.data.sequence_length) for n, c in phase_configs(arms)]
    assert found == ALL


@pytest.mark.parametrize("place", range(len(ALL)))
def test_a_fault_in_any_phase_of_any_arm_is_found(arms, place):
    name, batch, length = ALL[place]

    def fault(config):
        wrong = (config.trainer.batch_size, config.data.sequence_length) == (batch, length)
        return [Problem("trainer.batch_size", str(batch))] if wrong else []

    said = "" if name == MAIN or (batch, length) == (4, 64) else f"controls.{name}."
    found = arm_problems(arms, of_phase=[fault])
    assert found == [Problem(f"{said}trainer.batch_size", str(batch))]


def test_what_is_wrong_with_all_is_said_once_and_of_a_control_alone_under_its_name(arms):
    def dtype(config):
        return [Problem("trainer.precision", "bf16")]

    def seed(config):
        return [Problem("seed", str(config.seed))] if config.seed else []

    arms["late"] = replace(arms["late"], seed=7)
    found = arm_problems(arms, of_run=[dtype, seed], of_phase=[seed, dtype])
    assert [*map(str, found)] == ["trainer.precision: bf16", "controls.late.seed: 7"]


@pytest.mark.parametrize("file", ["workflows/experiment", "commands/slurm", "commands/plan"])
def test_no_check_is_asked_of_the_run_alone(file):
    """Every one gets the configurations from here, or those of all arms."""
    tree = ast.parse((ROOT / f"trainer/{file}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    checks = [
        (node.func.id, ast.unparse(node.args[0]))
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id.endswith("_problems") and node.args
    ]
    assert "arm_problems" in [name for name, _ in checks]
    assert [name for name, first in checks if first == "config"] == []
