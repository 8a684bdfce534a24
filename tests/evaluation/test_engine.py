"""The engine: same trials for all, finished cells kept, models left as they were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.data.needles import NeedleVocabulary
from trainer.evaluation import dope
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.engine import measure_cells
from trainer.evaluation.fitting import FitText
from trainer.evaluation.loss import losses_by_position, windows_with_common_ends
from trainer.evaluation.measurements import Perplexity, Statements
from trainer.evaluation.methods import recipe
from trainer.evaluation.plan import Subject, plan_cells
from trainer.evaluation.settings import ChoiceSettings, DopeSettings, TemperatureSettings
from trainer.evaluation.sharing import Share
from trainer.evaluation.store import Store

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

    def go(methods=("none", "crop", "yarn"), trials=5, lengths=LENGTHS, at=".", share=Share()):  # noqa: B008
        config = EvaluationConfig(methods=list(methods))
        end = corpus.end_of_text
        subject = Subject("tiny", "weights", model.config, model.layout, load)
        recipes = {"tiny": [recipe(name, model.layout, config) for name in methods]}
        vocabulary = NeedleVocabulary.of(corpus.tokenizer)
        tasks = [
            perplexity(corpus, lengths),
            Statements.of(corpus.test, lengths, vocabulary, end, trials, 2, 1),
        ]
        text = FitText({}, end, "text")
        plans = plan_cells([subject], recipes, tasks, lengths, text)
        measured = measure_cells(plans, text, Store(tmp_path / at), 4096, share)
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


def test_a_choice_is_kept_where_the_evaluation_ends_between_the_last_cell_and_it(
    model, corpus, tmp_path, monkeypatch
):
    """Ended there, the next one has all cells; it chooses again, and the one after reads that."""
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

    def killed(store, kind, key, make):
        if kind == "choice":
            raise KeyboardInterrupt
        return get(store, kind, key, make)

    for times in (1, 2):  # after the cells of the first method, and of the second
        with monkeypatch.context() as patch:
            patch.setattr(Store, "get", killed)
            with pytest.raises(KeyboardInterrupt):
                go("killed")
        assert len(list((tmp_path / "killed").glob("cell-*"))) == 2
        if times == 1:
            assert not list((tmp_path / "killed").glob("choice-*"))
    assert go("killed") == whole
    read = len(loads)
    assert go("killed") == whole
    assert len(loads) == read
    # And where the choices alone are lost.
    for path in (tmp_path / "killed").glob("choice-*"):
        path.unlink()
    assert [go("killed"), go("killed")] == [whole, whole]


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_processes_share_the_methods_out_and_the_first_has_all_cells(evaluation, tmp_path, order):
    """However late one begins, when others have stored theirs, they agree on who does what. The
    first process comes last here, so that it does not wait."""
    alone, _ = evaluation()
    stored = []
    for index in order[:2]:
        assert evaluation(at="shared", share=Share(index, 3))[0] == []
        stored.append(len(list((tmp_path / "shared").glob("cell-*"))))
    first_cells = stored[0], stored[1] - stored[0]
    assert min(first_cells) > 0  # the second did not find its part taken for another's
    cells, _ = evaluation(at="shared", share=Share(0, 3))
    assert [replace(cell, seconds=0.0) for cell in cells] == [
        replace(cell, seconds=0.0) for cell in alone
    ]


def test_who_does_what_does_not_depend_on_what_is_finished(evaluation, monkeypatch):
    """Else a process that begins late could leave its part to one that has left already."""
    seen, of = [], Share.of

    def noted(share, pieces, work):
        seen.append([(plan.recipe.key, plan.length) for group in pieces for plan in group])
        return of(share, pieces, work)

    monkeypatch.setattr(Share, "of", noted)
    for index in (2, 1, 0):
        evaluation(at="shared", share=Share(index, 3))
    assert seen[0] == seen[1] == seen[2]
