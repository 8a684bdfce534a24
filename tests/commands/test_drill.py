"""What a drill prints, as a whole, and how it ends; its faults are those of tests/workflows."""

from __future__ import annotations

import logging
import re

import pytest

from trainer.commands.drill import COMMAND
from trainer.commands.hydra.running import run_command
from trainer.workflows import drill as workflow
from trainer.workflows.drill import Fault, Outcome

FAULTS = (Fault("kill -9", 3), Fault("a bit flipped", 12), Fault("other ranks", 7, ranks=(1, 2)))


@pytest.fixture
def drilled(monkeypatch):
    """A function that lets the program find these differences, and what it says."""

    def go(capsys, *differences):
        def drill(config, directory):
            assert (config.name, directory.is_dir()) == ("mine", True)
            assert logging.getLogger("trainer").level == logging.CRITICAL
            places.append(directory)
            for fault, difference in zip(FAULTS, differences, strict=True):
                yield Outcome(fault, difference, 1.26)

        places = []
        monkeypatch.setattr(workflow, "FAULTS", FAULTS)
        monkeypatch.setattr(workflow, "drill", drill)
        try:
            run_command(COMMAND, ["name=mine"])
        finally:
            assert not places[0].exists()
        return re.sub(r"\d+ s in all", "SECONDS in all", capsys.readouterr().out)

    return go


def test_every_fault_that_a_run_survives_has_its_line(drilled, capsys):
    lines = drilled(capsys, "", "", "").splitlines()
    assert lines[:4] == [
        "3 faults to a small copy of 'mine', a few seconds each",
        " 1 of 3  kill -9: identical",
        " 2 of 3  a bit flipped: identical",
        " 3 of 3  other ranks: equal to rounding",
    ]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["kill -9", "3", "identical", "1.3"],
        ["a bit flipped", "12", "identical", "1.3"],
        ["other ranks", "7", "equal to rounding", "1.3"],
    ]
    assert lines[-1] == "3 of 3 survived, SECONDS in all"


def test_one_that_it_does_not_survive_is_the_exit_code(drilled, capsys):
    with pytest.raises(SystemExit) as stop:
        drilled(capsys, "", "metrics differ at step 12", "")
    assert stop.value.code == 1
    said = capsys.readouterr().out
    assert " 2 of 3  a bit flipped: metrics differ at step 12\n" in said
    assert "2 of 3 survived" in said
