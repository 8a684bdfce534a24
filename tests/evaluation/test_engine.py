"""The engine: same trials for all, finished cells kept, models left as they were."""

from __future__ import annotations

import copy
import gc
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from trainer.config import (
    ChoiceSettings,
    DopeSettings,
    EvaluationConfig,
    NeedleTaskSettings,
    TemperatureSettings,
)
from trainer.data.corpus import held_out_windows
from trainer.evaluation import dope, engine
from trainer.evaluation import perplexity as losses
from trainer.evaluation.engine import Setup, measure
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.perplexity import perplexity, token_losses
from trainer.evaluation.results import TRIAL_COLUMNS, rows_of
from trainer.evaluation.statements import statements
from trainer.evaluation.store import Store, fingerprint
from trainer.evaluation.task import Task, TaskInputs
from trainer.evaluation.tasks import make_tasks

LENGTHS = [32, 64]


class Saved(SimpleNamespace):
    """Attributes of a saved model; every one is another model."""

    __hash__ = object.__hash__


def saved(name, model, load=None, layout=None):
    """A model as the engine sees it; ``load`` reads it."""
    layout, load = layout or model.layout, load or (lambda: model)
    return Saved(
        name=name,
        fingerprint=name,
        config=model.config,
        layout=layout,
        training_length=layout.training_length,
        for_inference=lambda device, dtype: load(),
    )


def rows(trials):
    """Rows without seconds."""
    return rows_of(trials, "run", 0).drop(columns="seconds").fillna(-1.0).to_dict("records")


def fit_text(corpus, count=2):
    return FitText(HeldOut(corpus, corpus.validation, (), None), count)


def reported(corpus):
    return HeldOut(corpus, corpus.test, (), 1.0)


def perplexities(corpus):
    return perplexity(TaskInputs(reported(corpus), LENGTHS, 32, 99, 3))


@pytest.fixture
def evaluation(model, corpus, tmp_path):
    """A function that evaluates into one store; returns trials and how often weights were read."""
    loads = []

    def load():
        loads.append(1)
        return model

    def go(methods=("none", "crop", "yarn"), trials=5, folder=".", tokens=4096):
        config = EvaluationConfig(methods=list(methods), batch_tokens=tokens)
        needles = NeedleTaskSettings(trials=trials, needles=2, seed=1)
        inputs = TaskInputs(reported(corpus), LENGTHS, 32, 99, needles)
        tasks = perplexities(corpus) + statements(inputs)
        text, store = fit_text(corpus), Store(tmp_path / folder)
        trials, _ = evaluated(model, config, text, tasks, store, load)
        return trials, len(loads)

    return go


def evaluated(model, config, text, tasks, store, load=None):
    """Trials of a configuration's methods for one model, and notes."""
    methods = {"tiny": config.methods}
    setup = Setup(config, text, store, "cpu", "fp32")
    return measure([saved("tiny", model, load)], methods, tasks, setup)


def keys_of(folder):
    """Keys of the cells in a store."""
    return {path.name for path in folder.glob("cell-*")}


def test_there_is_a_cell_for_everything_and_the_model_stays_as_it_was(evaluation, model):
    before = model.layout
    measured, _ = evaluation()
    places = [(row["method"], row["length"], row["task"]) for row in rows(measured)]
    assert list(dict.fromkeys(places)) == [
        (method, length, task)
        for method in ("none", "crop", "yarn")
        for length in LENGTHS
        for task in ("perplexity", "statements")
    ]
    assert model.layout == before
    trials = measured[measured.length == 32]
    unchanged, rescaled = (trials.value[trials.method == m].tolist() for m in ("none", "yarn"))
    assert unchanged == rescaled


@torch.no_grad()
def test_cropped_losses_are_those_of_the_tokens_in_reach(evaluation, model, corpus):
    """At 64 tokens, 32 of them read: the last 16 tokens behind the 16 before, those before them
    behind the 16 before these."""
    measured, _ = evaluation(["crop"])
    (got,) = [r["value"] for r in rows(measured) if r["metric"] == "loss" and r["length"] == 64]
    losses = []
    for window in held_out_windows(corpus.test, 3, 64):
        for first in (16, 32):
            ids = torch.tensor([corpus.end_of_text, *window[first : first + 32]])
            logits = model(ids[None, :-1])[0].double()
            losses.append(F.cross_entropy(logits, ids[1:], reduction="none")[16:])
    assert got == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_stored_cells_are_not_measured_again(evaluation):
    first, loads = evaluation(["none"])
    again, still = evaluation(["none"])
    assert (rows(again), still) == (rows(first), loads)
    more, once_more = evaluation(["none", "pi"])
    assert rows(more)[: len(rows(first))] == rows(first)
    assert once_more == loads + 1
    # Other trials are another measurement.
    fewer, _ = evaluation(["none"], trials=4)
    assert (fewer.task == "statements").sum() == 4 * len(LENGTHS)


