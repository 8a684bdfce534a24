"""What happens exactly at a boundary, just before it and just after it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from tests.data.conftest import held_out
from tests.evaluation.conftest import fit_text
from trainer.analysis.target import NotApplicableError, Target
from trainer.common.errors import UserError
from trainer.common.updates import check_updates, is_share
from trainer.config import EvaluationConfig, TemperatureSettings
from trainer.data.corpus import held_out_windows
from trainer.data.prepared import cut, document_hash, split_of
from trainer.evaluation.longbench import label
from trainer.evaluation.many_shot import filling
from trainer.evaluation.methods import layouts_for
from trainer.evaluation.scoring import Prompt, check_room
from trainer.evaluation.statistics import Estimate
from trainer.evaluation.task import _cropped
from trainer.model.config import ModelConfig, check_vocabulary
from trainer.positional.encodings import rope
from trainer.positional.layout import uniform
from trainer.positional.rescaling import longrope
from trainer.positional.spectrum import Temperature
from trainer.report.claims import at, exceeds, score_difference
from trainer.report.tables import perplexity
from trainer.runs.parsing import parse

C = 32


def refuses(function, *arguments):
    """Whether the call is refused."""
    try:
        function(*arguments)
    except (UserError, ValueError):
        return True
    return False


# Claims


def test_a_difference_is_judged_by_both_ends_of_its_interval():
    for low, high, threshold, judged in (
        (0.0, 0.2, 0.0, None),
        (0.01, 0.2, 0.0, True),
        (-0.2, 0.0, 0.0, False),
        (-0.2, 0.01, 0.0, None),
        (0.05, 0.2, 0.05, None),
        (-0.2, 0.05, 0.05, False),
    ):
        assert exceeds(Estimate(0.0, low, high), threshold) is judged


@pytest.mark.parametrize("times", [1, 2, 0.5])
def test_a_difference_of_scores_has_the_interval_of_k_times_the_other(times):
    p = SimpleNamespace(value=0.8, low=0.7, high=0.85)
    q = SimpleNamespace(value=0.3, low=0.25, high=0.4)
    mean, low, high = score_difference(p, q, times)
    assert mean == pytest.approx(0.8 - times * 0.3)
    assert mean - low == pytest.approx(math.hypot(0.1, times * 0.1))
    assert high - mean == pytest.approx(math.hypot(0.05, times * 0.05))


def test_lengths_of_claims():
    rows = pd.DataFrame({"factor": [0.5, 1.0, 2.0, 3.99, 4.0, 8.0]})
    assert at(rows, "trained").factor.tolist() == [1.0]
    assert at(rows, "far").factor.tolist() == [4.0, 8.0]
    assert at(rows, "longest").factor.tolist() == [8.0]
    assert at(rows[:2], "longest").empty


def test_a_perplexity_that_overflows_is_infinite():
    assert [math.isinf(perplexity(loss)) for loss in (699.0, 700.0, 701.0)] == [False, True, True]


# Lengths


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "dynamic_ntk_alpha", "temperature"])
def test_methods_change_nothing_up_to_the_training_length(method, tiny_decoder):
    """At a length of the evaluation, and in sequences of it."""
    model, text = tiny_decoder(training_length=C), fit_text(range(1, 49), count=1)
    for length in (C - 1, C, C + 1):
        factor = length / C
        fixed = TemperatureSettings(coefficient=0.5, models="all")
        config = EvaluationConfig(lengths=[factor], temperature=fixed)
        (layout,), _ = layouts_for(method, model.layout, [factor], config, lambda: model, text)
        assert (numbers(layout, length) != numbers(model.layout, length)) is (length > C)


def numbers(layout, length):
    spectra = layout.at(length).spectra
    return [(s.inv_freq, s.rotary_scale, s.temperature.scale) for s in spectra]


@pytest.mark.parametrize("window", [None, C - 1, C, C + 1])
def test_extensions_change_the_layers_that_see_more_than_the_training_length(window):
    layout = uniform(rope(8), layers=2, heads=1, training_length=C, window=window)
    assert layout.chosen(None) == ([0, 1] if window in (None, C + 1) else [])
    assert layout.chosen("all") == [0, 1]


@pytest.mark.parametrize("reference", [16, 32])
def test_a_temperature_in_steps_grows_at_multiples_of_its_reference(reference):
    growing = Temperature(0.5, 1.0, 1.0, "sequence", reference, steps=True)
    for n in (1, reference - 1, reference, reference + 1, 2 * reference - 1, 2 * reference):
        factor = 1 + 0.5 * math.log(1 + n // reference)
        assert growing.at(n, C).scale == pytest.approx(factor)
    smooth = replace(growing, steps=False)
    scales = [smooth.at(reference + n, C).scale for n in (-1, 0, 1)]
    assert scales == pytest.approx([1.0, 1.0, 1 + 0.5 * math.log((reference + 1) / reference)])


def test_longrope_switches_behind_its_length():
    spectrum = longrope(rope(8), [1.0] * 4, [2.0] * 4, C)
    fast, slow = rope(8).inv_freq, tuple(f / 2 for f in rope(8).inv_freq)
    assert [spectrum.at(n, C).inv_freq for n in (C - 1, C, C + 1)] == [fast, fast, slow]


def test_a_model_reads_a_prefix_of_longer_texts_alone():
    layout = uniform(rope(8), layers=1, heads=1, training_length=C)
    layout = layout.map(lambda s: s.with_temperature(coefficient=0.5))
    for length in (C - 1, C, C + 1):
        target = Target("a", SimpleNamespace(layout=layout), torch.zeros(1, length))
        assert (target.prefix is not None) is (length > C)
        target.require(length)
        with pytest.raises(NotApplicableError):
            target.require(length + 1)


def test_text_holds_a_window_of_all_of_it():
    text = held_out(range(10))
    assert held_out_windows(text, 1, 10).tolist() == [[*range(10)]]
    with pytest.raises(UserError):
        held_out_windows(text, 1, 11)


def test_a_prompt_keeps_what_fits_beside_its_answer():
    for size, kept in ((7, range(7)), (8, range(8)), (9, (0, *range(2, 9)))):
        cropped = _cropped(Prompt(tuple(range(size)), (), 2, group=1), 10)
        assert cropped.tokens == tuple(kept)
        assert (cropped.group is None) is (size > 8)


def test_examples_fill_a_prompt_until_none_fits():
    examples = [[0] * 5, [1] * 5, [2] * 3]
    assert sum(map(len, filling(examples, 0, 8, 0))) == 8
    # Five tokens are left, as many as the longest example has.
    assert sum(map(len, filling(examples, 0, 13, 0))) == 8
    with pytest.raises(UserError):
        filling(examples, 0, 14, 0)
    with pytest.raises(UserError):
        filling([[0] * 5, [1] * 5], 0, 4, 0)


def test_room_for_the_shortest_prompt():
    check_room(0, "a", 5)
    with pytest.raises(UserError):
        check_room(-1, "a", 5)


def test_buckets_of_lengths_begin_at_their_lower_edge():
    edges = {0: "0–2×", 2: "2–4×", 4: "4–8×", 8: "8–16×", 16: "16×+"}
    names = [*edges.values()]
    for place, (edge, name) in enumerate(edges.items()):
        assert label(edge).startswith(name)
        assert label(edge + 0.01).startswith(name)
        if edge:
            assert label(edge - 0.01).startswith(names[place - 1])


# Steps


@pytest.mark.parametrize(("at_", "is_refused"), [(-1, True), (0, False), (9, False), (10, True)])
def test_a_drop_lies_before_the_last_step(at_, is_refused):
    values = {"drop": {"at": at_}, "trainer": {"max_steps": 10}}
    assert refuses(parse, values) is is_refused


def test_a_drop_is_no_part_of_the_checkpoint_of_its_step():
    phases = parse({"drop": {"at": 4}, "trainer": {"max_steps": 10}}).phases
    assert [phases.is_dropped(step) for step in (3, 4, 5, 10)] == [False, False, True, True]
    assert [phases.at(step).name for step in (3, 4, 10)] == ["pretrain", *["recalibrate"] * 2]


def test_shares_and_numbers_of_updates():
    assert [is_share(x) for x in (0.0, 0.01, 0.99, 1.0, 1)] == [False, True, True, False, False]
    assert not any(refuses(check_updates, "a", x) for x in (0, 1, 7, 0.01, 0.99))
    assert all(refuses(check_updates, "a", x) for x in (-1, 0.0, 1.0, 1.5, True, "1"))


# Text


def test_a_vocabulary_holds_as_many_tokens_as_it_has():
    config = ModelConfig(vocab_size=10)
    assert [refuses(check_vocabulary, config, n) for n in (9, 10, 11)] == [False, False, True]


def test_texts_are_cut_behind_the_longest_length():
    assert [*cut(["a" * 4, "b" * 5, "cc dd"], 4)] == ["a" * 4, "b" * 4, "b", "cc", " dd"]


def test_a_split_begins_at_its_bound():
    number = document_hash("a")
    assert split_of("a", (number, number + 1)) == "validation"
    assert split_of("a", (number + 1, number + 2)) == "train"
    assert split_of("a", (number - 1, number)) == "test"
