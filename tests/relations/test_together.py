"""Results of what is measured together are those of each alone, in any order.

Models, methods, tasks, lengths and studies of one call share a store, caches and loaded weights. A
value of one that is used for another changes a result here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.small_runs import trained_in
from trainer.analysis.studies.catalogue import STUDIES
from trainer.evaluation import fitting
from trainer.evaluation.config import EvaluationConfig, KeyTokenSettings
from trainer.evaluation.method_config import LongRopeSettings, TemperatureSettings
from trainer.evaluation.needles import NeedleTaskSettings
from trainer.workflows import analyze, evaluate
from trainer.workflows.requests import AnalysisConfig, AnalysisRequest, EvaluationRequest

OTHER = {
    "model": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "qk_norm": {"when": "always"},
    },
    "positional": {"layers": ["half_rope", "rope", "nope"], "windows": [None, 16, None]},
    "data": {"sequence_length": 64},
    "drop": {"at": None},
    "seed": 5,
}
"""A run with the text of the small runs and with everything else unlike them."""


@pytest.fixture(scope="module")
def models(finished, base, tmp_path_factory):
    """References of a RoPE model, of the same after its drop, and of one that shares its text."""
    directory = finished[0].run_dir
    other, _ = trained_in(tmp_path_factory.mktemp("other") / "run", base, **OTHER)
    return f"{directory}/checkpoints/before-drop", str(directory), str(other.run_dir)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Reports are compared before they are drawn; fits take few steps."""
    monkeypatch.setattr(analyze, "write_geometry_report", lambda report, output: output)
    monkeypatch.setattr(evaluate, "write_renderings", lambda report, output: None)
    monkeypatch.setattr(fitting, "STEPS", 3)


METHODS = ("none", "longrope", "yarn+temperature", "temperature_per_head", "dope", "pi")
TASKS = ("statements", "perplexity", "key_tokens", "passkey")


def measured(models, output, methods=METHODS, tasks=TASKS, tokens=(128, 256), chooser=None):
    """Return the cells of an evaluation by checkpoint, method, task and length, without seconds."""
    settings = EvaluationConfig(
        tokens=[*tokens],
        training_length=32,
        methods=[*methods],
        tasks=[*tasks],
        windows=20,
        last=16,
        fit_windows=2,
        key_tokens=KeyTokenSettings(chooser, alpha=1e-9, beta=-50.0),
        needles=NeedleTaskSettings(trials=2, needles=2),
        longrope=LongRopeSettings(evaluations=2),
        temperature=TemperatureSettings(grid=[0.0, 0.3], models="all"),
    )
    first, *others = models
    report, _ = evaluate.evaluate_lengths(
        EvaluationRequest(first, compare=others, output=str(output), threads=1, evaluation=settings)
    )
    names = {"RoPE (before-drop)": "before", "DroPE": "after"}
    return {
        (names.get(c.model, "other"), c.method, c.task, c.length): replace(c, model="", seconds=0.0)
        for c in report.cells
    }


def test_cells_do_not_depend_on_what_is_measured_beside_them(models, tmp_path):
    before, after, other = models
    together = measured([before, other, after], tmp_path / "together", chooser=other)
    assert {model for model, *_ in together} == {"before", "after", "other"}
    turned = measured(
        [after, before, other],
        tmp_path / "turned",
        methods=METHODS[::-1],
        tasks=TASKS[::-1],
        tokens=(256, 128),
        chooser=other,
    )
    assert turned == together
    alone = {}
    for number, model in enumerate(models):
        alone |= measured([model], tmp_path / str(number), chooser=other)
    assert alone == together
    for method in METHODS:
        part = measured([other], tmp_path / method, [method], chooser=other)
        assert part == {k: c for k, c in together.items() if k[0] == "other" and k[1] == method}
    for task in TASKS:
        part = measured([other], tmp_path / task, ["pi"], [task], chooser=other)
        assert part == {k: c for k, c in together.items() if k[:3] == ("other", "pi", task)}


def sections(checkpoint, output, kind, compare=None):
    """Return the findings, tables and numbers of an analysis by its studies' keys."""
    request = AnalysisRequest(
        checkpoint,
        compare,
        output=str(output),
        threads=1,
        analysis=AnalysisConfig(kind=kind, length=72, texts=1),
    )
    report, _ = analyze.analyze(request)
    return {s.key: (s.findings, s.grids, s.numbers) for s in report.sections}


def test_studies_do_not_depend_on_those_beside_them(models, tmp_path, monkeypatch):
    """Nor on a model that stands beside the analysed one."""
    before, _, other = models
    together = sections(other, tmp_path / "all", "all", compare=before)
    turned = dict(reversed(STUDIES.items()))
    monkeypatch.setattr(analyze, "STUDIES", turned)
    assert sections(other, tmp_path / "turned", "all", compare=before) == together
    assert together.keys() >= {"clusters", "sinks", "frequency_entropy", "offset_features"}
    for kind in together.keys() & STUDIES.keys():
        assert sections(other, tmp_path / kind, kind) == {kind: together[kind]}
