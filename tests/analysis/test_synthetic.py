"""Closed forms of the synthetic cluster, against an SVD of the rotated vectors themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.attention_examples import cells, drawn, turned
from trainer.analysis.synthetic import (
    analyze_synthetic,
    decay,
    fsv_ratios,
    limit,
    standard_spectra,
)
from trainer.analysis.target import Target
from trainer.positional.encodings import by_name
from trainer.positional.rescaling import cope, dynamic, ntk_aware

NAMES = ["rope", "half_rope", "high_frequency", "rope_id", "p_rope", "nope"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("random", [False, True])
def test_both_curves_are_those_of_rotated_copies(name, random):
    D, lengths, distances = 16, [1, 2, 50, 700], [0, 3, 600]
    spectrum = by_name(name, D, 512)
    vector = np.random.default_rng(1).normal(size=D) if random else np.ones(D)
    copies = turned(torch.tensor(vector).expand(1, 1, 700, D), spectrum)[0, 0].numpy()
    for n, ratio in zip(lengths, fsv_ratios(spectrum, vector, lengths, 512), strict=True):
        expected = np.linalg.norm(copies[:n], 2) / (np.sqrt(n) * np.linalg.norm(vector))
        assert ratio == pytest.approx(expected, abs=1e-6)
    for distance, dot in zip(distances, decay(spectrum, vector, distances, 512), strict=True):
        expected = copies[0] @ copies[distance] / (vector @ vector)
        assert dot == pytest.approx(expected, abs=1e-6)


def test_figure_7_what_each_encoding_keeps_and_when_it_gets_there():
    """Only RoPE-ID has at the training length what it keeps for ever; HalfRoPE gets there late,
    RoPE and high-frequency RoPE fall towards the least that 64 planes allow, the latter sooner."""

    def ratios(name):
        spectrum = by_name(name, 128, 4096)
        return fsv_ratios(spectrum, np.ones(128), [4096, 65_536, 10**6], 4096)

    rope, half, fast, ours = (ratios(name) for name in NAMES[:4])
    remaining, least = np.sqrt(1 / 2), np.sqrt(1 / 128)
    assert ours == pytest.approx(remaining, abs=1e-3)
    assert half[0] - remaining > 0.05
    assert half[2] == pytest.approx(remaining, abs=1e-3)
    assert rope[0] - fast[0] > 0.2
    assert fast[2] == pytest.approx(least, abs=1e-3)
    assert rope[2] - least < 0.01


@given(st.integers(1, 10**7))
def test_ratios_lie_between_the_limit_and_one_at_any_length(length):
    spectrum = by_name("rope", 16, 64)
    (ratio,) = fsv_ratios(spectrum, np.ones(16), [length], 64)
    assert np.sqrt(1 / 16) - 1e-9 <= ratio <= 1 + 1e-9


def test_a_spectrum_that_depends_on_the_length_is_taken_at_that_length():
    spectrum = by_name("rope", 16, 64)
    growing = dynamic(spectrum, ntk_aware, 64)
    vector, both = np.ones(16), (spectrum, growing)
    same, other = (fsv_ratios(s, vector, [64, 640], 64) for s in both)
    assert same[0] == other[0]
    assert other[1] > same[1] + 0.01
    (same,), (other,) = (decay(s, vector, [600], 64) for s in both)
    assert other != pytest.approx(same, abs=1e-3)
    copies = turned(torch.ones(1, 1, 601, 16), growing.at(601, 64))[0, 0].double()
    assert other == pytest.approx(float(copies[0] @ copies[600]) / 16, abs=1e-5)


@pytest.mark.parametrize("name", ["rope", "half_rope", "high_frequency", "p_rope", "nope"])
def test_the_limit_is_where_the_ratio_goes(name):
    spectrum = by_name(name, 16, 64, **({"base": 1e3} if name == "rope" else {}))
    (far,) = fsv_ratios(spectrum, np.ones(16), [10**7], 64)
    assert limit(spectrum, 16) == pytest.approx(far, abs=1e-3)


def test_half_a_turn_a_token_is_summed_exactly():
    spectrum = by_name("rope", 16, 64, angle_scale=np.pi)
    (ratio,) = fsv_ratios(spectrum, np.ones(16), [1000], 64)
    copies = turned(torch.ones(1, 1, 1000, 16).double(), spectrum)[0, 0].numpy()
    assert ratio == pytest.approx(np.linalg.norm(copies, 2) / np.sqrt(16_000), abs=1e-4)


def test_frequencies_that_follow_the_length_have_their_own_curves_and_limit(tiny_decoder):
    """CoPE for long sequences stops pairs that turn in short ones."""
    model = tiny_decoder(training_length=64, model={"num_hidden_layers": 3})
    layers = model.layout.dynamically_rescaled(partial(cope, clipped=3), layers=[1, 2]).layers
    model.layout = replace(model.layout, layers=layers)
    rows = analyze_synthetic(Target("tiny", model, torch.zeros(1, 8))).rows
    for variant, pairs in (("this model", 3), ("this model, 2", 4)):
        (limit,) = cells(rows, "fsv_limit", variant=variant)
        assert limit == pytest.approx(np.sqrt(max(1 - pairs / 4, 1 / 8)))
    first, second = (cells(rows, "decay", variant=f"this model{i}") for i in ("", ", 2"))
    assert np.abs(np.subtract(first, second)).max() > 0.1


def test_the_spectra_of_most_heads_stand_for_the_model(tiny_decoder):
    layers = ["rope", "rope", "nope", "rope_id", "rope_id", "rope_id"]
    model = tiny_decoder(training_length=512, layers=layers, model={"num_hidden_layers": 6})
    rows = analyze_synthetic(Target("tiny", model, torch.zeros(1, 8))).rows
    first, second = (cells(rows, "decay", variant=f"this model{i}") for i in ("", ", 2"))
    np.testing.assert_array_equal(second, cells(rows, "decay", variant="RoPE"))
    expected = decay(by_name("rope_id", 8, 512), np.ones(8), [1], 512)
    lengths = rows["length"][(rows["variant"] == "this model") & (rows["metric"] == "decay")]
    at = dict(zip(lengths, first, strict=True))
    assert at[1] == pytest.approx(expected[0])


def test_a_spectrum_that_does_not_fit_the_model_is_left_out_and_noted():
    spectra, notes = standard_spectra(6, 64)
    assert [*spectra] == ["RoPE", "high frequency"]
    assert [note.split(" does")[0] for note in notes] == ["HalfRoPE", "RoPE-ID"]
    spectra, notes = standard_spectra(8, 64)
    assert len(spectra) == 4
    assert spectra["HalfRoPE"] == by_name("half_rope", 8, 64)
    assert notes == []


@pytest.mark.parametrize(("C", "fastest"), [(64, 8), (128, 16), (256, 32), (1024, 32)])
def test_rope_id_turns_from_32_tokens_or_an_eighth_of_a_short_length_to_half_of_it(C, fastest):
    wavelengths = 2 * np.pi / np.array(standard_spectra(16, C)[0]["RoPE-ID"].inv_freq)
    assert (wavelengths[0], wavelengths[-1]) == pytest.approx((fastest, C / 2))


def test_figures_have_the_ratio_by_length_and_means_of_the_product_between_lengths(tiny_decoder):
    results = analyze_synthetic(Target("tiny", tiny_decoder(training_length=60), torch.zeros(1, 8)))
    rows = results.rows[results.rows.variant == "RoPE"]
    ratios, products = (
        next(line for line in panel.lines if line.label == "RoPE")
        for panel in drawn(results, "synthetic")
    )
    of_ratios = rows[rows.metric == "fsv_ratio"]
    assert [*ratios.x] == of_ratios.length.tolist()
    assert {1, 60, 16 * 60} < {*ratios.x}
    assert [*ratios.y] == of_ratios.value.tolist()
    decays = rows[rows.metric == "decay"]
    edges = [*ratios.x]
    expected = []
    for a, b in pairwise(edges):
        inside = decays[(decays.length >= a) & (decays.length < b)]
        expected.append((inside.length.mean(), inside.value.mean()))
    points = np.column_stack([products.x, products.y])
    np.testing.assert_allclose(points[: len(expected)], expected)
