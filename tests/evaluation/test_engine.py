"""The engine: same trials for all, finished cells kept, models left as they were."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.data.needles import NeedleVocabulary
from trainer.evaluation import dope, passes
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.engine import measure_cells
from trainer.evaluation.fitting import FitText
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Perplexity, Statements
from trainer.evaluation.method_config import ChoiceSettings, DopeSettings, TemperatureSettings
from trainer.evaluation.methods import recipe
from trainer.evaluation.plan import PART, PlannedCell, Subject, cell_jobs, plan_cells, plan_jobs
from trainer.evaluation.store import Claims, Share, Store

LENGTHS = [32, 64]


def perplexity(corpus, lengths=LENGTHS):
    windows = windows_with_common_ends(corpus.test, 3, lengths)
    return Perplexity(windows, corpus.end_of_text, 32)


@pytest.fixture
def evaluation(model, corpus, tmp_path):
    """A function that evaluates into one store; returns cells and how often weights were read."""
    loads = []

    def load():
        loads.append(1)
        return model

    def go(
        methods=("none", "crop", "yarn"),
        trials=5,
        lengths=LENGTHS,
        folder=".",
        share=Share(),  # noqa: B008
        tokens=4096,
    ):
        config = EvaluationConfig(methods=list(methods))
        end = corpus.end_of_text
        subject = Subject("tiny", "weights", model.config, model.layout, load)
        recipes = {"tiny": [recipe(name, model.layout, config) for name in methods]}
        vocabulary = NeedleVocabulary.from_tokenizer(corpus.tokenizer)
        tasks = [
            perplexity(corpus, lengths),
            Statements.make(corpus.test, lengths, vocabulary, end, trials, 2, 1),
        ]
        text = FitText({}, end, "text")
        plans = plan_cells([subject], recipes, tasks, lengths, text)
        go.plans = plans
        measured = measure_cells(plans, text, Store(tmp_path / folder), tokens, share)
        return measured.cells, len(loads)

    return go


def test_there_is_a_cell_for_everything_and_the_model_stays_as_it_was(evaluation, model):
    before = model.layout
    cells, _ = evaluation()
    assert [(c.method, c.length, c.task) for c in cells] == [
        (method, length, task)
        for method in ("none", "crop", "yarn")
        for length in LENGTHS
        for task in ("perplexity", "statements")
    ]
    assert model.layout == before
    by_key = {(c.method, c.length, c.task): c for c in cells}
    for task in ("perplexity", "statements"):
        unchanged, rescaled = by_key["none", 32, task], by_key["yarn", 32, task]
        assert (unchanged.scores, unchanged.losses) == (rescaled.scores, rescaled.losses)


@torch.no_grad()
def test_cropped_losses_are_those_of_the_tokens_in_reach(evaluation, model, corpus):
    """At 64 tokens, 32 of them read: the last 16 tokens behind the 16 before, those before them
    behind the 16 before these."""
    cells, _ = evaluation(["crop"])
    (cell,) = [c for c in cells if c.task == "perplexity" and c.length == 64]
    losses = []
    for window in perplexity(corpus).windows[64]:
        for first in (16, 32):
            ids = torch.tensor([corpus.end_of_text, *window[first : first + 32]])
            logits = model(ids[None, :-1])[0].double()
            losses.append(F.cross_entropy(logits, ids[1:], reduction="none")[16:])
    assert cell.last_loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_stored_cells_are_not_measured_again(evaluation):
    first, loads = evaluation(["none"])
    again, still = evaluation(["none"])
    assert (again, still) == (first, loads)
    more, once_more = evaluation(["none", "pi"])
    assert more[: len(first)] == first
    assert once_more == loads + 1
    # Other trials are another measurement.
    assert len(evaluation(["none"], trials=4)[0][1].scores) == 4


def test_a_model_is_freed_before_the_next_one_is_read(tiny_decoder, corpus, tmp_path):
    read, alive = [], []

    def load():
        gc.collect()
        alive.append(sum(model() is not None for model in read))
        model = tiny_decoder(model={"vocab_size": corpus.tokenizer.get_vocab_size()})
        read.append(weakref.ref(model))
        return model

    shape = load()
    subjects = [Subject(name, name, shape.config, shape.layout, load) for name in "ab"]
    config = EvaluationConfig()
    recipes = {name: [recipe("none", shape.layout, config)] for name in "ab"}
    del shape
    text = FitText({}, corpus.end_of_text, "text")
    plans = plan_cells(subjects, recipes, [perplexity(corpus)], LENGTHS, text)
    measure_cells(plans, text, Store(tmp_path), 4096)
    assert alive == [0, 0, 0]


def test_a_fit_on_other_text_is_another_measurement(model, corpus):
    fitted = TemperatureSettings(models="all")
    config = EvaluationConfig(methods=["none", "yarn", "temperature"], temperature=fitted)
    recipes = {"tiny": [recipe(name, model.layout, config) for name in config.methods]}
    subject = Subject("tiny", "weights", model.config, model.layout, lambda: model)
    task = perplexity(corpus)

    def keys(windows):
        text = FitText({64: np.zeros((windows, 64), int)}, 0, "text")
        return [plan.key for plan in plan_cells([subject], recipes, [task], LENGTHS, text)]

    first, second = keys(1), keys(2)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] * 5 + [False]


def test_keys_of_a_model_do_not_depend_on_the_models_beside_it(model, corpus):
    fitted = TemperatureSettings(models="all")
    config = EvaluationConfig(methods=["none", "yarn", "temperature"], temperature=fitted)
    layouts = {"a": model.layout, "b": model.layout.with_training_length(64)}
    subjects = [Subject(n, n, model.config, layout, lambda: model) for n, layout in layouts.items()]
    recipes = {
        n: [recipe(m, layout, config) for m in config.methods] for n, layout in layouts.items()
    }
    text = FitText({64: np.zeros((1, 64), np.int64)}, corpus.end_of_text, "text")

    def keys(*subjects):
        plans = plan_cells(subjects, recipes, [perplexity(corpus)], LENGTHS, text)
        return {(plan.subject.name, plan.recipe.key, plan.length): plan.key for plan in plans}

    a, b = subjects
    assert keys(a, b) == keys(b, a) == keys(a) | keys(b)


def test_heads_chosen_on_other_text_are_another_measurement(model, corpus):
    subject = Subject("tiny", "weights", model.config, model.layout, lambda: model)
    names = ["none", "dope", "yarn+weighted_rope"]

    def keys(text=0, **choice):
        settings = ChoiceSettings(**choice)
        config = EvaluationConfig(lengths=[1, 2], methods=names, choice=settings)
        recipes = {"tiny": [recipe(name, model.layout, config) for name in names]}
        read = FitText({}, 0, "text", choice={n: np.full((2, n), text) for n in LENGTHS})
        return [
            plan.key for plan in plan_cells([subject], recipes, [perplexity(corpus)], LENGTHS, read)
        ]

    first = keys()
    for others in (keys(length=2), keys(text="standard"), keys(texts=1), keys(1)):
        assert [a == b for a, b in zip(first, others, strict=True)] == [True] * 2 + [False] * 4


def test_chosen_heads_are_noted_for_all_lengths_also_by_a_resumed_evaluation(
    model, corpus, tmp_path
):
    config = EvaluationConfig(lengths=[1, 2], dope=DopeSettings(heads=2))
    recipes = {"tiny": [recipe("dope", model.layout, config)]}
    subject = Subject("tiny", "weights", model.config, model.layout, lambda: model)
    windows = windows_with_common_ends(corpus.validation, 3, LENGTHS)
    text, store = FitText(windows, 0, "text"), Store(tmp_path)
    plans = plan_cells([subject], recipes, [perplexity(corpus)], LENGTHS, text)
    first = measure_cells(plans, text, store, 4096)
    for length, note in zip(LENGTHS, first.notes, strict=True):
        heads = dope.select(model, torch.from_numpy(windows[length]), config.dope).words
        assert note == (f"tiny, DoPE: {heads}, chosen on 3 texts of {length} tokens (validation)")
    for path in (store.path("cell", plans[0].key), *tmp_path.glob("choice-*")):
        path.unlink()
    assert measure_cells(plans, text, store, 4096).notes == first.notes


def test_a_method_that_changes_nothing_at_a_length_is_not_measured_there(evaluation, monkeypatch):
    read, lengths = Statements.read, []

    def counting(task, reading):
        lengths.append(reading.length)
        return read(task, reading)

    monkeypatch.setattr(Statements, "read", counting)
    cells, _ = evaluation(["none", "yarn", "crop"])
    assert lengths == [32, 64, 64, 64]
    assert len(cells) == 12


def test_a_resumed_evaluation_reports_choices_made_before_the_interruption(
    model, corpus, tmp_path, monkeypatch
):
    """Methods choose before their cells are measured; the resumed evaluation reads the choice."""
    config = EvaluationConfig(
        lengths=[1, 2], temperature=TemperatureSettings(grid=[0.1, 0.3], models="all")
    )
    names = ("dope", "temperature")
    recipes = {"tiny": [recipe(name, model.layout, config) for name in names]}
    windows = windows_with_common_ends(corpus.validation, 2, LENGTHS)
    text, loads = FitText(windows, corpus.end_of_text, "text"), []

    def load():
        loads.append(1)
        return model

    def go(folder):
        subject = Subject("tiny", "weights", model.config, model.layout, load)
        plans = plan_cells([subject], recipes, [perplexity(corpus)], LENGTHS, text)
        measured = measure_cells(plans, text, Store(tmp_path / folder), 4096)
        return measured.notes, measured.temperature, without_seconds(measured.cells)

    whole, get = go("whole"), Store.get
    stored = []

    def killed(store, kind, key, make):
        value = get(store, kind, key, make)
        stored.append(kind)
        if stored[-3:] == ["choice", "cell", "cell"]:  # a method has all of its cells
            raise KeyboardInterrupt
        return value

    for times in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Store, "get", killed)
            with pytest.raises(KeyboardInterrupt):
                go("killed")
        assert len(list((tmp_path / "killed").glob("cell-*"))) == 2 * times
        assert len(list((tmp_path / "killed").glob("choice-*"))) == times
    assert go("killed") == whole
    read = len(loads)
    assert go("killed") == whole
    assert len(loads) == read
    # And where the choices alone are lost.
    for path in (tmp_path / "killed").glob("choice-*"):
        path.unlink()
    assert [go("killed"), go("killed")] == [whole, whole]


@pytest.fixture
def small_parts(monkeypatch):
    """Cells of many parts: each part has one batch, of one sequence of 64 tokens or two of 32."""
    monkeypatch.setitem(PART, "cpu", 1.0)
    monkeypatch.setattr(passes, "IN_CACHE", 64 * 32)


def without_seconds(cells):
    return [replace(cell, seconds=0.0) for cell in cells]


def test_a_cell_measured_in_parts_has_the_same_digits(evaluation, monkeypatch, tmp_path):
    """Of windows and statements, whole and cropped; parts are gone once their cell is stored."""
    whole, _ = evaluation(folder="whole", tokens=64)
    monkeypatch.setitem(PART, "cpu", 1.0)
    stored, get = [], Store.get

    def noted(store, kind, key, make):
        stored.append(kind)
        return get(store, kind, key, make)

    monkeypatch.setattr(Store, "get", noted)
    cells, _ = evaluation(folder="parts", tokens=64)
    assert without_seconds(cells) == without_seconds(whole)
    assert stored.count("part") >= 2 * 4 * 3
    assert not list((tmp_path / "parts").glob("part-*"))


def test_an_interrupted_cell_resumes_with_the_parts_that_are_stored(
    evaluation, small_parts, monkeypatch, tmp_path
):
    whole, _ = evaluation(["none"], folder="whole", tokens=64)
    read, parts = Perplexity.read, []

    def counting(task, reading):
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append((reading.length, reading.piece.index))
        return read(task, reading)

    with monkeypatch.context() as patch:
        patch.setattr(Perplexity, "read", counting)
        with pytest.raises(KeyboardInterrupt):
            evaluation(["none"], folder="killed", tokens=64)
    assert parts == [(32, 0), (32, 1)]
    assert len(list((tmp_path / "killed").glob("part-*"))) == 2
    resumed = []

    def resuming(task, reading):
        resumed.append((reading.length, reading.piece.index))
        return read(task, reading)

    monkeypatch.setattr(Perplexity, "read", resuming)
    cells, _ = evaluation(["none"], folder="killed", tokens=64)
    assert without_seconds(cells) == without_seconds(whole)
    assert resumed == [(32, 2), (64, 0), (64, 1), (64, 2)]


def test_parts_of_other_batches_are_not_put_together(evaluation, small_parts, tmp_path):
    """Their sequences were read in other company; they are measured once more."""
    evaluation(["none"], folder="a", tokens=64)
    plan = evaluation.plans[-1]
    keys = [[job.key for job in cell_jobs((plan,), plan, tokens)] for tokens in (64, 65)]
    assert len({str(key) for of_one in keys for key in of_one}) == 2 * plan.parts == 10


def test_each_process_measures_only_the_parts_that_it_claimed(
    evaluation, small_parts, monkeypatch, tmp_path
):
    """Two processes share one cell: each measures the parts that it has claimed, the first one puts
    them together, and it says for how long both were idle."""
    alone, _ = evaluation(["none"], tokens=64, lengths=[64])
    shares = [Share(index, 2, "now") for index in range(2)]
    others = Claims(tmp_path / "shared", shares[0])
    jobs = [job for plan in evaluation.plans for job in cell_jobs((plan,), plan, 64)]
    claimed = jobs[::2]
    for job in claimed:
        assert others.take(job.kind, job.key)
    assert evaluation(["none"], tokens=64, lengths=[64], folder="shared", share=shares[1])[0] == []
    store = Store(tmp_path / "shared")
    assert [store.has(job.kind, job.key) for job in jobs] == [job not in claimed for job in jobs]
    cells, _ = evaluation(["none"], tokens=64, lengths=[64], folder="shared", share=shares[0])
    assert without_seconds(cells) == without_seconds(alone)
    assert {path.name[:4] for path in (tmp_path / "shared").iterdir()} == {"cell"}


@pytest.fixture
def fitted(model, corpus, tmp_path):
    """A temperature to fit and a cell of it: the two jobs, and a function that measures them."""

    def load():
        loaded.append(1)
        return model

    loaded = []
    config = EvaluationConfig(lengths=[2], temperature=TemperatureSettings(models="all"))
    recipes = {"tiny": [recipe("temperature", model.layout, config)]}
    subject = Subject("tiny", "weights", model.config, model.layout, load)
    windows = windows_with_common_ends(corpus.validation, 2, [64])
    text = FitText(windows, corpus.end_of_text, "text")
    plans = plan_cells([subject], recipes, [perplexity(corpus, [64])], [64], text)

    def go(folder, share=Share()):  # noqa: B008
        return measure_cells(plans, text, Store(tmp_path / folder), 4096, share)

    return plan_jobs(plans, 4096), go


def test_a_process_helps_with_a_fit_that_its_cells_wait_for(fitted, tmp_path, monkeypatch):
    """Another one has claimed the choice and some of the coefficients, which it stores late."""
    (choice, cell), go = fitted
    assert (choice.kind, cell.kind) == ("choice", "cell")
    alone = go("alone")
    store, others = Store(tmp_path / "shared"), Claims(tmp_path / "shared", Share(0, 2, "now"))
    others.take(choice.kind, choice.key)
    tried, late, take = [], [], Claims.take

    def noted(claims, kind, key):
        if kind == "tried":
            tried.append(key["value"])
            if key["value"] in (0.1, 0.3):
                late.append(key)
                return False
        return take(claims, kind, key)

    losses = iter([9.0, 8.0])

    def meanwhile(claims):
        if late:
            store.get("tried", late.pop(), lambda: next(losses))
        else:
            choice_value = {"notes": [], "temperature": alone.temperature["tiny"]}
            store.get("choice", choice.key, lambda: choice_value)

    monkeypatch.setattr(Claims, "take", noted)
    monkeypatch.setattr(Claims, "pause", meanwhile)
    go("shared", Share(1, 2, "now"))
    grid = TemperatureSettings().grid
    assert tried[: len(grid)] == grid
    stored = [json.loads(path.read_text()) for path in (tmp_path / "shared").glob("tried-*")]
    assert {result["key"]["value"] for result in stored} >= {*grid}
    assert {result["value"] for result in stored if result["key"]["value"] in (0.1, 0.3)} == {
        8.0,
        9.0,
    }
    assert store.has("cell", cell.key)


def test_processes_together_fit_the_temperature_of_a_single_one(fitted, tmp_path):
    """To the digit, from losses that went through the store."""
    _, go = fitted
    alone = go("alone")
    assert go("shared", Share(1, 2, "now")).cells == []
    together = go("shared", Share(0, 2, "now"))
    assert together.temperature == alone.temperature
    assert without_seconds(together.cells) == without_seconds(alone.cells)
    assert not list((tmp_path / "alone").glob("tried-*"))


def test_several_processes_begin_with_fits_and_then_the_longest_cells(
    model, corpus, tmp_path, monkeypatch
):
    config = EvaluationConfig(lengths=[1, 2], temperature=TemperatureSettings(models="all"))
    names = ("none", "temperature")
    windows = windows_with_common_ends(corpus.validation, 2, [64])
    text, plans = FitText(windows, corpus.end_of_text, "text"), []
    for name in ("a", "b"):
        subject = Subject(name, name, model.config, model.layout, lambda: model)
        recipes = {name: [recipe(key, model.layout, config) for key in names]}
        plans += plan_cells([subject], recipes, [perplexity(corpus)], LENGTHS, text)
    claimed, take = [], Claims.take

    def noted(claims, kind, key):
        if kind != "tried":
            claimed.append((kind, key.get("model"), key.get("length")))
        return take(claims, kind, key)

    monkeypatch.setattr(Claims, "take", noted)
    measure_cells(plans, text, Store(tmp_path), 4096, Share(1, 2, "now"))
    assert [kind for kind, _, _ in claimed] == ["choice"] * 2 + ["cell"] * 8
    assert [about for _, *about in claimed[2:]] == [
        [name, length] for name in ("a", "b") for length in (64, 64, 32, 32)
    ]


def test_a_cell_says_where_its_method_changes_nothing(evaluation):
    methods = ("none", "crop", "yarn", "dynamic_ntk", "window", "drop")
    cells, _ = evaluation(methods, lengths=[16, 32, 64])
    unchanged = {
        method: [c.length for c in cells if c.method == method and c.unchanged and c.scores]
        for method in methods
    }
    within = [16, 32]
    assert unchanged == dict.fromkeys(methods, within) | {"none": [], "drop": []}


@pytest.mark.parametrize(
    ("name", "unchanged"),
    [
        ("temperature", [16, 32]),
        ("yarn+temperature", [16, 32]),
        ("longrope", [16, 32]),
        ("drop+temperature", []),
        ("dope", []),
    ],
)
def test_lengths_that_a_fitted_method_leaves_alone_are_known_before_the_fit(model, name, unchanged):
    config = EvaluationConfig(
        lengths=[0.5, 1, 2], methods=[name], temperature=TemperatureSettings(models="all")
    )
    made = recipe(name, model.layout, config)
    subject = Subject("tiny", "weights", model.config, model.layout, lambda: model)
    plans = [PlannedCell(subject, made, None, length, {}) for length in (16, 32, 64)]
    assert [plan.length for plan in plans if plan.is_unchanged] == unchanged
