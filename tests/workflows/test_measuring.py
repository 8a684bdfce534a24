"""Which of the measured models the papers' observations are held against."""

from __future__ import annotations

from types import SimpleNamespace

from tests.report.examples import cell, report
from trainer.config import STATEMENTS, DataConfig
from trainer.workflows import evaluate
from trainer.workflows.evaluate import with_observations


def test_observations_are_of_the_first_model_of_each_role_and_of_its_methods(monkeypatch):
    asked = []

    def observe(run):
        asked.append(run)
        return ("seen",)

    monkeypatch.setattr(evaluate, "observe", observe)
    measured = [
        ("first", "none"), ("first", "yarn"), ("first", "crop"), ("second", "none"),
        ("third", "none"), ("again", "none"), ("again", "yarn"),
    ]  # fmt: skip
    cells = (cell((1.0, 0.0), model, method, STATEMENTS, 64) for model, method in measured)
    told = report(*cells, training_length=64)
    roles = {"first": "rope", "second": "drope", "third": None, "again": "rope"}
    runs = {name: SimpleNamespace(data=DataConfig()) for name in roles}
    candidates = [
        SimpleNamespace(name=name, role=role, run=runs[name]) for name, role in roles.items()
    ]
    runs = {name: f"run of {name}" for name in roles}
    found = with_observations(told, candidates, runs=runs)
    assert found.observations == ("seen",)
    (run,) = asked
    assert run.roles == {
        "rope": ("first", "none"), "rope_yarn": ("first", "yarn"), "drope": ("second", "none")
    }  # fmt: skip
    assert (run.report, run.one_text) == (told, True)
    assert run.runs == {"rope": "run of first", "drope": "run of second"}
    with_observations(told, candidates)
    assert asked[-1].runs == {}
