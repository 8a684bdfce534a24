"""The search for LongRoPE's factors: within bounds and budget, never worse than its start."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.conftest import fit_text
from tests.positional.examples import one_layer, slowed
from trainer.config import EvaluationConfig, LongRopeSettings
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import Haystack, HeldOut
from trainer.evaluation.likelihood import Encoder, Request
from trainer.evaluation.longrope import (
    CRITICAL,
    answer_loss,
    critical_pair,
    fit_longrope,
    longrope2_factors,
    longrope_factors,
    needle_requests,
    with_factors,
)
from trainer.evaluation.perplexity import token_losses
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.encodings import by_name
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS
from trainer.positional.spectrum import Spectrum

LENGTH, EXTENSION = 512, 4.0
NAMES = ("rope", "half_rope", "nope", "rope_id", "p_rope")
SEARCHES = {"perplexity": longrope_factors, "needles": longrope2_factors}


def mixed():
    """A layout of several spectra, one of them without a pair, one without a slow pair."""
    layers = [one_layer(LENGTH, by_name(name, 32, LENGTH)).layers[0] for name in NAMES]
    return Layout(LENGTH, tuple(layers))


def tried(search, layout, budget, s=EXTENSION):
    """The factors that a search tries, the starts first, where losses are random."""
    losses, factors = np.random.default_rng(0), []
    search(layout, s, lambda tried: factors.append(tried) or losses.random(), budget)
    return factors


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_factors_rise_from_1_to_no_more_than_a_quarter_above_the_extension(search):
    for individual in tried(search, mixed(), 50):
        for spectrum, factors in zip(mixed().spectra, individual, strict=True):
            assert len(factors) == len(spectrum.inv_freq)
            assert list(factors) == sorted(factors)
            assert all(1 <= f <= 1.25 * EXTENSION * (1 + 1e-12) for f in factors)


@given(st.sampled_from([16, 64, 128]), st.floats(1e3, 1e6), st.floats(1.5, 64))
def test_the_start_has_the_frequencies_of_known_methods(head_dim, base, factor):
    spectrum = by_name("rope", head_dim, LENGTH, base=base)
    layout = one_layer(LENGTH, spectrum)
    starts = tried(longrope_factors, layout, 4, factor)
    start = [with_factors(layout, factors).spectra[0] for factors in starts]
    for name in ("pi", "ntk", "ntk_by_parts"):
        known = slowed(RESCALINGS[name], spectrum, factor, LENGTH).inv_freq
        assert any(
            s.at(LENGTH + 1, LENGTH).inv_freq == pytest.approx(known, rel=1e-9) for s in start
        )
    assert any(s.at(LENGTH + 1, LENGTH).inv_freq == spectrum.inv_freq for s in start)


@given(st.sampled_from([16, 64, 128]), st.floats(1e3, 1e6))
def test_the_critical_pair_is_that_of_longrope2(head_dim, base):
    """d_tcd = 2 ceil(d / 2 log_base(C / 2 pi)), the first dimension whose period exceeds C."""
    spectrum = by_name("rope", head_dim, LENGTH, base=base)
    pairs = head_dim / 2
    expected = math.ceil(pairs * math.log(LENGTH / (2 * math.pi), base))
    assert critical_pair(spectrum, LENGTH) == min(max(expected, 1), head_dim // 2)


@pytest.mark.parametrize(("turns", "critical"), [(1.0, 2), (0.999, 1), (1.001, 2)])
def test_a_pair_of_exactly_one_turn_completes_it(turns, critical):
    spectrum = Spectrum((1.0, turns * 2 * math.pi / 32, 0.01))
    assert critical_pair(spectrum, 32) == critical


def test_fast_pairs_that_a_drop_removed_count_before_the_critical_one():
    assert critical_pair(Spectrum((0.0, 0.0, 1.0, 0.01)), 32) == 3
    assert critical_pair(Spectrum((0.0, 0.0)), 32) == 1


def test_from_the_critical_pair_on_the_factor_is_the_whole_extension():
    spectrum = by_name("rope", 64, LENGTH, base=1e4)
    critical = critical_pair(spectrum, LENGTH)
    (factors,) = tried(longrope_factors, one_layer(LENGTH, spectrum), 5)[4]
    assert factors[critical:] == pytest.approx([EXTENSION] * (32 - critical))
    assert factors[critical - 1] < EXTENSION
    assert factors[0] == 1


def test_by_needles_pairs_before_the_critical_one_are_rescaled_as_by_ntk():
    """lambda_i = lambda_cd^(i / cd) below the critical pair, which is base * lambda^(d / (2 cd));
    at least s from it on; the pair itself at 0.7 of the theoretical one or later."""
    spectrum = by_name("rope", 64, LENGTH, base=1e4)
    latest = critical_pair(spectrum, LENGTH)

    def follows(factors, pair):
        base = 1e4 * factors[pair] ** (32 / pair)
        expected = [base ** (i / 32) / 1e4 ** (i / 32) for i in range(pair)]
        return factors[:pair] == pytest.approx(expected) and min(factors[pair:]) >= EXTENSION

    found = set()
    for (factors,) in tried(longrope2_factors, one_layer(LENGTH, spectrum), 200):
        pairs = [p for p in range(round(0.7 * latest), latest + 1) if follows(factors, p)]
        assert pairs
        found.update(pairs)
    assert len(found) > len(CRITICAL)


def test_where_every_pair_turns_ntk_reaches_the_extension_behind_the_last():
    layout = one_layer(LENGTH, by_name("rope_id", 32, LENGTH))
    pairs = len(layout.spectra[0].inv_freq)
    (factors,) = tried(longrope2_factors, layout, 1)[0]
    assert factors == pytest.approx([EXTENSION ** (i / pairs) for i in range(pairs)])


C, S = 8, 4.0
WINDOWS = np.random.default_rng(0).integers(0, 50, (3, 32))


def text_loss(model):
    return token_losses(model, WINDOWS, 0, 64).double().mean().item()


def searched(model, loss, name="perplexity", *, budget, seed=0):
    """The factors that are found; ``loss`` is of the model with the layout that is tried."""
    layout = model.layout

    def measured(factors):
        with model.using(with_factors(layout, factors)):
            return loss()

    return SEARCHES[name](layout, S, measured, budget, seed)


@pytest.fixture
def model(tiny_decoder):
    return tiny_decoder(training_length=C, layers=["rope", "half_rope"], heads={"nope": 0.5})


def test_the_result_is_better_than_every_starting_point(model):
    losses = []
    searched(model, lambda: losses.append(text_loss(model)) or losses[-1], budget=30)
    assert min(losses) < min(losses[:8])


@pytest.mark.parametrize("name", ["perplexity", "needles"])
def test_a_seed_gives_the_same_factors_again_and_another_others(model, name):
    a, b, c = (
        searched(model, lambda: text_loss(model), name, budget=16, seed=s) for s in (1, 1, 2)
    )
    assert a == b
    assert a != c


@pytest.mark.parametrize("budget", [1, 3, 20])
@pytest.mark.parametrize("name", ["perplexity", "needles"])
def test_no_more_is_tried_than_the_budget_allows(model, budget, name):
    tried = []
    searched(model, lambda: tried.append(model.layout) or float(len(tried)), name, budget=budget)
    assert len(tried) == len(set(tried)) == budget


def test_factors_whose_loss_is_not_a_number_are_not_taken(model):
    losses = iter([math.nan, 3.0, math.nan, 1.0, 2.0, *[math.nan] * 11])
    tried = []

    def loss():
        tried.append(model.layout)
        return next(losses)

    result = searched(model, loss, budget=16)
    assert with_factors(model.layout, result) == tried[3]


def slowest(layout):
    return next(s for s in layout.at(C + 1).spectra if s.rotates).inv_freq[-1]


@pytest.mark.parametrize(("name", "ideal"), [("perplexity", 2.7), ("needles", 4.4)])
def test_the_search_approaches_the_factor_of_least_loss(model, name, ideal):
    """With a loss that is least where the slowest pair is divided by so much, the search goes
    there."""
    wanted = slowest(model.layout) / ideal

    def loss():
        return abs(math.log(slowest(model.layout) / wanted))

    result = searched(model, loss, name, budget=100)
    assert next(f for f in result if f)[-1] == pytest.approx(ideal, rel=0.05)


def test_perplexity_and_needles_search_by_their_losses_on_their_texts(tiny_decoder, corpus):
    """Of the last tokens that are answers alone, where it searches by needles (LongRoPE2)."""
    size = {"vocab_size": corpus.tokenizer.get_vocab_size()}
    model = tiny_decoder(training_length=100, model=size)
    text = FitText(HeldOut(corpus, corpus.test, (corpus.end_of_text,), None), 3)
    asked = needle_requests(text.held_out.haystack, 2, 400)
    for name, loss in (
        ("perplexity", lambda: text.loss(model, text.windows(400, 2), 800)),
        ("needles", lambda: answer_loss(model, asked, 800)),
    ):
        settings = LongRopeSettings(search=name, evaluations=12, windows=2)
        factors = searched(model, loss, name, budget=12)
        expected = with_factors(model.layout, factors)
        assert fitted(model, text, settings) == expected


def fitted(model, text, settings):
    config = EvaluationConfig(longrope=settings, batch_tokens=800)
    return fit_longrope(lambda s: model.layout, model, text, config, [])(S)


def test_perplexity_is_searched_on_windows_that_spread_over_all(model, monkeypatch):
    read, text = [], fit_text(range(40), count=9)
    monkeypatch.setattr(FitText, "loss", lambda text, model, rows, _: read.append(rows) or 1.0)
    for count, ends in ((1, [39]), (4, [9, 19, 29, 39]), (12, text.windows(32)[:, -1].tolist())):
        fitted(model, text, LongRopeSettings(evaluations=1, windows=count))
        assert read.pop()[:, -1].tolist() == ends


def test_factors_divide_the_frequencies_beyond_the_training_length():
    original = build_layout(
        PositionalConfig(layers=["rope", "nope"]),
        num_layers=3,
        num_key_value_heads=2,
        head_dim=8,
        training_length=64,
    )
    changed = with_factors(original, ((1.0, 2.0, 4.0, 8.0), ()))
    assert changed.layers[1] == original.layers[1]
    before, after = original.layers[0].spectra[0], changed.layers[0].spectra[0]
    assert after.at(64, 64).inv_freq == before.inv_freq
    slow = [f / by for f, by in zip(before.inv_freq, (1.0, 2.0, 4.0, 8.0), strict=True)]
    assert after.at(65, 64).inv_freq == pytest.approx(slow)


NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")


def test_each_text_states_a_number_at_its_depth_and_ends_with_it(corpus):
    documents = corpus.documents(corpus.validation, 1 << 20)
    first = corpus.end_of_text
    haystack = Haystack(Encoder(corpus.tokenizer, (first,), first), documents)
    decode = haystack.encoder.tokenizer.decode
    requests = needle_requests(haystack, 4, 400)
    assert len({request.continuation for request in requests}) == 4
    for number, request in enumerate(requests):
        assert len(request.context) + len(request.continuation) == 400
        whole = decode([*request.context, *request.continuation])
        key, value = NEEDLE.search(whole).groups()
        assert whole.endswith(f"number for {key} mentioned in the provided text is: {value}")
        assert decode(list(request.continuation)).strip() == value
        assert request.context[0] == first
        begin, end = NEEDLE.search(whole).span()
        text = whole.rindex("\n\nThe special") - (end - begin)
        assert number / 4 - 0.1 <= begin / text <= (number + 1) / 4 + 0.1
    assert needle_requests(haystack, 4, 400) == requests


@torch.no_grad()
def test_the_loss_is_of_the_answers_tokens_a_mean_for_each_text(tiny_decoder):
    """-log p of every token of an answer, its mean, and the mean of these (LongRoPE2)."""
    model = tiny_decoder()
    ids, counts = np.random.default_rng(0).integers(0, 50, (3, 40)), (2, 5, 1)
    log_p = F.log_softmax(model(torch.from_numpy(ids)).double(), dim=-1)
    expected = [
        np.mean([-log_p[row, t - 1, ids[row, t]].item() for t in range(40 - count, 40)])
        for row, count in enumerate(counts)
    ]
    requests = [
        Request(tuple(row[:-count]), tuple(row[-count:]))
        for row, count in zip(ids.tolist(), counts, strict=True)
    ]
    for batch_tokens in (40, 1000):
        result = answer_loss(model, requests, batch_tokens)
        assert result == pytest.approx(np.mean(expected), rel=1e-5)
