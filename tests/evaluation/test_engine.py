"""The engine: same trials for all, finished cells kept, models left as they were."""

from __future__ import annotations

import gc
import json
import logging
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.data.needles import NeedleVocabulary
from trainer.evaluation import dope, engine, passes
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.engine import measure_cells, say_duration
from trainer.evaluation.fitting import FitText
from trainer.evaluation.loss import losses_by_position, windows_with_common_ends
from trainer.evaluation.measurements import Perplexity, Statements
from trainer.evaluation.method_config import ChoiceSettings, DopeSettings, TemperatureSettings
from trainer.evaluation.methods import recipe
from trainer.evaluation.plan import PART, Plan, Subject, cell_jobs, plan_cells, plan_jobs
from trainer.evaluation.store import Claims, Share, Store
from trainer.model.flops import forward_flops

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
        at=".",
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
            Statements.of(corpus.test, lengths, vocabulary, end, trials, 2, 1),
        ]
        text = FitText({}, end, "text")
        plans = plan_cells([subject], recipes, tasks, lengths, text)
        go.plans = plans
        measured = measure_cells(plans, text, Store(tmp_path / at), tokens, share)
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
        one, other = by_key["none", 32, task], by_key["yarn", 32, task]
        assert (one.scores, one.losses) == (other.scores, other.losses)


def test_losses_are_those_of_the_windows(evaluation, model, corpus):
    cells, _ = evaluation(["none"])
    cell = next(c for c in cells if c.task == "perplexity" and c.length == 64)
    windows = perplexity(corpus).windows[64]
    expected = losses_by_position(model, windows, corpus.end_of_text, 64)
    assert cell.edges == (0, 16, 32, 48, 64)
    assert cell.last_loss == pytest.approx(expected[32:].mean().item(), abs=1e-9)
    np.testing.assert_allclose(cell.losses, expected.view(4, 16).mean(dim=1), atol=1e-9)


@torch.no_grad()
def test_cropped_losses_are_those_of_what_is_in_reach(evaluation, model, corpus):
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


def test_what_was_measured_is_not_measured_again(evaluation):
    first, loads = evaluation(["none"])
    again, still = evaluation(["none"])
    assert (again, still) == (first, loads)
    more, once_more = evaluation(["none", "pi"])
    assert more[: len(first)] == first
    assert once_more == loads + 1
    # Other trials are another measurement.
    assert len(evaluation(["none"], trials=4)[0][1].scores) == 4


def test_windows_that_end_elsewhere_are_another_measurement(evaluation):
    short, long = (evaluation(["none"], lengths=lengths)[0] for lengths in ([32], LENGTHS))
    assert short[0].last_loss != long[0].last_loss


def test_a_model_is_freed_before_the_next_one_is_read(tiny_decoder, corpus, tmp_path):
    read, kept = [], []

    def load():
        gc.collect()
        kept.append(sum(model() is not None for model in read))
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
    assert kept == [0, 0, 0]


def test_what_is_chosen_on_other_text_is_another_measurement(model, corpus):
    fitted = TemperatureSettings(models="all")
    config = EvaluationConfig(methods=["none", "yarn", "temperature"], temperature=fitted)
    recipes = {"tiny": [recipe(name, model.layout, config) for name in config.methods]}
    subject = Subject("tiny", "weights", model.config, model.layout, lambda: model)
    task = perplexity(corpus)

    def keys(windows):
        text = FitText({64: np.zeros((windows, 64), int)}, 0, "text")
        return [plan.key for plan in plan_cells([subject], recipes, [task], LENGTHS, text)]

    one, other = keys(1), keys(2)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 5 + [False]


def test_heads_that_are_chosen_on_other_text_are_another_measurement(model, corpus):
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