@pytest.mark.slow
def test_a_model_is_freed_before_the_next_one_is_read(tiny_decoder, corpus, tmp_path):
    read, alive = [], []

    def load():
        gc.collect()
        alive.append(sum(model() is not None for model in read))
        model = tiny_decoder(model={"vocab_size": corpus.tokenizer.get_vocab_size()})
        read.append(weakref.ref(model))
        return model

    shape = load()
    models = [saved(name, shape, load, shape.layout) for name in "ab"]
    config, methods = EvaluationConfig(), {name: ["none"] for name in "ab"}
    del shape
    tasks, text = perplexities(corpus), fit_text(corpus)
    measure(models, methods, tasks, Setup(config, text, Store(tmp_path), "cpu", "fp32"))
    assert alive == [0, 0, 0]


def test_trials_have_the_values_of_their_batches_and_the_seconds_of_all(tmp_path):
    """Whichever batch is stored first; what a task does not say has a default."""
    store, model = Store(tmp_path), SimpleNamespace(name="tiny", training_length=32)
    task = Task({"a": "A", "b": "B"}, 48, "", pd.DataFrame({"label": ["x", "y", ""]}), None)
    batches = {1: (2.25, [(2, "b", 0.5), (2, "a", 1.0)]), 0: (1.5, [(0, "a", 0.25), (1, "a", 0.5)])}
    batches[0][1].extend([(0, "b", 0.75), (1, "b", 0.0)])
    for number, (seconds, values) in batches.items():
        store.add("key", {"batch": number, "batches": 2, "values": values, "seconds": seconds})
    trials = engine._trials(engine.Cell(model, "pi", None, task, "key"), store)
    assert [*trials.columns] == [*TRIAL_COLUMNS, "seconds"]
    assert trials.task.tolist() == ["a"] * 3 + ["b"] * 3
    assert trials.value.tolist() == [0.25, 0.5, 1.0, 0.75, 0.0, 0.5]
    assert trials.text.tolist() == [0, 1, 2] * 2
    assert trials.label.tolist() == ["x", "y", ""] * 2
    assert trials.depth.isna().all()
    same = trials[["model", "method", "metric", "length", "factor", "seconds"]]
    assert same.drop_duplicates().values.tolist() == [["tiny", "pi", "score", 48, 1.5, 3.75]]


def test_a_batch_that_two_processes_read_counts_once(evaluation, tmp_path):
    """An evaluation may be started twice; values and seconds are those of one."""
    first, _ = evaluation(["none"])
    store = Store(tmp_path)
    for key in keys_of(tmp_path):
        for value in store.values(key):
            store.add(key, value | {"seconds": 1e6})
    again, _ = evaluation(["none"])
    assert again.value.tolist() == first.value.tolist()
    assert again.seconds.unique().tolist() == [1e6]  # each task has one batch


def test_a_batch_that_was_read_twice_is_not_another_one(evaluation, tmp_path):
    """Two evaluations of the same were stopped before the last batch."""
    whole, _ = evaluation(["none"], tokens=64)
    store = Store(tmp_path)
    for key in keys_of(tmp_path):
        first, *others = store.values(key)
        assert others
        shutil.rmtree(tmp_path / key)
        for _ in range(1 + len(others)):
            store.add(key, first)
    again, _ = evaluation(["none"], tokens=64)
    assert again.value.tolist() == whole.value.tolist()


def test_batches_of_trials_that_were_cut_otherwise_are_not_those_of_a_cell(evaluation, tmp_path):
    """Another version of a task was stopped before its last batch."""
    whole, _ = evaluation(["none"], tokens=64)
    store = Store(tmp_path)
    for key in keys_of(tmp_path):
        number, other = len(store.values(key)), {"values": [], "seconds": 1e6}
        shutil.rmtree(tmp_path / key)
        for batch in range(number):
            store.add(key, other | {"batch": batch, "batches": number + 1})
    again, _ = evaluation(["none"], tokens=64)
    assert again.value.tolist() == whole.value.tolist()
    assert (again.seconds < 1e6).all()


