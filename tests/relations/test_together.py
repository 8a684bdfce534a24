"""Results of what is measured together are those of each alone, in any order.

Models, methods, tasks, lengths and studies of one call share a store, caches and loaded weights. A
value of one that is used for another changes a result here. Two models that a study compares give
the same numbers in either order.
"""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch

from tests.program import ROOT
from tests.small_runs import trained_in
from trainer.analysis.drop import DropStudy
from trainer.analysis.offset_features.changes import OffsetChanges
from trainer.analysis.studies.catalogue import STUDIES
from trainer.analysis.studies.study import Target
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


COMPARING = {"drop": DropStudy, "changes": OffsetChanges}
"""Studies of two models, by their files."""
IN_ORDER = {
    "kl": "how far the second model's predictions lie from the first one's",
    "names": "the models in order",
    "long, bounds of short": "the second model by the bounds of the first",
    "short, bounds of long": "likewise",
}
"""Numbers of these studies that the order decides on, with the reason."""
TURNED = {"before": "after", "after": "before"}


def comparing_studies():
    """Return the files of the studies that are made of two targets."""
    files = set()
    for path in (ROOT / "trainer/analysis").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                kinds = [ast.unparse(x.annotation) for x in node.args.args if x.annotation]
                files |= {path.stem} if kinds.count("Target") > 1 else set()
    return files


def test_every_study_of_two_models_is_turned_around():
    assert comparing_studies() == {*COMPARING}


def under(words, numbers):
    """Return numbers with ``words`` of their names replaced, without those of :data:`IN_ORDER`."""
    if not isinstance(numbers, dict):
        return numbers
    return {
        "_".join(words.get(word, word) for word in name.split("_")): under(words, value)
        for name, value in numbers.items()
        if name not in IN_ORDER
    }


@pytest.mark.parametrize("name", COMPARING)
def test_two_models_are_compared_alike_in_either_order(name, tiny_decoder):
    """The text is longer than one training length and shorter than the other."""
    ids = torch.randint(0, 50, (1, 48), generator=torch.Generator().manual_seed(2))
    targets = [
        Target(called, tiny_decoder(training_length=C, encodings={"rope": {"base": base}}), ids)
        for called, C, base in (("short", 24, 1e4), ("long", 96, 5e5))
    ]
    forth, back = (COMPARING[name](*pair).run().numbers for pair in (targets, targets[::-1]))
    assert under(TURNED, back) == under({}, forth)