def test_chosen_heads_are_told_for_all_lengths_also_by_an_evaluation_that_goes_on(
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
    measure, lengths = Statements.measure, []

    def counting(task, model, length, *rest):
        lengths.append(length)
        return measure(task, model, length, *rest)

    monkeypatch.setattr(Statements, "measure", counting)
    cells, _ = evaluation(["none", "yarn", "crop"])
    assert lengths == [32, 64, 64, 64]
    assert len(cells) == 12


def test_an_interrupted_evaluation_goes_on(evaluation, monkeypatch, tmp_path):
    measure = Statements.measure

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Statements, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluation(["none"])
    assert len(list(tmp_path.glob("cell-*.json"))) == 1
    monkeypatch.setattr(Statements, "measure", measure)
    cells, _ = evaluation(["none"])
    assert len(cells) == 4


def test_what_was_fitted_is_told_again_when_nothing_is_left_to_measure(
    tiny_decoder, corpus, tmp_path
):
    size = {"vocab_size": corpus.tokenizer.get_vocab_size()}
    model = tiny_decoder(model=size, layers=["nope"])
    config = EvaluationConfig(lengths=[1, 2], temperature=TemperatureSettings(grid=[0.3]))
    recipes = {"tiny": [recipe(name, model.layout, config) for name in ("none", "temperature")]}
    text = FitText({64: windows_with_common_ends(corpus.validation, 2, [64])[64]}, 0, "text")

    def go(load):
        subject = Subject("tiny", "weights", model.config, model.layout, load)
        plans = plan_cells([subject], recipes, [perplexity(corpus)], LENGTHS, text)
        return measure_cells(plans, text, Store(tmp_path), 4096)

    first = go(lambda: model)
    assert first.temperature["tiny"]["coefficient"] == 0.3
    assert first.notes == ["tiny, temperature: logits times 1 + 0.3 ln s, as given"]
    assert go(lambda: pytest.fail("read again")) == first


def test_what_was_chosen_before_an_interruption_is_told_by_the_resumed_evaluation(
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

    def go(at):
        subject = Subject("tiny", "weights", model.config, model.layout, load)
        plans = plan_cells([subject], recipes, [perplexity(corpus)], LENGTHS, text)
        found = measure_cells(plans, text, Store(tmp_path / at), 4096)
        return found.notes, found.temperature, [replace(cell, seconds=0.0) for cell in found.cells]

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
    whole, _ = evaluation(at="whole", tokens=64)
    monkeypatch.setitem(PART, "cpu", 1.0)
    stored, get = [], Store.get

    def noted(store, kind, key, make):
        stored.append(kind)
        return get(store, kind, key, make)

    monkeypatch.setattr(Store, "get", noted)
    cells, _ = evaluation(at="parts", tokens=64)
    assert without_seconds(cells) == without_seconds(whole)
    assert stored.count("part") >= 2 * 4 * 3
    assert not list((tmp_path / "parts").glob("part-*"))


def test_an_interrupted_cell_resumes_with_the_parts_that_are_stored(
    evaluation, small_parts, monkeypatch, tmp_path
):
    whole, _ = evaluation(["none"], at="whole", tokens=64)
    read, parts = Perplexity.read, []

    def counting(task, reading):
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append((reading.length, reading.piece.index))
        return read(task, reading)

    with monkeypatch.context() as patch:
        patch.setattr(Perplexity, "read", counting)
        with pytest.raises(KeyboardInterrupt):
            evaluation(["none"], at="killed", tokens=64)
    assert parts == [(32, 0), (32, 1)]
    assert len(list((tmp_path / "killed").glob("part-*"))) == 2
    resumed = []

    def resuming(task, reading):
        resumed.append((reading.length, reading.piece.index))
        return read(task, reading)

    monkeypatch.setattr(Perplexity, "read", resuming)
    cells, _ = evaluation(["none"], at="killed", tokens=64)
    assert without_seconds(cells) == without_seconds(whole)
    assert resumed == [(32, 2), (64, 0), (64, 1), (64, 2)]


def test_parts_of_other_batches_are_not_put_together(evaluation, small_parts, tmp_path):
    """Their sequences were read in other company; they are measured once more."""
    evaluation(["none"], at="a", tokens=64)
    plan = evaluation.plans[-1]
    keys = [[job.key for job in cell_jobs((plan,), plan, tokens)] for tokens in (64, 65)]
    assert len({str(key) for of_one in keys for key in of_one}) == 2 * plan.parts == 10


def test_what_another_process_has_claimed_is_left_to_it(
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
    assert evaluation(["none"], tokens=64, lengths=[64], at="shared", share=shares[1])[0] == []
    store = Store(tmp_path / "shared")
    assert [store.has(job.kind, job.key) for job in jobs] == [job not in claimed for job in jobs]
    cells, _ = evaluation(["none"], tokens=64, lengths=[64], at="shared", share=shares[0])
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

    def go(at, share=Share()):  # noqa: B008
        return measure_cells(plans, text, Store(tmp_path / at), 4096, share)

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
            found = {"notes": [], "temperature": alone.temperature["tiny"]}
            store.get("choice", choice.key, lambda: found)

    monkeypatch.setattr(Claims, "take", noted)
    monkeypatch.setattr(Claims, "pause", meanwhile)
    go("shared", Share(1, 2, "now"))
    grid = TemperatureSettings().grid
    assert tried[: len(grid)] == grid
    kept = [json.loads(path.read_text()) for path in (tmp_path / "shared").glob("tried-*")]
    assert {one["key"]["value"] for one in kept} >= {*grid}
    assert {one["value"] for one in kept if one["key"]["value"] in (0.1, 0.3)} == {8.0, 9.0}
    assert store.has("cell", cell.key)


def test_processes_fit_together_what_one_fits_alone(fitted, tmp_path):
    """To the digit, from losses that went through the store."""
    _, go = fitted
    alone = go("alone")
    assert go("shared", Share(1, 2, "now")).cells == []
    together = go("shared", Share(0, 2, "now"))
    assert together.temperature == alone.temperature
    assert without_seconds(together.cells) == without_seconds(alone.cells)
    assert not list((tmp_path / "alone").glob("tried-*"))


def test_several_processes_begin_with_what_others_wait_for_and_then_with_the_longest(
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


@pytest.mark.parametrize(("passes", "named"), [(90, False), (91, True)])
def test_a_shorter_command_is_named_from_three_minutes_on(
    tiny_decoder, monkeypatch, caplog, passes, named
):
    model, clock = tiny_decoder().eval(), iter(range(0, 1000, 2))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    caplog.set_level(logging.INFO, logger=engine.__name__)
    work = 3 * forward_flops(model.config, model.layout, 16)
    say_duration(model, [512, 16], passes * work, 48, "trainer evaluate evaluation.quick=true")
    said = [record.getMessage() for record in caplog.records][1:]
    assert len(said) == named
    assert all(one.endswith(": trainer evaluate evaluation.quick=true") for one in said)


@pytest.mark.parametrize(("passes", "said"), [(59, "118 s"), (60, "2 min"), (91, "3 min")])
def test_the_duration_follows_from_a_pass_that_takes_two_seconds(
    tiny_decoder, monkeypatch, caplog, passes, said
):
    model, clock = tiny_decoder().eval(), iter(range(0, 1000, 2))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    caplog.set_level(logging.INFO, logger=engine.__name__)
    # Three sequences of 16 tokens at once; 512 tokens would then take longer than an estimate may.
    work = 3 * forward_flops(model.config, model.layout, 16)
    say_duration(model, [512, 16], passes * work, batch_tokens=48)
    assert [record.getMessage() for record in caplog.records] == [f"About {said} in all"]
    assert next(clock) == 4  # one pass was timed, from 0 to 2


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
def test_what_a_fitted_method_leaves_alone_is_known_without_its_fit(model, name, unchanged):
    config = EvaluationConfig(
        lengths=[0.5, 1, 2], methods=[name], temperature=TemperatureSettings(models="all")
    )
    made = recipe(name, model.layout, config)
    subject = Subject("tiny", "weights", model.config, model.layout, lambda: model)
    plans = [Plan(subject, made, None, length, {}) for length in (16, 32, 64)]
    assert [plan.length for plan in plans if plan.is_unchanged] == unchanged
