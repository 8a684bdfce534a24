"""What an analysis cannot be asked for."""

from __future__ import annotations

import pytest

from trainer.workflows.requests import AnalysisConfig, AnalysisRequest

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
