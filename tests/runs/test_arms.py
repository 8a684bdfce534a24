"""Checks see the run, its controls, and the phases of each."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.program import ROOT
from trainer.common.errors import Problem
from trainer.config import PhaseConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.arms import (
    MAIN,
    arm_problems,
    arms_of,
    gpus_that_fit,
    phase_configs,
    shard_size,
    spread_problems,
)
from trainer.runs.parsing import parse
from trainer.runs.ranks import Ranks

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
    result = [(n, c.trainer.batch_size, c.data.sequence_length) for n, c in phase_configs(arms)]
    assert result == ALL


@pytest.mark.parametrize("place", range(len(ALL)))
def test_a_fault_in_any_phase_of_any_arm_is_found(arms, place):
    name, batch, length = ALL[place]

    def fault(config):
        wrong = (config.trainer.batch_size, config.data.sequence_length) == (batch, length)
        return [Problem("trainer.batch_size", str(batch))] if wrong else []

    message = "" if name == MAIN or (batch, length) == (4, 64) else f"controls.{name}."
    result = arm_problems(arms, of_phase=[fault])
    assert result == [Problem(f"{message}trainer.batch_size", str(batch))]


def test_what_is_wrong_with_all_is_said_once_and_of_a_control_alone_under_its_name(arms):
    def dtype(config):
        return [Problem("trainer.precision", "bf16")]

    def seed(config):
        return [Problem("seed", str(config.seed))] if config.seed else []

    arms["late"] = replace(arms["late"], seed=7)
    result = arm_problems(arms, of_run=[dtype, seed], of_phase=[seed, dtype])
    assert [*map(str, result)] == ["trainer.precision: bf16", "controls.late.seed: 7"]


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
    assert {"arm_problems", "experiment_problems"} & {name for name, _ in checks}
    assert [name for name, first in checks if first == "config"] == []


def test_a_hybrid_shards_inside_a_node():
    assert Ranks(rank=3, world_size=16, local_rank=3, local_size=8).nodes == 2
    assert shard_size(StrategyConfig(name="hsdp"), 16, 8) == 8
    assert shard_size(StrategyConfig(name="hsdp", shard_size=4), 16, 8) == 4
    assert shard_size(StrategyConfig(name="fsdp2"), 16, 8) == 16


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "message"),
    [
        (
            *(32, 2, 6),
            "trainer.batch_size: 32 sequences do not divide into micro-batches of 2 on 6 ranks; "
            "start 4 or 8 ranks.",
        ),
        (
            *(32, None, 48),
            "trainer.batch_size: 32 sequences do not divide into micro-batches of 1 on 48 ranks; "
            "start 32 ranks.",
        ),
        (
            *(48, 8, 4),
            "trainer.micro_batch_size: the 12 sequences of each of 4 ranks do not divide into "
            "micro-batches of 8; choose 6 or 12.",
        ),
        (32, 2, 16, None),
        (32, None, 1, None),
        (6, None, 2, None),
    ],
)
def test_ranks_that_do_not_fit_the_batch_are_told_what_a_resume_may_change(
    batch, micro, processes, message
):
    config = RunConfig(trainer=TrainerConfig(batch_size=batch, micro_batch_size=micro))
    problems = spread_problems(config, processes, processes)
    assert [*map(str, problems)] == ([message] if message else [])


@pytest.mark.parametrize(
    ("strategy", "batches", "nodes", "gpus"),
    [
        ("single", [64], 1, 1),
        ("ddp", [64], 1, 8),
        ("ddp", [64], 16, 4),
        ("fsdp2", [16, 4], 1, 4),  # every phase has to be dealt out
        ("ddp", [3], 1, 1),
    ],
)
def test_as_many_gpus_of_a_node_fit_as_a_batch_can_be_dealt_out_to(strategy, batches, nodes, gpus):
    phases = {f"phase_{i}": PhaseConfig(steps=1, batch_size=b) for i, b in enumerate(batches)}
    config = RunConfig(
        trainer=TrainerConfig(batch_size=batches[0]),
        strategy=StrategyConfig(strategy),
        phases=phases if len(batches) > 1 else {},
    )
    assert gpus_that_fit(config, nodes) == gpus


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"seed": 3}, 8),
        ({"trainer": {"batch_size": 4}}, 4),
        ({"phases": {"a": {"steps": 1}, "b": {"steps": 1, "batch_size": 2}}}, 2),
        ({"strategy": {"name": "single"}}, 1),
    ],
)
def test_the_batches_of_controls_are_dealt_out_too(changes, gpus):
    config = RunConfig(
        trainer=TrainerConfig(batch_size=64),
        strategy=StrategyConfig("ddp"),
        controls={"other": changes},
    )
    assert gpus_that_fit(config, 1) == gpus


@pytest.mark.parametrize(
    ("name", "size", "problems"), [("hsdp", 4, 1), ("hsdp", 3, 0), ("ddp", 4, 0)]
)
def test_shards_that_do_not_divide_the_ranks_are_named(name, size, problems):
    config = RunConfig(
        trainer=TrainerConfig(batch_size=12), strategy=StrategyConfig(name, shard_size=size)
    )
    assert [*map(str, spread_problems(config, 6, 6))] == problems * [
        "strategy.shard_size: 4 does not divide the 6 ranks; by default it is the number of ranks "
        "on a node."
    ]