def test_a_key_has_all_that_changes_digits():
    def key(device="cpu", dtype="fp32", batch_tokens=64, model="a"):
        config = EvaluationConfig(batch_tokens=batch_tokens)
        inputs = Setup(config, None, None, device, dtype).inputs(SimpleNamespace(fingerprint=model))
        return fingerprint(inputs)

    others = ({"dtype": "bf16"}, {"device": "cuda"}, {"batch_tokens": 65}, {"model": "b"})
    keys = {key(), key("cuda", "bf16"), *(key(**other) for other in others)}
    assert len(keys) == 2 + len(others)


def test_fits_and_cells_of_models_and_methods_have_keys_of_their_own(model, corpus):
    """Cropping and cropping after nothing, which read the same tokens with the same layout."""
    setup = Setup(EvaluationConfig(), fit_text(corpus), None, "cpu", "fp32")
    tasks = perplexities(corpus)
    fits, cells = [], []
    for each in (saved("a", model), saved("b", model)):
        for fit in engine._fits(each, ["none", "crop", "crop+none"], tasks, setup):
            fits.append(fit.key)
            layouts = [model.layout] * len(fit.lengths)
            cells += [cell.key for cell in engine._cells(each, fit, layouts, tasks, setup)]
    assert (len(fits), len({*fits})) == (12, 12)
    assert (len(cells), len({*cells})) == (12, 8)


def test_a_fit_on_other_text_is_another_measurement(model, corpus, tmp_path):
    fitted = TemperatureSettings(models="all")
    methods = ["none", "yarn", "temperature"]
    config = EvaluationConfig(methods=methods, temperature=fitted)

    for windows, cells in ((1, 5), (8, 7)):
        text = fit_text(corpus, windows)
        evaluated(model, config, text, perplexities(corpus), Store(tmp_path))
        assert len(keys_of(tmp_path)) == cells


def test_a_choice_that_serves_all_lengths_is_noted_once(model, corpus, tmp_path):
    config = EvaluationConfig(lengths=[1, 2], methods=["dope"], choice=ChoiceSettings(length=2))
    *_, notes = evaluated(model, config, fit_text(corpus), perplexities(corpus), Store(tmp_path))
    assert len(notes) == 1


def test_chosen_heads_are_noted_for_all_lengths(model, corpus, tmp_path):
    config = EvaluationConfig(lengths=[1, 2], methods=["dope"], dope=DopeSettings(heads=2))
    text = fit_text(corpus, 3)
    *_, notes = evaluated(model, config, text, perplexities(corpus), Store(tmp_path))
    for length, note in zip(LENGTHS, notes, strict=True):
        chosen = dope.select(
            model, torch.from_numpy(text.windows(length)), config.dope, model.layout
        )
        heads = ", ".join(f"L{layer}H{head}" for layer, head in chosen)
        assert note == (f"tiny, DoPE: {heads}, chosen on 3 texts of {length} tokens (validation)")


@pytest.mark.parametrize("more", [[1, 2, 3], [2, 2.5], [1, 2]])
def test_adding_a_length_measures_that_length_alone(model, corpus, tmp_path, more):
    """Cells and fits of a length have the same names beside any other lengths."""

    def keys(lengths, folder):
        config = EvaluationConfig(
            lengths=lengths,
            methods=["none", "yarn", "dope", "temperature"],
            tasks=["perplexity", "statements", "standard", "multi_key"],
            temperature=TemperatureSettings(coefficient=0.4, models="all"),
            needles=NeedleTaskSettings(trials=2, depths=(0.0, 1.0), needles=2, new_tokens=1),
            windows=3,
        )
        tokens = [round(300 * length) for length in lengths]
        tasks, _ = make_tasks(reported(corpus), config, tokens, 300)
        wanted = [task for task in tasks if task.length == 600]
        text = FitText(reported(corpus), 2)
        evaluated(model, config, text, wanted, Store(tmp_path / folder))
        return {path.name for path in (tmp_path / folder).iterdir()}

    alone, beside = keys([2], "alone"), keys(more, "beside")
    assert {key for key in alone if key.startswith("cell")} <= beside
    assert len(alone - beside) == 1  # the temperature's, which may depend on all lengths


