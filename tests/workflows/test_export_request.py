"""What an export may be asked for."""

from __future__ import annotations

import pytest

from trainer.workflows.requests import ExportRequest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"tolerance": 0.0}, []),
        ({"to": None}, ["to: give to=DIRECTORY, new or empty."]),
        ({"to": ""}, ["to: give to=DIRECTORY, new or empty."]),
    ],
)
def test_what_is_missing_or_impossible_is_named(changes, said):
    request = ExportRequest(**{"checkpoint": "runs/x", "to": "out", **changes})
    assert [*map(str, request.problems())] == said
