"""How reports call runs, their task and their environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import DropConfig, RunConfig, TrainerConfig
from trainer.positional.config import PositionalConfig
from trainer.runs.descriptions import (
    is_dropped,
    lacks_schedule_control,
    name_and_role,
    reference_first,
    without_home,
)
from trainer.runs.directory import open_run_directory

DROPS = RunConfig(trainer=TrainerConfig(max_steps=20), drop=DropConfig(at=10))


def test_the_checkpoint_of_the_step_of_a_drop_is_of_before():
    assert [is_dropped(DROPS, step) for step in (0, 10, 11, 20)] == [False, False, True, True]
    assert not is_dropped(replace(DROPS, drop=DropConfig()), 20)


@pytest.mark.parametrize(
    ("positional", "role_of", "label_of"),
    [
        ({}, "rope", "RoPE"),
        ({"layers": ["rope", "nope", "rope"]}, "rope_nope", "rope + nope"),
        ({"heads": {"nope": 0.5}}, None, "rope"),
        ({"windows": [16]}, "rope_window", "rope"),
        ({"windows": [None]}, "rope", "RoPE"),
        (
            {"layers": ["own"], "encodings": {"own": {"type": "p_rope", "base": 2.0}}},
            "p_rope", "p-RoPE",
        ),
        ({"layers": ["own"], "encodings": {"own": {"base": 2.0}}}, "own", "own"),
    ],
)  # fmt: skip
def test_a_run_that_drops_nothing_is_called_by_its_encodings(positional, role_of, label_of):
    config = RunConfig(positional=PositionalConfig(**positional))
    assert name_and_role(config) == (label_of, role_of)
    assert name_and_role(replace(config, drop=DropConfig(at=0.5))) == ("DroPE", "drope")


@pytest.mark.parametrize(
    ("drop", "expected"),
    [
        ({}, ("DroPE", "drope")),
        ({"to": "none"}, ("DroPE", "drope")),
        ({"to": "alibi"}, ("RoPE, drop to alibi", None)),
        ({"layers": [0, 1]}, ("RoPE, drop of layers 0, 1 to nope", None)),
        ({"heads": [0]}, ("RoPE, drop of heads 0 to nope", None)),
        ({"windows": [16]}, ("RoPE, drop to nope and windows", None)),
    ],
)
def test_only_a_drop_of_all_encodings_to_none_is_drope(drop, expected):
    positional = PositionalConfig(encodings={"none": {"type": "nope"}})
    config = replace(DROPS, drop=DropConfig(at=10, **drop), positional=positional)
    assert name_and_role(config) == expected
    assert [name_and_role(config, step) for step in (0, 10)] == [("RoPE", "rope")] * 2


def test_roles_are_read_from_rope_to_what_was_made_of_it_to_the_rest():
    assert sorted(["nope", None, "drope", "rope"], key=reference_first)[:2] == ["rope", "drope"]
    assert reference_first(None) == reference_first("nope") == 2


def test_home_directory_does_not_get_into_reports():
    values = {"files": [str(Path.home() / "a.txt")], "n": 3, "deep": {"x": f"{Path.home()}/y"}}
    assert without_home(values) == {"files": ["~/a.txt"], "n": 3, "deep": {"x": "~/y"}}


def test_a_drop_beside_runs_without_one_lacks_the_control_with_its_schedule(tmp_path):
    drops = {"dropped": (0.8, "nope"), "never": (None, "nope"), "same": (0.8, "same")}
    for name, (at, to) in drops.items():
        open_run_directory(RunConfig(run_dir=str(tmp_path / name), drop=DropConfig(at=at, to=to)))
    for names, lacks in ((["dropped"], False), (["dropped", "never"], True), (drops, False)):
        assert lacks_schedule_control([str(tmp_path / name) for name in names]) is lacks