def test_a_resumed_evaluation_reports_choices_made_before_the_interruption(
    model, corpus, tmp_path, monkeypatch
):
    """Methods choose before their cells are measured; the resumed evaluation reads the choice."""
    temperature = TemperatureSettings(models="all")
    config = EvaluationConfig(
        lengths=[1, 2], methods=["dope", "temperature"], temperature=temperature
    )
    text = fit_text(corpus)

    def go(folder):
        store = Store(tmp_path / folder)
        trials, notes = evaluated(model, config, text, perplexities(corpus), store)
        return notes, rows(trials)

    whole = go("whole")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_measure", killed)
        with pytest.raises(KeyboardInterrupt):
            go("killed")
    assert len(list((tmp_path / "killed").glob("fit-*"))) == 3  # heads at each length, c for both
    assert go("killed") == whole
    for path in (tmp_path / "killed").glob("fit-*"):
        shutil.rmtree(path)
    monkeypatch.setattr(engine, "_measure", killed)
    assert go("killed") == whole


def test_an_interrupted_cell_resumes_with_the_batches_that_are_stored(
    evaluation, monkeypatch, tmp_path
):
    """A batch has one sequence of 64 tokens or two of 32."""
    whole, _ = evaluation(["none"], folder="whole", tokens=64)
    read, limit = [], 2

    def counting(model, windows, *rest, **options):
        if len(read) == limit:
            raise KeyboardInterrupt
        read.append(windows.shape)
        return token_losses(model, windows, *rest, **options)

    monkeypatch.setattr(losses, "token_losses", counting)
    with pytest.raises(KeyboardInterrupt):
        evaluation(["none"], folder="killed", tokens=64)
    assert read == [(2, 32), (1, 32)]
    # The second is cut short, as if the power had gone.
    files = (tmp_path / "killed").glob("cell-*/0.txt")
    (path,) = (path for path in files if "perplexity" in path.read_text())
    path.write_text(path.read_text()[:-9])
    read.clear()

    limit = None
    cells, _ = evaluation(["none"], folder="killed", tokens=64)
    assert rows(cells) == rows(whole)
    assert read == [(1, 32), (1, 64), (1, 64), (1, 64)]


def test_values_of_other_batches_are_not_put_together(evaluation, tmp_path):
    """Their sequences were read in other company; they are measured once more."""
    for tokens, cells in ((64, 4), (65, 8)):
        evaluation(["none"], folder="a", tokens=tokens)
        assert len(keys_of(tmp_path / "a")) == cells


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_share_fits_and_batches_and_each_can_put_cells_together(
    model, corpus, tmp_path, ranks
):
    config = EvaluationConfig(
        lengths=[1, 2],
        methods=["none", "temperature", "yarn+temperature"],
        temperature=TemperatureSettings(models="all"),
        batch_tokens=64,
    )
    text = fit_text(corpus)
    load = partial(copy.deepcopy, model)  # each process has its own
    go = partial(evaluated, model, config, text, perplexities(corpus), load=load)
    alone, notes = go(Store(tmp_path / "alone"))
    with ThreadPoolExecutor(ranks) as pool:
        stores = [Store(tmp_path / "shared", rank, ranks) for rank in range(ranks)]
        for together, shared_notes in pool.map(go, stores):
            assert shared_notes == notes
            assert rows(together) == rows(alone)
    assert len({path.name for path in (tmp_path / "shared").glob("cell-*/*")}) == ranks


def test_no_batch_of_equal_cells_is_read_by_two_processes(model, corpus, tmp_path, monkeypatch):
    """Methods that change nothing at a length share their cell, and so its batches."""
    shares = {}

    def measured(cell, number, model, setup):
        shares.setdefault(cell.key, []).append(number)
        return ()

    monkeypatch.setattr(engine, "_measure", measured)
    monkeypatch.setattr(engine, "_trials", lambda cell, store: pd.DataFrame())
    config = EvaluationConfig(methods=["none", "window", "pi", "yarn"])
    evaluated(model, config, fit_text(corpus), perplexities(corpus)[:1], Store(tmp_path))
    assert sorted(map(len, shares.values())) == [1, 3]
    assert sorted({*numbers} for numbers in shares.values()) == [{0}, {1}]
