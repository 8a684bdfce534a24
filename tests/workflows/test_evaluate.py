"""The evaluation of finished runs: what it writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.report.examples import report
from tests.small_runs import trained_in
from trainer.common.errors import UserError
from trainer.config import (
    ChoiceSettings,
    DataConfig,
    EvaluationConfig,
    EvaluationRequest,
    LongRopeSettings,
    NeedleTaskSettings,
    RulerSettings,
    RunConfig,
    TemperatureSettings,
)
from trainer.report.report import Report
from trainer.runs import models
from trainer.runs.directory import plain, saved_config
from trainer.runs.models import find_model
from trainer.runs.parsing import merged
from trainer.workflows import evaluate
from trainer.workflows.evaluate import evaluate_lengths, one_text, seeds_of

CONFIG = EvaluationConfig(
    lengths=[1, 2],
    methods=["none", "yarn", "temperature"],
    tasks=["perplexity", "statements"],
    windows=2,
    fit_windows=2,
    needles=NeedleTaskSettings(trials=4, needles=2),
    ruler=RulerSettings(trials=2),
    temperature=TemperatureSettings(coefficient=0.3, models="all"),
)


@pytest.fixture(scope="module")
def runs(finished, tmp_path_factory):
    """A run that drops its encoding, with its checkpoint before the drop."""
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    return shutil.copytree(finished[0].run_dir, directory)


def request(runs, output, **changes):
    before = str(runs / "checkpoints" / "before-drop")
    return EvaluationRequest(
        checkpoint=before,
        compare=[str(runs)],
        output=str(output),
        evaluation=replace(CONFIG, **changes),
    )


def assert_same(first, second):
    """Hold rows and trials of two reports against each other, without seconds."""
    for one, other in ((first.rows, second.rows), (first.trials, second.trials)):
        pd.testing.assert_frame_equal(
            one.drop(columns="seconds", errors="ignore"),
            other.drop(columns="seconds", errors="ignore"),
            check_dtype=False,
            rtol=1e-9,
        )


@pytest.mark.parametrize(
    ("changes", "step", "is_same"),
    [
        ({}, 100, True),
        ({"seed": 1}, 100, True),
        ({"seed": 1, "name": "b", "run_dir": "b", "trainer": {"threads": 1}}, 100, True),
        ({"seed": 1}, 99, False),
        ({"seed": 1, "optimizer": {"lr": 1e-4}}, 100, False),
        ({"seed": 1, "data": {"text_field": "body"}}, 100, False),
        (None, 100, False),
    ],
)
def test_models_that_differ_in_their_seeds_alone_are_of_one_recipe(changes, step, is_same):
    def model(name, changes, step):
        run = None if changes is None else saved_config(merged(plain(RunConfig()), changes))
        return SimpleNamespace(title="A", name=name, run=run, state={"step": step})

    models = [model("A (a)", {}, 100), model("A (b)", changes, step)]
    assert seeds_of(models) == ({"A (a)": "A", "A (b)": "A"} if is_same else {})


@pytest.mark.parametrize(
    ("further", "mean"),
    [({}, "DroPE"), ({"DroPE (d)": {"lr": 1.0}}, "DroPE (a (1)) and other seeds")],
)
def test_seeds_of_a_recipe_have_the_name_that_they_share_if_no_other_recipe_has_it(further, mean):
    def model(name, seed, optimizer):
        changes = {"seed": seed, "optimizer": optimizer}
        run = saved_config(merged(plain(RunConfig()), changes))
        title = name.partition(" (")[0]
        return SimpleNamespace(title=title, name=name, run=run, state={"step": 1})

    alike = ["DroPE (a (1))", "DroPE (b)", "DroPE (c)"]  # by their directories
    models = [model(name, seed, {}) for seed, name in enumerate(alike)]
    models.insert(1, model("RoPE", 0, {"lr": 0.5}))
    models += [model(name, 0, optimizer) for name, optimizer in further.items()]
    assert seeds_of(models) == dict.fromkeys(alike, mean)


@pytest.mark.parametrize(
    ("changes", "texts", "is_same"),
    [
        ({"num_workers": 4, "cache_dir": "elsewhere", "prepared": "a"}, ["1"], True),
        ({"text_field": "body"}, ["1"], False),
        ({}, ["2"], False),
    ],
)
def test_one_text_is_one_wherever_it_lies(changes, texts, is_same):
    def model(changes, texts):
        config = saved_config(merged(plain(RunConfig()), {"data": changes}))
        return SimpleNamespace(run=config, state={"texts": texts})

    assert one_text([model({}, ["1"]), model(changes, texts)]) is is_same


def anew(asked):
    """Evaluate in a directory without its report, whose cells stay."""
    Path(asked.output, "facts.json").unlink()
    return evaluate_lengths(asked)


def test_claims_are_about_the_first_model_of_each_role(tmp_path, monkeypatch):
    """Of equal recipes about their mean; models without a role are in none."""
    judged = []
    monkeypatch.setattr(evaluate, "observe", lambda evidence: judged.append(evidence) or ())
    monkeypatch.setattr(evaluate, "write_renderings", lambda *_: None)
    monkeypatch.setattr(evaluate, "origins", lambda _: {})
    monkeypatch.setattr(evaluate, "provenance", lambda _: {})

    def model(name, role, text="1", **changes):
        run = saved_config(merged(plain(RunConfig()), changes))
        state = {"step": 9, "texts": [text]}
        title = name.partition(" (")[0]
        return SimpleNamespace(title=title, name=name, role=role, run=run, state=state)

    rope = [model(f"RoPE ({seed})", "rope", seed=seed) for seed in (1, 2)]
    drope = [model(f"DroPE {lr}", "drope", optimizer={"lr": lr}) for lr in (0.1, 0.2)]
    other = model("RoPE + YaRN", None, text="2", optimizer={"lr": 0.3})
    for models_, roles, is_one in (
        ([*rope, *drope, other], {"rope": "RoPE", "drope": "DroPE 0.1"}, True),
        ([*drope[::-1], rope[1]], {"drope": "DroPE 0.2", "rope": "RoPE (2)"}, True),
        (
            [rope[0], model("far", "nope", text="2", optimizer={"lr": 0.4})],
            {"rope": "RoPE (1)", "nope": "far"},
            False,
        ),
    ):
        made = evaluate.publish(report(), models_, tmp_path)
        notes = [note.partition(",")[0] for note in made.notes if "seeds" in note]
        assert notes == ["RoPE: mean of 2 seeds"] * (len(models_) == 5)
        assert judged[-1].models == roles
        assert judged[-1].one_text is is_one


@pytest.mark.parametrize(
    ("changes", "name", "place"),
    [
        ({}, "default", "home/evaluation"),
        ({}, "ruler", "home/lengths/ruler"),
        ({"name": "mine"}, "ruler", "home/lengths/mine"),
        ({"output": "there"}, "ruler", "there"),
        ({"compare": ["b"]}, "default", "home/evaluation"),
    ],
)
def test_an_evaluation_is_of_the_text_of_its_model_and_lies_with_it(
    tmp_path, monkeypatch, changes, name, place
):
    """The state before the drop, which comes along, is the first to be measured."""
    monkeypatch.chdir(tmp_path)
    before, model = (
        SimpleNamespace(reference=reference, home=Path(home), run=SimpleNamespace(name=reference))
        for reference, home in (("before", "elsewhere"), ("a", "home"))
    )
    seen = []

    def found(references, training_length, *, with_origins):
        assert with_origins is ("compare" not in changes)
        seen.append((references, training_length))
        return [before, model]

    def measured(title, models, config, text, cells):
        seen.append((title, text, cells))
        return report()

    monkeypatch.setattr(evaluate, "find_models", found)
    monkeypatch.setattr(evaluate, "held_out_corpus", lambda text, model: (text, model.reference))
    monkeypatch.setattr(evaluate, "held_out_of", lambda corpus, model: (corpus, model.reference))
    monkeypatch.setattr(evaluate, "measure_models", measured)
    monkeypatch.setattr(evaluate, "publish", lambda report, models, directory: report)
    asked = EvaluationRequest("a", evaluation=EvaluationConfig(training_length=48), **changes)
    made, directory = evaluate_lengths(asked, name)
    assert directory == Path(place)
    assert seen[0] == (["a", *changes.get("compare", [])], 48)
    assert seen[1] == ("a", ((None, "a"), "a"), Path(place, "cells"))
    assert made.config["request"] == evaluate.plain_request(asked)


@pytest.mark.parametrize(("first", "bos"), [(7, (7,)), (0, (0,)), (None, ())])
def test_held_out_texts_begin_as_the_model_s(first, bos):
    tokens = SimpleNamespace(first=first)
    corpus = SimpleNamespace(test="test", validation="validation")
    text = evaluate.held_out_of(corpus, SimpleNamespace(run=None, tokens=tokens))
    assert (text.split, text.bos, text.training_share) == ("test", bos, None)


def test_methods_that_apply_are_measured_and_the_others_named(runs, tmp_path):
    report, output = evaluate_lengths(request(runs, tmp_path))
    assert set(zip(report.rows.model, report.rows.method, strict=True)) == {
        ("RoPE (before its drop)", "none"),
        ("RoPE (before its drop)", "yarn"),
        ("RoPE (before its drop)", "temperature"),
        ("DroPE", "none"),
        ("DroPE", "temperature"),
    }
    assert report.training_share == 0.5
    assert report.methods == {"none": "as is", "yarn": "YaRN", "temperature": "temperature"}
    assert {p.name for p in output.iterdir()} >= {
        "cells", "figures", "report.html", "facts.json", "results.csv", "trials.parquet",
    }  # fmt: skip
    written = Report.read(output)
    assert (written.config, written.tasks) == (report.config, report.tasks)
    assert len(written.rows) == 20
    assert set(written.rows.seed) == {CONFIG.needles.seed}
    assert 4 < report.unigram_loss < 6


def test_statements_are_left_out_of_a_model_that_saw_none(runs, tmp_path, monkeypatch):
    held_out_of = evaluate.held_out_of
    monkeypatch.setattr(
        evaluate, "held_out_of", lambda *given: replace(held_out_of(*given), training_share=0.0)
    )
    report, _ = evaluate_lengths(request(runs, tmp_path, methods=["none"]))
    assert {*report.tasks} == {"perplexity"}
    assert ["carried none" in note for note in report.notes] == [True]


@pytest.mark.slow
def test_factors_are_searched_by_needles_and_a_sentence_is_found_in_part(runs, tmp_path):
    asked = request(
        runs,
        tmp_path,
        lengths=[12],
        methods=["longrope"],
        tasks=["sentence"],
        longrope=LongRopeSettings(search="needles", evaluations=3, windows=2),
        needles=NeedleTaskSettings(trials=2, depths=(0.0, 1.0)),
    )
    report, output = evaluate_lengths(asked)
    trials = report.trials
    assert set(trials.task) == {"sentence"}
    assert trials.depth.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert trials.text.tolist() == [0, 0, 1, 1]
    assert trials.value.between(0, 1).all()
    assert len([*(output / "cells").glob("fit-*/*")]) == 1


def test_another_evaluation_writes_beside_the_first(runs, tmp_path):
    usual = tmp_path / "usual"
    first = replace(request(runs, tmp_path), output=None)
    other = replace(first, evaluation=replace(first.evaluation, windows=3))
    for asked, expected in ((first, "usual"), (other, "usual-2"), (first, "usual")):
        place = evaluate.place_of(asked, usual)
        assert place.name == expected
        assert evaluate.place_of(replace(asked, plugins=["a.py"], plots=None), usual) == place
        place.mkdir(exist_ok=True)
        record = {"config": {"request": evaluate.plain_request(asked)}}
        (place / "facts.json").write_text(json.dumps(record))
    with pytest.raises(
        UserError, match=r"^name: \S+ holds other results .*windows: \d+ there, 3 here"
    ):
        evaluate.place_of(replace(other, name="usual"), usual)
    record = {"config": {"controls": {}, "evaluation": {}}}
    (usual / "facts.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"^output: '.*usual' holds other results .*of a run\)$"):
        evaluate.place_of(replace(first, output=str(usual)), usual)


@pytest.mark.slow
def test_cells_on_other_text_or_of_other_weights_are_measured_anew(runs, base, tmp_path):
    other = tmp_path / "b.jsonl"
    other.write_text(Path(base["data"]["files"][0]).read_text().replace("Sentence", "Phrase"))
    text = DataConfig(source="files", files=[str(other)], cache_dir=str(tmp_path / "cache"))
    asked = request(runs, tmp_path / "out", methods=["none"], tasks=["perplexity"], lengths=[1])
    cells = tmp_path / "out" / "cells"
    first, place = evaluate_lengths(replace(asked, compare=[]))
    with pytest.raises(UserError, match=r"^output: \S+ holds other results \(text: "):
        evaluate_lengths(replace(asked, compare=[], text=text))
    second, beside = anew(replace(asked, compare=[], text=text))
    assert place == beside == tmp_path / "out"
    assert first.rows.value[0] != second.rows.value[0]
    assert len([*cells.glob("cell-*")]) == 2
    again, _ = anew(replace(asked, compare=[]))
    assert_same(again, first)
    assert_same(Report.read(place), first)
    assert len([*cells.glob("cell-*")]) == 2
    checkpoint = tmp_path / "again"  # trained anew
    shutil.copytree(runs, checkpoint)
    manifest = find_model(str(checkpoint)).path / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    anew(replace(asked, checkpoint=str(checkpoint), compare=[]))
    assert len([*cells.glob("cell-*")]) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": ["standard"]}, "tokens for needles and a question, got 32"),
        ({"lengths": [0.01, 1]}, "evaluation.lengths: expected 2 tokens or more, got 0"),
        ({"lengths": [1, 500]}, "expected 16000 tokens of held-out text or more, got"),
        ({"tasks": ["ruler"]}, "tokens for niah_single_1, got 32"),
        (
            {"methods": ["weighted_rope"], "choice": ChoiceSettings(length=0.16)},
            "SequenceFE: expected a text of 6 tokens or more, got 5",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused_before_anything_is_measured(
    runs, tmp_path, changes, said
):
    with pytest.raises(UserError, match=said):
        evaluate_lengths(request(runs, tmp_path, **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tokens_are_the_same_cells_and_the_same_report_as_multiples(runs, tmp_path):
    first, _ = evaluate_lengths(request(runs, tmp_path / "out"))
    again, _ = anew(request(runs, tmp_path / "out", tokens=[32, 64, 32]))
    assert_same(again, first)
    assert again.config["evaluation"] == first.config["evaluation"]


@pytest.mark.slow
def test_another_training_length_counts_lengths_and_methods_from_itself(runs, tmp_path):
    """Its cells are other cells: YaRN at 32 of 32 tokens does nothing, at 32 of 16 halves."""
    given = {"tokens": [16, 32], "methods": ["none", "yarn"], "tasks": ["perplexity"]}
    of_run, _ = evaluate_lengths(request(runs, tmp_path / "out", **given))
    asked = request(runs, tmp_path / "out", **given, training_length=16)
    shorter, _ = anew(asked)
    assert (of_run.training_length, shorter.training_length) == (32, 16)
    before = "RoPE (before its drop)"
    one, other = (
        {m: r.curve((before, m), "perplexity").set_index("length").value for m in ("none", "yarn")}
        for r in (of_run, shorter)
    )
    assert sorted(set(shorter.rows.factor)) == [1.0, 2.0]
    assert one["yarn"].equals(one["none"])
    assert one["none"][16] == other["none"][16]
    assert one["none"][32] != other["none"][32]  # over the last 16 tokens alone
    assert other["yarn"][16] == one["none"][16]
    assert other["yarn"][32] != one["none"][32]
    own, same, other = (find_model(str(runs), n).fingerprint for n in (None, 32, 16))
    assert own == same != other


def test_models_of_other_training_lengths_need_one_to_be_named(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(
        models,
        "find_model",
        lambda name, C: find_model(name, C or (64 if name == str(runs) else None)),
    )
    with pytest.raises(UserError, match=r"length of 64 tokens, the first one of 32; evaluation.tr"):
        evaluate_lengths(request(runs, tmp_path / "out"))
    given = {"methods": ["none"], "tasks": ["statements"], "training_length": 64}
    report, _ = evaluate_lengths(request(runs, tmp_path / "out", **given))
    assert set(report.rows.length) == {64, 128}


@pytest.mark.slow
def test_a_run_that_ends_in_shorter_sequences_counts_from_these(base, tmp_path):
    phases = {"a": {"steps": 2}, "b": {"steps": 2, "sequence_length": 24}}
    changes = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    trained_in(tmp_path / "run", base, phases=phases, **changes)
    checkpoints = tmp_path / "run" / "checkpoints"
    found = {path.name: find_model(str(path)) for path in checkpoints.iterdir()}
    lengths = {name: model.layout.training_length for name, model in found.items()}
    assert (lengths["step-000002"], lengths["step-000004"]) == (32, 24)
    assert found["step-000004"].load().layout.training_length == 24


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_run_is_evaluated_on_the_text_that_it_read_even_if_its_file_has_changed(
    finished, base, tmp_path, is_continued
):
    path = tmp_path / "b.jsonl"
    path.write_text(Path(base["data"]["files"][0]).read_text().replace("Sentence", "Phrase"))
    changes = {"drop": {"at": None}, "trainer": {"max_steps": 1}}
    if is_continued:
        changes["model"] = {"from_run": finished[0].run_dir}
    trained_in(tmp_path / "run", base, data={"files": [str(path)]}, **changes)
    model = find_model(str(tmp_path / "run"))
    path.write_text(path.read_text().replace("Phrase", "Clause"))
    corpus = evaluate.held_out_corpus(None, model)
    assert corpus.fingerprints == model.state["texts"]
    assert "Phrase" in corpus.tokenizer.decode(corpus.test.parts[0][1][:100].tolist())
