"""Requests: what is impossible in them."""

from __future__ import annotations

import pytest

from trainer.data.config import DataConfig
from trainer.workflows.requests import (
    AnalysisConfig,
    AnalysisRequest,
    ExportRequest,
    request_problems,
)

NEEDS = (
    "needs text or another reading of the model; expected one of the methods that change its "
    "layout alone, such as pi, yarn or dynamic_ntk_alpha."
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"length": 2, "texts": 1, "chosen": [[0, 1]], "prefixes": [9, 6]}, []),
        (
            {"kind": "synthetics"},
            ["analysis.kind: there is no analysis 'synthetics'. Did you mean 'synthetic'?"],
        ),
        ({"method": "pi"}, []),
        ({"method": "pi", "layers": [0, -1]}, []),
        (
            {"layers": []},
            ["analysis.layers: expected one layer or more, got none; null leaves it to windows."],
        ),
        ({"method": "yarn+window"}, []),
        *(
            ({"method": f"pi+{part}"}, [f"analysis.method: {part!r} {NEEDS}"])
            for part in ("crop", "none", "dope", "longrope", "temperature", "weighted_rope")
        ),
        (
            {"method": "yarm"},
            ["analysis.method: unknown method 'yarm'. Did you mean 'yarn'?"],
        ),
    ],
)
def test_what_is_impossible_is_said_in_one_sentence(changes, said):
    assert [*map(str, AnalysisConfig(**changes).problems())] == said
    request = AnalysisRequest("runs/x", analysis=AnalysisConfig(**changes))
    assert [*map(str, request.problems())] == said


def test_problems_of_a_requests_text_have_its_keys():
    text = DataConfig(restart_positions=True, document_mask=False)
    (problem,) = request_problems("runs/x", text)
    assert problem.key == "text.restart_positions"


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
