"""What an export may be asked for."""

from __future__ import annotations

import pytest

from trainer.workflows.export_request import ExportRequest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"tolerance": 0.0}, []),
        ({"tolerance": -1e-9}, ["tolerance: expected 0 or more, got -1e-09."]),
        ({"tolerance": float("nan")}, ["tolerance: expected 0 or more, got nan."]),
        ({"to": None}, ["to: give to=DIRECTORY, new or empty."]),
        ({"to": ""}, ["to: give to=DIRECTORY, new or empty."]),
        ({"threads": 0}, ["threads: expected 1 or more, got 0."]),
    ],
)
def test_what_is_missing_or_impossible_is_named(changes, said):
    request = ExportRequest(**{"checkpoint": "runs/x", "to": "out", **changes})
    assert [*map(str, request.problems())] == said
