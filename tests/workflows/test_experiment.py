"""Roles and labels of runs, and what reports say of where they were made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainer.commands.train import read_config
from trainer.runs.descriptions import label, role, without_home
from trainer.workflows.experiment import label_problems

EXPECTED = {
    (): ("rope", "RoPE"),
    ("positional=rope_id", "data.sequence_length=256"): ("rope_id", "RoPE-ID"),
    ("positional.layers=[rope,nope]",): ("rope_nope", "rope + nope"),
    ("positional=rnope_swa", "data.sequence_length=256"): ("rope_nope_window", "rope + nope"),
    ("+positional.heads.nope=0.5",): ("rope_nope_heads", "rope"),
    ("drop.at=10",): ("drope", "DroPE"),
    ("drop.at=10", "drop.enabled=false"): ("rope", "RoPE"),
    ("label=Mine",): ("rope", "Mine"),
}


@pytest.mark.parametrize("words", EXPECTED)
def test_role_and_label(words):
    config = read_config(list(words))
    assert (role(config), label(config)) == EXPECTED[words]


def test_run_before_its_drop_is_what_its_encoding_says():
    config = read_config(["drop.at=10", "label=Mine"])
    assert (role(config, dropped=False), label(config, dropped=False)) == ("rope", "RoPE")


def test_home_directory_does_not_get_into_reports():
    values = {"files": [str(Path.home() / "a.txt")], "n": 3, "deep": {"x": f"{Path.home()}/y"}}
    assert without_home(values) == {"files": ["~/a.txt"], "n": 3, "deep": {"x": "~/y"}}


def test_runs_that_tables_could_not_tell_apart_are_refused():
    config = read_config(["+controls.again.seed=7", "+controls.other.seed=8"])
    configs = {"main": config, "again": config, "other": replace(config, label="Other")}
    (problem,) = label_problems(configs)
    assert problem.startswith("controls.again.label: 'RoPE' is what main is called too")
