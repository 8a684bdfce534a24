"""Which of the measured models the papers' observations are held against."""

from __future__ import annotations

from types import SimpleNamespace

from tests.report.examples import report
from trainer.config import DataConfig
from trainer.workflows import evaluate
from trainer.workflows.evaluate import with_observations


def test_observations_are_of_the_first_model_of_each_role(monkeypatch):
    asked = []

    def observe(run):
        asked.append(run)
        return ("seen",)

    monkeypatch.setattr(evaluate, "observe", observe)
    told = report()
    roles = {"first": "rope", "second": "drope", "third": None, "again": "rope"}
    runs = {name: SimpleNamespace(data=DataConfig()) for name in roles}
    candidates = [
        SimpleNamespace(name=name, role=role, run=runs[name]) for name, role in roles.items()
    ]
    found = with_observations(told, candidates)
    assert found.observations == ("seen",)
    (evidence,) = asked
    assert evidence.models == {"rope": "first", "drope": "second"}
    assert (evidence.report, evidence.one_text) == (told, True)
