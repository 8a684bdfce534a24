"""Offset features: the published table of the bounds, the definition itself, and planted pairs."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.analysis.attention_examples import (
    attention_of,
    captured,
    cells,
    drawn,
    layer_of_heads,
    turned,
)
from tests.positional.examples import slowed
from trainer.analysis import offset_changes as module
from trainer.analysis.attention import Heads
from trainer.analysis.offset_changes import changes_of_pairs, offset_changes
from trainer.analysis.offset_features import (
    analyze_offset_features,
    bounds,
    contributions,
    fastest_pairs,
    mark_upper_bound,
    offset_features,
    sampled_queries,
    shown_heads,
    sink_row,
)
from trainer.analysis.target import NotApplicableError, Target
from trainer.config import AnalysisConfig
from trainer.positional.encodings import by_name
from trainer.positional.layout import LayerEncoding
from trainer.positional.rescaling import dynamic, ntk_aware, yarn
from trainer.positional.spectrum import Spectrum

IDS = torch.randint(50, (1, 90), generator=torch.Generator().manual_seed(4))
C = 32
TURN = 2 * math.pi


def rope(rotary_dim, base, length):
    return by_name("rope", rotary_dim, length, base=base)


@pytest.mark.parametrize(
    ("spectrum", "context_length", "percent", "mean_angle"),
    [
        pytest.param(rope(32, 1e4, 2048), 2048, 31, 3.93, id="Phi-1"),
        # Table 1 says 4096 for the 8B; its row of Table 2 is that of 8192, which it was trained at.
        pytest.param(rope(128, 5e5, 8192), 8192, 45, 3.72, id="Llama-3-8B"),
        pytest.param(rope(128, 5e5, 8192), 8192, 45, 3.72, id="Llama-3-70B"),
        pytest.param(
            slowed(yarn, rope(64, 1e4, 4096), 40, 4096), 163_840, 28, 4.26, id="DeepSeek-V2-Lite"
        ),
    ],
)
def test_table_2_from_dimensions_base_and_length_alone(
    spectrum, context_length, percent, mean_angle
):
    possible, angle = bounds(np.array(spectrum.inv_freq), context_length)
    assert round(100 * possible.mean()) == percent
    assert round(angle[possible].mean(), 2) == mean_angle


def test_section_4_3_phi_1_begins_with_feature_11():
    possible, _ = bounds(np.array(rope(32, 1e4, 2048).inv_freq), 2048)
    assert possible.tolist() == [False] * 11 + [True] * 5


@given(st.floats(1e-4, 0.2), st.floats(0, 2 * math.pi), st.integers(8, 200))
def test_the_bounds_are_definition_3_1(theta, phi, context_length):
    """A pair stays below its value at distance 0, by the two bounds and by looking everywhere."""
    (possible,), (angle,) = bounds(np.array([theta]), context_length)
    # Between whole tokens and at the bounds themselves the two differ by rounding only.
    assume(abs(phi - angle) > 1e-3)
    assume(abs(theta - 2 * math.pi / context_length) > 1e-4)
    assume(min(phi, 2 * math.pi - phi, abs(phi - math.pi)) > 1e-3)
    distances = np.linspace(1e-4, context_length, 20_001)
    below = bool((np.cos(phi - theta * distances) < math.cos(phi)).all())
    assert below == bool(possible and phi >= angle)


def contributions_of(heads):
    features = offset_features(heads, C)
    return contributions(features[features["head"] == 3], [0, 1, 17])


def test_contributions_are_dot_products_of_rotated_means():
    heads = layer_of_heads(D=8)
    measured = contributions_of(heads)
    spectrum = heads.encoding.spectra[1]
    q, k = heads.q[:, 3].double().mean((0, 1)), heads.k[:, 1].double().mean((0, 1))
    for index, distance in enumerate([0, 1, 17]):
        query = turned(q.expand(1, 1, 18, 8), spectrum)[0, 0, distance]
        for pair in range(4):
            expected = query[[pair, pair + 4]] @ k[[pair, pair + 4]] / math.sqrt(8)
            assert measured[pair, index] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


def test_contributions_have_the_scale_and_the_temperature_of_the_encoding():
    heads = layer_of_heads(D=8)
    spectra = (replace(s, rotary_scale=1.2) for s in heads.encoding.spectra)
    tempered = tuple(spectrum.with_temperature(scale=1.5) for spectrum in spectra)
    scaled = replace(heads.encoding, spectra=tempered)
    plain, measured = (
        contributions_of(replace(heads, encoding=encoding)) for encoding in (heads.encoding, scaled)
    )
    np.testing.assert_allclose(measured, 1.2**2 * 1.5 * plain)


def test_frequencies_that_follow_the_length_are_those_of_the_context_length():
    heads = layer_of_heads()
    growing = dynamic(rope(8, 1e4, 64), ntk_aware, 64)
    heads = replace(heads, encoding=LayerEncoding((growing,) * 2))
    features = offset_features(heads, 512)
    expected = growing.at(512, 64).inv_freq
    assert features.inv_freq[features["head"] == 1].tolist() == [*expected]
    assert expected != growing.at(64, 64).inv_freq


@pytest.mark.parametrize(
    ("window", "training_length", "queries"),
    [
        (None, 64, range(10, 40)),
        (None, 24, range(6, 24)),
        (12, 24, range(3, 12)),
        (30, 24, range(6, 24)),
    ],
)
def test_sampled_queries_see_all_keys_before_them(window, training_length, queries):
    heads = replace(layer_of_heads(window=window), training_length=training_length)
    assert sampled_queries(heads).tolist() == [*queries]


HALF = Spectrum((1.0, 0.1))
"""Two pairs in heads of six channels."""
STILL = Spectrum((1.0, 0.0, 0.01))


def layer(seed, texts=2):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(texts, heads, 7, 6, generator=generator) for heads in (4, 2))
    encoding = LayerEncoding((HALF, STILL))
    return Heads(3, encoding, q + 1, k, q, k, 64)


def test_every_moving_pair_against_a_loop():
    heads = layer(0)
    result = offset_features(heads, C)
    for row in result.itertuples():
        pairs = len((HALF, STILL)[row.head // 2].inv_freq)
        for side, x in (("query", heads.q[:, row.head]), ("key", heads.k[:, row.head // 2])):
            points = [
                complex(vector[row.pair], vector[row.pair + pairs])
                for text in x
                for vector in text.double()
            ]
            mean = sum(points) / len(points)
            direction = sum(cmath.rect(1, cmath.phase(p)) for p in points) / len(points)
            assert getattr(row, f"{side}_radius") == pytest.approx(abs(mean), rel=1e-5)
            variance = 1 - abs(direction) if row.inv_freq else math.nan
            measured = getattr(row, f"{side}_circular_variance")
            assert measured == pytest.approx(variance, rel=1e-4, nan_ok=True)
    assert list(zip(result["head"], result["pair"], strict=True)) == [
        (head, pair) for head in range(4) for pair in range(2 + head // 2)
    ]


def all_but(pair, pairs=4):
    """The channels of a head of eight but those of a pair."""
    return [channel for channel in range(8) if channel % pairs != pair or channel >= 2 * pairs]


def sink_of(heads, head, queries, channels):
    """(attention on the first key, margin) of scores from some channels, means over texts."""
    measured = []
    for text in range(len(heads.q)):
        attention, dots = attention_of(heads, text, head, channels=channels)
        margins = [dots[i, 0] - dots[i, 1 : i + 1].mean() for i in queries]
        measured += zip(attention[queries, 0], heads.scale * np.array(margins), strict=True)
    return np.mean(measured, axis=0)


@pytest.mark.parametrize(
    ("name", "changes", "queries"),
    [
        pytest.param("rope", {}, range(10, 40), id="four queries a key-value pair"),
        pytest.param("half_rope", {"softcap": 2.0}, range(10, 40), id="half, soft-cap"),
        pytest.param("rope", {"scaling": 0.3}, range(10, 40), id="scaling"),
        pytest.param("rope", {"sinks": torch.arange(4.0)}, range(10, 40), id="learned sinks"),
        pytest.param("rope", {"training_length": 24}, range(6, 24), id="long text"),
    ],
)
def test_weights_and_margins_against_loops(name, changes, queries):
    heads = replace(layer_of_heads(name, kv_heads=1), **changes)
    measured = sink_row(heads, 3, 1, control=0)
    pairs = len(heads.encoding.spectra[0].inv_freq)
    weight, margin = sink_of(heads, 3, queries, range(8))
    fast, left = (sink_of(heads, 3, queries, all_but(pair, pairs))[0] for pair in (0, 1))
    names = ("attention", "attention_without", "attention_without_fast_pair")
    assert [measured[name] for name in names] == pytest.approx([weight, left, fast], rel=1e-4)
    assert measured["explained"] == pytest.approx(1 - left / weight, abs=1e-4)
    assert measured["margin"] == pytest.approx(margin, rel=1e-3, abs=1e-4)
    parts = [sink_of(heads, 3, queries, [pair, pair + pairs])[1] for pair in range(pairs)]
    by_pair = [sink_row(heads, 3, pair)["margin_of_pair"] for pair in range(pairs)]
    np.testing.assert_allclose(by_pair, parts, rtol=1e-3, atol=1e-4)


def loud(tiny_decoder, factor=40.0, **positional):
    """A model with long keys."""
    model = tiny_decoder(training_length=C, **positional)
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.k_proj.weight.mul_(factor)
    return model


def pairs_of(model, ids=IDS):
    """Every (layer, head, pair, theta, mean query, mean key) with means as complex numbers."""
    layers = captured(model, ids)
    for heads in layers:
        for h in range(4):
            inv_freq = heads.encoding.spectra[h // 2].inv_freq
            q, k = (
                x.double().mean(dim=(0, 1)).tolist() for x in (heads.q[:, h], heads.k[:, h // 2])
            )
            for m, theta in enumerate(inv_freq):
                n = m + len(inv_freq)
                yield heads.layer, h, m, theta, complex(q[m], q[n]), complex(k[m], k[n])


def recounted(model, radius):
    """(pairs, under the upper bound, also above the lower bound, above it less 0.1 rad)."""
    large = upper = lower = relaxed = 0
    for *_, theta, q, k in pairs_of(model):
        if abs(k) < radius:
            continue
        turned = theta * C
        angle = cmath.phase(k / q) % TURN
        large += 1
        upper += turned < TURN
        lower += turned < TURN and angle >= math.pi + turned / 2
        relaxed += turned < TURN and angle >= math.pi + turned / 2 - 0.1
    return large, upper, lower, relaxed


def test_table_2_and_every_pair_are_recounted(tiny_decoder):
    model = loud(tiny_decoder)
    rows = analyze_offset_features(Target("tiny", model, IDS)).rows
    expected = list(pairs_of(model))
    for name, numbers in (
        ("inv_freq", [theta for *_, theta, _, _ in expected]),
        ("query_radius", [abs(q) for *_, q, _ in expected]),
        ("key_radius", [abs(k) for *_, k in expected]),
        ("angle", [cmath.phase(k / q) % TURN for *_, q, k in expected]),
    ):
        np.testing.assert_allclose(cells(rows, name), numbers, rtol=1e-4)
    C = model.layout.training_length
    slow = [theta for *_, theta, _, _ in expected if 0 < theta < TURN / C]
    assert 0 < len(slow) < len(expected)
    bounds_of_slow = [math.pi + theta * C / 2 for theta in slow]
    np.testing.assert_allclose(cells(rows, "lower_bound"), bounds_of_slow, rtol=1e-4)
    for radius in (6, 9, 12):
        large, *counts = recounted(model, radius)
        assert large > 0
        names = ("positives", "upper", "lower", "relaxed")
        measured = [cells(rows, f"{n}, radius {radius}", variant="all pairs").item() for n in names]
        assert measured == pytest.approx([large, *(n / large for n in counts)])


@pytest.mark.parametrize(
    ("config", "reach", "length"),
    [
        (AnalysisConfig(), 0, C),
        (AnalysisConfig(), 2 * C, 2 * C),
        (AnalysisConfig(context_length=4 * C), 2 * C, 4 * C),
    ],
    ids=["trained", "reached", "configured"],
)
def test_bounds_are_those_of_the_context_length(tiny_decoder, config, reach, length):
    model = tiny_decoder(training_length=C)
    model.layout = replace(model.layout, reach=reach)
    target = Target("tiny", model, IDS, config)
    thetas = [theta for *_, theta, _, _ in pairs_of(model) if 0 < theta < TURN / length]
    rows = analyze_offset_features(target).rows
    expected = [math.pi + theta * length / 2 for theta in thetas]
    np.testing.assert_allclose(cells(rows, "lower_bound"), expected, rtol=1e-4)


def test_the_fastest_pair_of_every_head_by_its_angle_and_the_token_before(tiny_decoder):
    """Sec. 4.3.1: the dot product of feature 0 is largest at distance 1 where phi is theta."""
    model = loud(tiny_decoder)
    rows = analyze_offset_features(Target("tiny", model, IDS)).rows
    layers = captured(model, IDS[:, :C])
    queries = np.arange(C // 4, C)  # the last three quarters
    first = [row for row in pairs_of(model) if row[2] == 0]
    steps = cells(rows, "steps", variant="token before")
    with_pair = cells(rows, "attention", variant="token before")
    without = cells(rows, "attention_without", variant="token before")
    assert len(steps) == len(first) == 8
    for step, before, after, (layer, head, _, theta, q, k) in zip(
        steps, with_pair, without, first, strict=True
    ):
        # The part of the logit turns with the query; look for its peak at small steps.
        distances = np.linspace(-0.5, TURN / theta - 0.5, 20_001)
        parts = (q * np.exp(1j * theta * distances) * k.conjugate()).real
        assert step == pytest.approx(distances[int(parts.argmax())], abs=2e-3)
        for measured, channels in ((before, range(8)), (after, all_but(0))):
            attention, _ = attention_of(layers[layer], 0, head, channels=channels)
            assert measured == pytest.approx(attention[queries, queries - 1].mean(), rel=1e-3)


def test_effects_on_attention_are_measured_in_a_text_of_the_training_length(tiny_decoder):
    model = loud(tiny_decoder, factor=4.0).eval()
    model.layout = model.layout.map(lambda spectrum: spectrum.with_temperature(coefficient=3.0))
    rows = analyze_offset_features(Target("tiny", model, IDS)).rows
    layers = captured(model, IDS[:, :C])
    expected = [row["attention"] for heads in layers for row in fastest_pairs(heads)]
    measured = cells(rows, "attention", variant="token before")
    assert measured == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("windows", [[1], [1, None]])
def test_queries_that_see_their_own_key_alone_have_no_effects(tiny_decoder, windows):
    model = loud(tiny_decoder, windows=windows)
    rows = analyze_offset_features(Target("tiny", model, IDS)).rows
    before = rows[rows.variant == "token before"]
    assert {*before.layer} == ({1} if None in windows else set())
    assert {*rows.layer[rows.metric == "angle"]} == {0, 1}


def test_a_model_without_rotation_is_refused(tiny_decoder):
    with pytest.raises(NotApplicableError, match="expected a model that rotates"):
        analyze_offset_features(Target("tiny", tiny_decoder(layers=["nope"]), IDS))


def test_two_models_are_compared_pair_by_pair_and_by_the_bounds_of_both(tiny_decoder):
    """App. C: the same weights in a model of a longer context, with half the keys in a layer."""
    before, after = loud(tiny_decoder), loud(tiny_decoder)
    after.layout = replace(after.layout, training_length=256)
    with torch.no_grad():
        after.layers[1].self_attn.k_proj.weight.mul_(0.5)
    targets = [Target(n, m, IDS) for n, m in (("base", before), ("long", after))]
    results = offset_changes(*targets)
    for name, model in (("base", before), ("long", after)):
        means = list(pairs_of(model, IDS[:, :C]))
        radius = cells(results.rows, "key_radius", model=name)
        np.testing.assert_allclose(radius, [abs(k) for *_, k in means], rtol=1e-4)
        for bounds_of, length in (("base", C), ("long", 256)):
            if (name, bounds_of) == ("base", "long"):
                continue
            share = cells(
                results.rows, "share_possible", model=name, variant=f"bounds of {bounds_of}"
            )
            assert share.item() == np.mean([theta * length < TURN for *_, theta, _, _ in means])


def test_a_text_within_the_training_length_is_compared_as_a_whole(tiny_decoder):
    model = loud(tiny_decoder)
    rows = offset_changes(*(Target(name, model, IDS[:, :20]) for name in "ab")).rows
    assert {*rows.length} == {20}
    radii = [abs(k) for *_, k in pairs_of(model, IDS[:, :20])]
    np.testing.assert_allclose(cells(rows, "key_radius", model="b"), radii, rtol=1e-4)


def test_a_change_is_the_later_radius_less_the_earlier_one(tiny_decoder):
    targets = [Target(n, loud(tiny_decoder, f), IDS) for n, f in (("a", 40.0), ("b", 20.0))]
    results = offset_changes(*targets)
    (panel,) = drawn(results, "offset_changes_by_pair")
    radii = [cells(results.rows, "key_radius", model=name) for name in "ab"]
    np.testing.assert_allclose(panel.points[""][:, 1], radii[1] - radii[0])
    assert (panel.points[""][:, 1] < 0).all()
    for panel in drawn(results, "offset_changes_of_pairs"):
        assert [name for _, name in panel.horizontal] == ["lower bound of a", "lower bound of b"]


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"num_hidden_layers": 3}},
        {"model": {"head_dim": 16}},
        {"layers": ["half_rope"]},
    ],
    ids=["layers", "channels", "pairs"],
)
def test_models_of_other_shapes_have_no_pair_in_common_and_are_told_so(tiny_decoder, other):
    targets = [
        Target("base", loud(tiny_decoder), IDS),
        Target("b", loud(tiny_decoder, **other), IDS),
    ]
    results = offset_changes(*targets)
    assert not results.plots
    assert results.notes
    assert {*results.rows.variant} == {"bounds of base", "bounds of b"}


@pytest.mark.parametrize(
    ("possible", "chosen", "shown"),
    [
        ([0, 0, 0, 0], [], [1, 2]),  # the one that shrank most, and the one that grew most
        ([1, 0, 0, 1], [], [0, 3]),  # among those under the upper bound
        ([0, 0, 1, 0], [], [2]),
        ([1, 0, 0, 1], [2, 9, 1], [2, 1]),
        ([1, 0, 0, 1], [9], [0, 3]),
    ],
)
def test_the_pairs_that_changed_most_are_shown(monkeypatch, possible, chosen, shown):
    changes = [0.5, -2.0, 3.0, 1.0]
    was = pd.DataFrame({"pair": [0, 1, 2, 3] * 2, "key_radius": 4.0, "angle": 1.0})
    was = was.assign(possible=np.array(possible * 2, bool), lower_bound=3.0)
    now = was.assign(key_radius=was.key_radius + np.array(changes * 2))
    drawn = []
    monkeypatch.setattr(module, "draw", drawn.extend)
    changes_of_pairs({"a": was, "b": now}, chosen)
    assert [panel.title for panel in drawn] == [f"pair {pair}" for pair in shown]
    for panel, pair in zip(drawn, shown, strict=True):
        assert [points[:, 0].tolist() for points in panel.points.values()] == [
            [4.0] * 2,
            [4.0 + changes[pair]] * 2,
        ]


def test_heads_of_as_many_pairs_are_compared(tiny_decoder):
    targets = [
        Target(name, loud(tiny_decoder, layers=["rope", name]), IDS)
        for name in ("rope", "half_rope")
    ]
    results = offset_changes(*targets)
    assert len(results.plots) == 2
    assert not results.notes
    assert {*results.rows.layer[results.rows.metric == "key_radius"]} == {0}


def features_of(*rows):
    """A pair each: layer, head, pair, inv_freq, length of both means, possible."""
    columns = ["layer", "head", "pair", "inv_freq", "key_radius", "possible"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(query_radius=table.key_radius)


def test_the_heads_that_are_shown_have_the_longest_slow_pair_of_their_layer():
    features = features_of(
        (0, 0, 0, 1.0, 9.0, False),
        (0, 0, 1, 0.1, 3.0, True),
        (0, 1, 1, 0.1, 2.0, True),
        (1, 0, 0, 1.0, 8.0, False),
        (1, 1, 2, 0.0, 99.0, False),
        (2, 0, 1, 0.1, 1.0, True),
        (3, 1, 1, 0.1, 5.0, True),
        (3, 0, 1, 0.1, 4.0, True),
    )
    assert [*shown_heads(features, []).items()] == [((3, 1), 1), ((0, 0), 1), ((2, 0), 1)]
    assert shown_heads(features, [(1, 1), (1, 0), (0, 1)]) == {(1, 0): 0, (0, 1): 1}


def test_a_line_stands_before_the_first_pair_under_the_bound_of_every_spectrum():
    axes = Figure().subplots()
    features = features_of(
        *((0, 0, pair, 0.1, 1.0, pair >= 2) for pair in range(4)),
        *((0, 1, pair, 0.1, 1.0, pair >= 1) for pair in range(3)),
        *((1, 0, pair, 0.1, 1.0, pair >= 2) for pair in range(4)),
    )
    mark_upper_bound(axes, features, "upper bound")
    assert [line.get_xdata()[0] for line in axes.lines] == [0.5, 1.5]


def test_figures_have_the_vectors_and_terms_of_a_head(tiny_decoder):
    model = loud(tiny_decoder, factor=4.0)
    config = AnalysisConfig(chosen=[(1, 3)], pairs=[2])
    results = analyze_offset_features(Target("tiny", model, IDS, config))
    heads = captured(model, IDS)[1]
    maps = drawn(results, "offset_channels")
    np.testing.assert_allclose(maps["L1H3, queries"], heads.q[0, 3].T, rtol=1e-6)
    np.testing.assert_allclose(maps["L1H3, keys"], heads.k[0, 1].T, rtol=1e-6)
    (panel,) = drawn(results, "offset_points_L1H3")
    turns = heads.encoding.spectra[0].inv_freq[2] * C / TURN
    assert panel.title == f"2: {float(f'{turns:.2g}'):g} turns"
    np.testing.assert_allclose(panel.points["keys"], heads.k[0, 1][:, [2, 6]])
    terms, sums = drawn(results, "offset_contributions")
    (feature,), (total, others) = terms.lines, sums.lines
    assert feature.x[:2] == [1, 2]  # distances 0 and 1
    assert feature.x[-1] == C + 1
    np.testing.assert_allclose(np.add(feature.y, others.y), total.y)
    np.testing.assert_allclose(terms.faint.sum(axis=0), total.y)


def test_figures_have_the_effects_of_pairs_with_them_across(tiny_decoder):
    results = analyze_offset_features(Target("tiny", loud(tiny_decoder, factor=4.0), IDS))

    def check(panel, across, up, **where):
        columns = panel.points[""].T
        for column, metric in zip(columns, (across, up), strict=True):
            np.testing.assert_array_equal(column, cells(results.rows, metric, **where))

    on_first, margin = drawn(results, "offset_sinks")
    check(on_first, "attention", "attention_without", variant="first token")
    check(margin, "margin", "margin_of_pair")
    steps, before = drawn(results, "offset_steps")
    check(before, "attention", "attention_without", variant="token before")
    check(steps, "key_radius", "steps", pair=0)
