"""Frequency entropies against scipy and numpy, and those of a model's heads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.signal
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.attention_examples import captured, cells, drawn
from trainer.analysis.frequency_entropy import (
    MEASURES,
    NAMES,
    analyze_frequency_entropy,
    frequency_entropies,
    in_words,
    sequence_fe,
    spectrum_fe,
)
from trainer.analysis.target import NotApplicableError, Target
from trainer.analysis.weighted_rope import apply
from trainer.common.errors import UserError
from trainer.config import AnalysisConfig, AttenuationSettings, ShortTime, WeightedRopeSettings
from trainer.positional.layout import Intervention

IDS = torch.randint(50, (2, 1100), generator=torch.Generator().manual_seed(5))
seeds = st.integers(0, 2**32 - 1)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def spectrum_by_scipy(signal, frame=1024, hop=512, window="hann"):
    window = "boxcar" if window == "rectangular" else window
    _, times, stft = scipy.signal.spectrogram(
        signal, window=window, nperseg=frame, noverlap=frame - hop, detrend=False, mode="complex"
    )
    power = (np.abs(stft) ** 2).mean(axis=-1)
    return scipy.stats.entropy(power, base=2) / np.log2(len(power)), (len(power), len(times))


def sequence_by_numpy(signal):
    power = np.abs(np.fft.fft(signal)[1 : len(signal) // 2]) ** 2
    return scipy.stats.entropy(power) / np.log(len(power))


@given(
    seeds,
    st.integers(4, 60),
    st.integers(1, 40),
    st.integers(0, 300),
    st.sampled_from(["hann", "hamming", "blackman", "rectangular"]),
)
def test_spectrum_entropy_is_scipy_s(seed, frame, hop, more, window):
    hop = min(hop, frame)
    signal = 3 + noise(frame + more, seed=seed)
    ours = float(spectrum_fe(torch.tensor(signal), ShortTime(window, frame, hop)))
    assert ours == pytest.approx(spectrum_by_scipy(signal, frame, hop, window)[0], rel=1e-8)


@given(seeds, st.integers(6, 500))
def test_sequence_entropy_is_numpy_s(seed, length):
    signal = 3 + noise(length, seed=seed)
    ours = float(sequence_fe(torch.tensor(signal)))
    assert ours == pytest.approx(sequence_by_numpy(signal), rel=1e-8)


def test_a_pure_tone_is_low_and_white_noise_high():
    tone = torch.sin(2 * torch.pi * 32 * torch.arange(4096) / 1024)
    white = torch.tensor(noise(4096))
    assert sequence_fe(tone) < 1e-6
    assert sequence_fe(white) > 0.9
    assert spectrum_fe(tone) < 0.2
    assert spectrum_fe(white) > 0.95


def test_a_signal_without_power_has_entropy_0():
    silence = torch.zeros(2, 16)
    assert sequence_fe(silence).tolist() == [0, 0]
    assert spectrum_fe(silence, ShortTime(frame=8, hop=4)).tolist() == [0, 0]


def test_too_short_a_text_is_one_clear_error(tiny_decoder):
    model = tiny_decoder()
    with pytest.raises(UserError, match=r"expected a text of 1024 tokens .* got 1000"):
        frequency_entropies(model, IDS[:, :1000])
    assert frequency_entropies(model, IDS[:, :1000], ["sequence"])
    with pytest.raises(UserError, match="6 tokens or more, got 5"):
        sequence_fe(torch.ones(5))


MODELS = {
    "rope": ({}, [4, 4]),
    "nope": ({"layers": ["nope"]}, [4, 4]),
    "half of the channels": ({"encodings": {"rope": {"rotary_fraction": 0.5}}}, [2, 2]),
}


def expected_entropies(heads, counts, side, name):
    """From the queries and keys after the encoding, a text, head and pair at a time."""
    x = (heads.rotated_q if side == "query" else heads.rotated_k).double().numpy()
    per_key = x.shape[1] // 2
    measure = {"spectrum": lambda s: spectrum_by_scipy(s)[0], "sequence": sequence_by_numpy}[name]
    return [
        [
            np.mean([measure(np.linalg.norm(text[h][:, [m, m + pairs]], axis=-1)) for text in x])
            for m in range(pairs)
        ]
        for h in range(x.shape[1])
        for pairs in [counts[h // per_key]]
    ]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_s_heads(tiny_decoder, model):
    positional, counts = MODELS[model]
    model = tiny_decoder(**positional)
    layers, measured = captured(model, IDS), frequency_entropies(model, IDS)
    assert len(measured) == len(layers) == 2
    for entropies, heads in zip(measured, layers, strict=True):
        assert len(entropies) == 4
        for (name, side), ours in entropies.items():
            expected = expected_entropies(heads, counts, side, name)
            np.testing.assert_allclose(ours, expected, rtol=1e-4)


def test_heads_of_one_layer_with_other_numbers_of_pairs(tiny_decoder):
    """Query heads 0 and 1 read the key head that rotates two pairs, 2 and 3 the one with four."""
    model, ids = tiny_decoder(layers=["half_rope"], heads={"rope": 0.5}), IDS[:, :60]
    measured = frequency_entropies(model, ids, ["sequence"])
    for entropies, heads in zip(measured, captured(model, ids), strict=True):
        for side in ("query", "key"):
            expected = expected_entropies(heads, [2, 4], side, "sequence")
            rows = entropies["sequence", side].tolist()
            for row, values in zip(rows, expected, strict=True):
                np.testing.assert_allclose(row, [*values, np.nan, np.nan][:4], rtol=1e-4)


def text(length, texts=1):
    return torch.randint(50, (texts, length), generator=torch.Generator().manual_seed(3))


def rows_with(target, **attenuation):
    settings = AttenuationSettings(**{"alphas": [], **attenuation})
    target = replace(target, config=replace(target.config, attenuation=settings))
    return analyze_frequency_entropy(target).rows


def expected(model, ids, name, side):
    """``[layers, heads, pairs]`` of one text."""
    layers = captured(model, ids)
    return np.array([expected_entropies(heads, [4, 4], side, name) for heads in layers])


def test_rows_are_the_entropies_of_every_pair_also_on_shorter_texts(tiny_decoder):
    """App. F: the same heads at several lengths; a text shorter than a frame has one entropy."""
    model, ids = tiny_decoder(), text(1100)
    rows = rows_with(Target("tiny", model, ids, AnalysisConfig(prefixes=[1050, 60])))
    for n, measures in ((60, ["sequence"]), (1050, MEASURES), (1100, MEASURES)):
        for name in measures:
            measured = cells(rows, NAMES[name], 2, 4, 4, variant="queries", length=n)
            numbers = expected(model, ids[:, :n], name, "query")
            np.testing.assert_allclose(measured, numbers, atol=1e-4)
    assert not len(cells(rows, "SpectrumFE", length=60))
    keys = cells(rows, "SequenceFE", 2, 2, 4, variant="keys")
    np.testing.assert_allclose(keys, expected(model, ids, "sequence", "key"), atol=1e-4)


def test_a_text_shorter_than_a_frame_has_the_gates_of_the_other_entropy(tiny_decoder):
    target = Target("tiny", tiny_decoder(), text(1023))
    rows = rows_with(target, alphas=[0.0])
    assert set(rows["metric"]) & set(NAMES.values()) == {"SequenceFE"}
    perplexities = rows[rows["metric"].str.startswith("perplexity")]
    assert set(perplexities["variant"]) == {"SequenceFE < 0.6"}
    with pytest.raises(NotApplicableError, match="expected 6 or more, got 5"):
        rows_with(Target("tiny", target.model, text(5)))


def test_one_call_has_the_perplexity_of_every_gate_at_every_length(tiny_decoder):
    """Fig. 4: perplexity by alpha of what Eq. 11 and 12 attenuate, queries and keys by their own
    entropies, here of another text; and both rules of Sec. 5.3 together."""
    model, ids, other = tiny_decoder(), text(1100), text(1060)[:, 30:]
    sides = ("query", "key")
    entropies = {(m, s): expected(model, other, m, s) for m in MEASURES for s in sides}
    high, low = (round(np.median(entropies[m, "query"]), 4) for m in MEASURES)
    above, below = (
        WeightedRopeSettings("spectrum", "above", high),
        WeightedRopeSettings("sequence", "below", low),
    )
    chosen_above = {s: entropies["spectrum", s] > high for s in sides}
    chosen_below = {s: entropies["sequence", s] < low for s in sides}
    either = {s: chosen_above[s] | chosen_below[s] for s in sides}
    gates = ([above], chosen_above), ([below], chosen_below), ([above, below], either)
    alphas = [0.0, 0.9]
    rows = rows_with(
        Target("tiny", model, ids, choice=other),
        alphas=alphas,
        gates=[rules for rules, _ in gates],
        choice="validation",
        tokens=[40, 80],
    )

    def perplexity(pairs, alpha, n):
        changed = []
        for layer in range(2):
            both = [np.tile(np.where(pairs[s][layer], alpha, 1.0), (1, 2)) for s in sides]
            changed.append(Intervention(*(tuple(map(tuple, side.tolist())) for side in both)))
        with model.using(apply(model.layout, tuple(changed))), torch.no_grad():
            logits = model(ids[:, :n]).double()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1 : n + 1].flatten()
        )
        return float(losses.exp())

    for (rules, pairs), n in itertools.product(gates, (40, 80)):
        variant = in_words(rules)
        count = cells(rows, "attenuated_pairs", variant=variant, length=n).item()
        assert count == pairs["query"].sum() + pairs["key"].sum()
        for alpha in (*alphas, 1.0):
            measured = cells(rows, f"perplexity, alpha={alpha:g}", variant=variant, length=n)
            assert measured.item() == pytest.approx(perplexity(pairs, alpha, n), rel=1e-4)


@pytest.mark.parametrize("choice", ["page", "validation"])
def test_gates_and_prefixes_have_the_configured_frames(tiny_decoder, choice):
    """Also of texts that are shorter than the default frame."""
    model, ids, other, frames = tiny_decoder(), text(64), text(90)[:, 26:], ShortTime("hamming", 16)
    config = AnalysisConfig(frequency_entropy=frames, prefixes=[15, 16])
    target = Target("tiny", model, ids, config, choice=other if choice == "validation" else None)
    entropies = frequency_entropies(model, other if choice == "validation" else ids, frames=frames)
    values = [layer["spectrum", side] for layer in entropies for side in ("query", "key")]
    tau = round(float(torch.cat([x.flatten() for x in values]).median()), 4)
    gate = [WeightedRopeSettings("spectrum", "above", tau)]
    rows = rows_with(target, alphas=[0.5], gates=[gate], choice=choice)
    count = sum(int((x > tau).sum()) for x in values)
    assert cells(rows, "attenuated_pairs").item() == count > 0
    of_prefix = cells(rows, "SpectrumFE", 2, 4, 4, variant="queries", length=16)
    expected_of_prefix = frequency_entropies(model, ids[:, :16], ["spectrum"], frames)
    for layer, measured in zip(expected_of_prefix, of_prefix, strict=True):
        np.testing.assert_allclose(measured, layer["spectrum", "query"], atol=1e-6)
    assert not len(cells(rows, "SpectrumFE", length=15))


def test_a_gate_counts_its_pairs_also_without_a_factor_that_changes_them(tiny_decoder):
    gates = [[WeightedRopeSettings("sequence", "below", 0.99)]]
    target = Target("tiny", tiny_decoder(), text(60))
    alone, both = (rows_with(target, alphas=alphas, gates=gates) for alphas in ([1.0], [0.5, 1.0]))
    counts = [cells(rows, "attenuated_pairs").item() for rows in (alone, both)]
    assert counts[0] == counts[1] > 0


@pytest.fixture
def two(tiny_decoder):
    """Two texts of 60 tokens, heads whose numbers are not those of the keys that they read."""
    config = AnalysisConfig(chosen=[(0, 2), (1, 1)], prefixes=[20])
    return Target("tiny", tiny_decoder(), text(60, texts=2), config)


def test_maps_have_the_norms_of_the_keys_that_a_head_reads_in_the_first_text(two):
    results = analyze_frequency_entropy(two)
    layers = captured(two.model, two.ids)
    one = layers[1].k[0, 0]
    for side, expected in (
        ("queries", {"layer 0, head 2": layers[0].q[0, 2], "layer 1, head 1": layers[1].q[0, 1]}),
        ("keys", {"layer 0, key head 1": layers[0].k[0, 1], "layer 1, key head 0": one}),
    ):
        maps = drawn(results, f"frequency_entropy_norms_{side}")
        assert [*maps] == [*expected]
        for title, x in expected.items():
            norms = np.hypot(x[:, :4], x[:, 4:]).T
            np.testing.assert_allclose(maps[title], norms, rtol=1e-5)


def test_single_heads_have_their_entropies_by_length(two):
    results = analyze_frequency_entropy(two)
    for side, place, lengths in (("queries", (0, 2), (20, 60)), ("keys", (0, 1), (60,))):
        panel = drawn(results, f"frequency_entropy_heads_{side}")[0]
        assert [*panel.points] == [f"{n} tokens" for n in lengths]
        for n in lengths:
            rows = cells(results.rows, "SequenceFE", layer=0, head=place[1], variant=side, length=n)
            points = panel.points[f"{n} tokens"]
            np.testing.assert_array_equal(points, np.column_stack([range(4), rows]))


def test_the_heads_that_are_shown_have_the_lowest_entropy_of_their_layer(tiny_decoder):
    results = analyze_frequency_entropy(Target("tiny", tiny_decoder(), text(60)))
    lowest = cells(results.rows, "SequenceFE", 2, 4, 4, variant="queries").min(axis=-1)
    titles = [f"layer {i}, head {lowest[i].argmin()}" for i in range(2)]
    assert [*drawn(results, "frequency_entropy_norms_queries")] == titles


def test_perplexity_is_of_the_first_text_and_an_idle_gate_is_named(two):
    gates = [[WeightedRopeSettings("sequence", "below", tau)] for tau in (0.99, 0.0)]
    attenuation = AttenuationSettings(alphas=[0.5], gates=gates, tokens=[])
    results = analyze_frequency_entropy(
        replace(two, config=replace(two.config, attenuation=attenuation))
    )
    with torch.no_grad():
        logits = two.model(two.ids[:1, :-1]).double()
    loss = torch.nn.functional.cross_entropy(logits[0], two.ids[0, 1:])
    plain = cells(results.rows, "perplexity, alpha=1", length=59)
    assert plain == pytest.approx([float(loss.exp())] * 2, rel=1e-5)
    assert [note for note in results.notes if "attenuation changes nothing" in note] == [
        "No pair has SequenceFE < 0, so attenuation changes nothing."
    ]


def test_a_model_with_factors_of_its_own_is_not_attenuated(two):
    layout = two.model.layout
    gains = Intervention(key=((2.0,) * 8, (1.0,) * 8))
    two.model.layout = replace(layout, layers=(layout.layers[0].with_intervention(gains),) * 2)
    results = analyze_frequency_entropy(two)
    assert len(results.notes) == 2  # the other one: no SpectrumFE
    assert not len(cells(results.rows, "attenuated_pairs"))
