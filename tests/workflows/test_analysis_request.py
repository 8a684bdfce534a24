"""What an analysis cannot be asked for."""

from __future__ import annotations

import pytest

from trainer.workflows.analysis_request import AnalysisConfig, AnalysisRequest

NEEDS = (
    "needs text or another reading of the model; expected one of the methods that change its "
    "layout alone, such as pi, yarn or dynamic_ntk_alpha."
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"length": 2, "texts": 1, "chosen": [[0, 1]], "prefixes": [9, 6]}, []),
        ({"length": 1}, ["analysis.length: expected 2 or more, got 1."]),
        ({"texts": 0}, ["analysis.texts: expected 1 or more, got 0."]),
        (
            {"chosen": [[0, 1], [2], [1, 2, 3]]},
            [
                "analysis.chosen: expected pairs [layer, head], got [2].",
                "analysis.chosen: expected pairs [layer, head], got [1, 2, 3].",
            ],
        ),
        (
            {"prefixes": [9, 5]},
            ["analysis.prefixes: expected 6 tokens or more, got [9, 5]."],
        ),
        (
            {"kind": "synthetics"},
            ["analysis.kind: there is no analysis 'synthetics'. Did you mean 'synthetic'?"],
        ),
        ({"method": "pi"}, []),
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
