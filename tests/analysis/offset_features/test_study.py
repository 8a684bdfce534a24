"""Offset features in a section: Table 2 recounted by hand, bounds after a rescaling in closed form,
and the sentences made of the numbers."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import picture
from trainer.analysis.capture import capture
from trainer.analysis.offset_features.heads import fastest_pairs, steps_part
from trainer.analysis.offset_features.measure import OffsetFeatureSearch
from trainer.analysis.offset_features.study import OffsetFeaturesStudy
from trainer.analysis.studies.study import Target, run

IDS = torch.randint(50, (1, 90), generator=torch.Generator().manual_seed(4))
C = 32
TURN = 2 * math.pi


def loud(tiny_decoder, factor=40.0, **positional):
    """A model with long keys."""
    model = tiny_decoder(training_length=C, **positional)
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.k_proj.weight.mul_(factor)
    return model


def section_of(target):
    (section,) = run([OffsetFeaturesStudy(target)], target)
    return section


def pairs_of(model, ids=IDS):
    """Every (layer, head, pair, theta, mean query, mean key) with means as complex numbers."""
    layers = []
    capture(model, ids, layers.append)
    for heads in layers:
        for h in range(4):
            inv_freq = heads.encoding.spectra[h // 2].inv_freq
            q, k = (
                x.double().mean(dim=(0, 1)).tolist() for x in (heads.q[:, h], heads.k[:, h // 2])
            )
            for m, theta in enumerate(inv_freq):
                n = m + len(inv_freq)
                yield heads.layer, h, m, theta, complex(q[m], q[n]), complex(k[m], k[n])


def recounted(model, radius, length=C, change=lambda m, theta: theta):
    """(pairs, under the upper bound, also above the lower bound, above it less 0.1 rad)."""
    large = upper = lower = relaxed = 0
    for _, _, m, theta, q, k in pairs_of(model):
        if abs(k) < radius:
            continue
        turned = change(m, theta) * length
        angle = cmath.phase(k / q) % TURN
        large += 1
        upper += turned < TURN
        lower += turned < TURN and angle >= math.pi + turned / 2
        relaxed += turned < TURN and angle >= math.pi + turned / 2 - 0.1
    return large, upper, lower, relaxed


def test_table_2_is_recounted(tiny_decoder):
    model = loud(tiny_decoder)
    section = section_of(Target("tiny", model, IDS))
    table = section.grids[0]
    for radius, row in zip((6, 9, 12), table.rows, strict=True):
        large, *counts = recounted(model, radius)
        assert large > 0
        assert row == (f"{radius}", large, *(f"{n / large:.0%}" for n in counts))
        upper, lower, relaxed = (f"{n / large:.0%}" for n in counts)
        assert (
            f"Of the {large} pairs of radius {radius} or more, {upper} are under the upper bound, "
            f"{lower} also above the lower bound, {relaxed} above it less 0.1 rad."
        ) in section.findings


def test_every_pair_is_in_the_numbers_and_the_file(tiny_decoder):
    model = loud(tiny_decoder)
    section = section_of(Target("tiny", model, IDS))
    expected = [
        (layer, h, m, theta, abs(q), abs(k), cmath.phase(k / q) % TURN)
        for layer, h, m, theta, q, k in pairs_of(model)
    ]
    scatter = section.pictures[0]
    np.testing.assert_allclose(np.array([row[:7] for row in scatter.rows]), expected, rtol=1e-4)
    np.testing.assert_allclose(
        section.numbers["features"]["angle"], [row[6] for row in expected], atol=1e-4
    )
    thetas = np.array([row[3] for row in expected])
    possible = thetas < TURN / C
    assert section.findings[0] == (
        f"{possible.mean():.0%} of {len(thetas)} pairs turn less than once in {C} tokens; the "
        f"mean of their lower bounds is {(math.pi + thetas[possible] * C / 2).mean():.2f} rad."
    )


@pytest.mark.parametrize("negated", [False, True])
def test_the_strongest_pair_is_followed_over_all_distances(tiny_decoder, negated):
    """With its layer's queries turned round the strongest pair is no feature."""
    model = loud(tiny_decoder)
    if negated:
        with torch.no_grad():
            model.layers[1].self_attn.q_proj.weight.neg_()
    section = section_of(Target("tiny", model, IDS))
    slow = [row for row in pairs_of(model) if row[3] < TURN / C]
    layer, head, pair, theta, q, k = max(slow, key=lambda row: abs(row[4]) * abs(row[5]))
    # The query turns, the key stands still.
    parts = [
        (q * cmath.exp(1j * theta * d) * k.conjugate()).real / math.sqrt(8) for d in range(C + 1)
    ]
    text = (
        f"The strongest pair under the upper bound is L{layer}H{head}, pair {pair}: angle "
        f"{cmath.phase(k / q) % TURN:.2f} rad, lower bound {math.pi + theta * C / 2:.2f}. Its part "
        f"of the logit is {parts[0]:.1f} at distance 0 and "
    )
    if max(parts[1:]) < parts[0]:
        text += (
            f"below that up to {C} tokens: an offset feature, lowest ({min(parts):.1f}) at "
            f"{parts.index(min(parts))}."
        )
    else:
        text += f"not always below that up to {C} tokens: no offset feature."
    assert text in section.findings
    assert ("an offset feature" in text) != negated
    curves = picture(section, "offset_contributions")
    term = [row[4] for row in curves.rows if row[:3] == (layer, head, f"pair {pair}")]
    np.testing.assert_allclose(curves.figure.axes[0].lines[0].get_ydata(), term)
    by_row = {row[:4]: row[4] for row in curves.rows}
    assert by_row[layer, head, f"pair {pair}", 5] == pytest.approx(parts[5], rel=1e-4)
    of_head = [row for row in pairs_of(model) if row[:2] == (layer, head)]
    total = sum((a * cmath.exp(5j * t) * b.conjugate()).real for *_, t, a, b in of_head)
    all_pairs = by_row[layer, head, "all pairs", 5]
    assert all_pairs == pytest.approx(total / math.sqrt(8), rel=1e-4)
    assert by_row[layer, head, f"all but pair {pair}", 5] == pytest.approx(
        all_pairs - parts[5], rel=1e-4
    )


METHODS = {
    "not rescaled": lambda s: lambda m, theta: theta,
    "PI": lambda s: lambda m, theta: theta / s,
    "NTK": lambda s: lambda m, theta: theta * s ** (-m / 3),
}


@pytest.mark.parametrize("method", METHODS)
def test_bounds_after_a_rescaling_are_those_of_its_frequencies(tiny_decoder, method):
    model = loud(tiny_decoder)
    section = section_of(Target("tiny", model, IDS))
    assert section.numbers["extended_length"] == 90  # of the text, which is longer than C
    change = METHODS[method](90 / C)
    measured = section.numbers["methods"][method]
    turned = np.array([change(m, theta) * 90 for _, _, m, theta, _, _ in pairs_of(model)])
    assert measured["share"] == pytest.approx((turned < TURN).mean())
    assert measured["mean_lower_bound"] == pytest.approx(
        (math.pi + turned[turned < TURN] / 2).mean()
    )
    large, upper, lower, _ = recounted(model, 6, 90, change)
    assert measured["recall"][0]["upper"] == pytest.approx(upper / large)
    (row,) = (row for row in section.grids[1].rows if row[0] == method)
    assert row[1] == 90
    assert row[4:] == (f"{upper / large:.0%}", f"{lower / large:.0%}")
    (sentence,) = (f for f in section.findings if f.startswith("At 90 tokens"))
    assert f"{method} {lower / large:.0%}" in sentence
    bounds = {row[:2]: row[2:] for row in section.pictures[-1].rows}
    theta = model.layout.layers[0].spectra[0].inv_freq[2]
    turns = change(2, theta) * 90 / TURN
    assert bounds[method, 2] == pytest.approx((turns, math.pi * (1 + turns)))


def test_a_short_text_is_extended_to_four_times_the_training_length(tiny_decoder):
    target = Target("tiny", tiny_decoder(), IDS[:, :20])
    assert section_of(target).numbers["extended_length"] == 4 * C


def test_quiet_keys_leave_the_table_empty(tiny_decoder):
    model = loud(tiny_decoder, factor=0.1)
    section = section_of(Target("tiny", model, IDS))
    longest = max(abs(k) for *_, k in pairs_of(model))
    assert f"No pair has a radius of 6; the largest is {longest:.2f}." in section.findings
    assert section.grids[0].rows[0] == ("6", 0, "–", "–", "–")


@pytest.mark.parametrize(
    "positional",
    [
        pytest.param({"layers": ["p_rope", "nope"]}, id="pairs that stand still"),
        pytest.param({"layers": ["half_rope", "alibi"]}, id="half, and ALiBi"),
        pytest.param(
            {"layers": ["rope_id", "rope"], "encodings": {"rope_id": {"fastest_wavelength": 4.0}}},
            id="fast pairs, and all",
        ),
    ],
)
def test_layouts_of_several_kinds_have_all_pictures(tiny_decoder, positional):
    target = Target("tiny", loud(tiny_decoder, **positional), IDS, chosen=((0, 0), (1, 1)))
    section = section_of(target)
    rotating = {row[0] for row in picture(section, "offset_features").rows}
    shown = {row[0] for row in picture(section, "offset_channels").rows}
    assert shown == rotating
    assert {row[0] for row in picture(section, "offset_sinks").rows} <= rotating
    moving = sum(theta > 0 for *_, theta, _, _ in pairs_of(target.model))
    drawn = picture(section, "offset_features").figure.axes[0].collections[0].get_offsets()
    assert len(drawn) == moving


def test_without_slow_pairs_the_strongest_one_is_shown_and_is_no_feature(tiny_decoder):
    model = loud(tiny_decoder, encodings={"rope": {"base": 1.5}})
    section = section_of(Target("tiny", model, IDS))
    assert section.findings[0].startswith("0% of 32 pairs")
    assert not any("under the upper bound is" in finding for finding in section.findings)
    assert "sinks" not in section.numbers
    layer, head, pair, *_ = max(pairs_of(model), key=lambda row: abs(row[4]) * abs(row[5]))
    points = picture(section, "offset_feature_points")
    assert points.rows[0][:3] == (layer, head, pair)
    assert "strongest pairs of these heads" in points.caption


def test_every_pair_and_every_channel_of_a_chosen_head(tiny_decoder):
    model = loud(tiny_decoder)
    section = section_of(Target("tiny", model, IDS, chosen=((1, 2),)))
    layers = []
    capture(model, IDS, layers.append)
    q, k = layers[1].q[0, 2].tolist(), layers[1].k[0, 1].tolist()
    points = picture(section, "offset_points_L1H2")
    assert [row[:4] for row in points.rows] == [(1, 2, m, i) for m in range(4) for i in range(90)]
    *_, pair, token, _, _, first, second = points.rows[2 * 90 + 7]
    assert [first, second] == pytest.approx([k[token][pair], k[token][pair + 4]])
    channels = {row[2:5]: row[5] for row in picture(section, "offset_channels").rows}
    assert len(channels) == 2 * 8 * 90
    assert channels["query", 6, 11] == pytest.approx(q[11][6])
    assert channels["key", 3, 89] == pytest.approx(k[89][3])
    curves = picture(section, "offset_contributions").rows
    assert {row[2] for row in curves} >= {f"pair {m}" for m in range(4)} | {"all pairs"}
    assert min(row[3] for row in curves) == 0


def test_pairs_can_be_chosen(tiny_decoder):
    target = Target("tiny", loud(tiny_decoder), IDS, chosen=((0, 1), (1, 2)), pairs=(3, 1))
    section = section_of(target)
    for name in ("offset_points_L0H1", "offset_points_L1H2"):
        assert {row[2] for row in picture(section, name).rows} == {1, 3}


def test_sinks_by_one_feature(tiny_decoder):
    """The pair that is taken out is the head's strongest under the upper bound."""
    model = loud(tiny_decoder)
    section = section_of(Target("tiny", model, IDS))
    strongest = {}
    for layer, head, pair, theta, q, k in pairs_of(model):
        if theta < TURN / C:
            measured = strongest.setdefault((layer, head), [])
            measured.append((abs(q) * abs(k), pair))
    rows = picture(section, "offset_sinks").rows
    assert {row[:2]: row[2] for row in rows} == {place: max(f)[1] for place, f in strongest.items()}
    sinks = [row for row in rows if row[3] >= 0.1]
    assert sinks
    (sentence,) = (text for text in section.findings if "explains" in text)
    assert f"{len(sinks)} put 10% or more of their attention on the first token" in sentence
    assert (
        f"Without the strongest such pair of each it is {np.mean([r[4] for r in sinks]):.0%}"
        in (sentence)
    )
    assert len(section.grids[2].rows) == min(10, len(sinks))
    np.testing.assert_allclose(
        section.numbers["sinks"]["explained"],
        [1 - row[4] / row[3] for row in rows],
        rtol=5e-6,
        atol=1e-5,
    )
    fast = np.mean([row[6] for row in sinks])
    assert f"(without its strongest faster pair {fast:.0%})" in sentence


def looped_attention_on_the_token_before(heads, head, pair=None):
    """One query and one key at a time, without a pair's part of the scores where one is given;
    queries are those in the last three quarters of the training length."""
    measured = []
    for q, k in zip(heads.rotated_q[:, head], heads.rotated_k[:, head // 2], strict=True):
        channels = [c for c in range(8) if pair is None or c not in (pair, pair + 4)]
        for i in range(C // 4, C):
            scores = [
                float(q[i, channels].double() @ k[j, channels].double()) for j in range(i + 1)
            ]
            weights = [math.exp((s - max(scores)) / math.sqrt(8)) for s in scores]
            measured.append(weights[i - 1] / sum(weights))
    return sum(measured) / len(measured)


def test_the_fastest_pair_of_every_head_by_its_angle_and_the_token_before(tiny_decoder):
    """Sec. 4.3.1: the dot product of feature 0 is largest at distance 1 where phi is theta."""
    model = loud(tiny_decoder)
    section = section_of(Target("tiny", model, IDS))
    rows = picture(section, "offset_steps").rows
    layers = []
    capture(model, IDS, layers.append)
    first = [row for row in pairs_of(model) if row[2] == 0]
    assert len(rows) == len(first) == 8
    for row, (layer, head, _, theta, q, k) in zip(rows, first, strict=True):
        assert row[:4] == (layer, head, 0, theta)
        assert row[4:7] == pytest.approx((abs(q), abs(k), cmath.phase(k / q) % TURN), rel=1e-4)
        # The part of the logit turns with the query; look for its peak at small steps.
        distances = np.linspace(-0.5, TURN / theta - 0.5, 20_001)
        parts = (q * np.exp(1j * theta * distances) * k.conjugate()).real
        peak = distances[int(parts.argmax())]
        assert row[7] == pytest.approx(peak, abs=2e-3)
        expected = [looped_attention_on_the_token_before(layers[layer], head, m) for m in (None, 0)]
        assert row[8:] == pytest.approx(expected, rel=1e-3)
    np.testing.assert_allclose(
        section.numbers["steps"]["steps"], [row[7] for row in rows], rtol=5e-6
    )
    at_step = [0.5 <= row[7] < 1.5 for row in rows]
    large = sorted(rows, key=lambda row: row[5])[-1]
    (sentence,) = (f for f in section.findings if f.startswith("The fastest pair"))
    assert (
        f"and in {np.mean(at_step):.0%} of all 8; of angles at random that would be 16%" in sentence
    )
    of_large = np.mean([hit for row, hit in zip(rows, at_step, strict=True) if row[5] == large[5]])
    assert f"the token before in {of_large:.0%} of the" in sentence
    strongest = max(rows, key=lambda row: row[4] * row[5])
    assert section.grids[-1].rows[0][:2] == (f"L{strongest[0]}H{strongest[1]}", "0")


@pytest.mark.parametrize(("layers", "theta"), [(["rope"], 1.0), (["rope_id"], TURN / 4)])
def test_a_planted_pair_one_step_apart_selects_the_token_before(tiny_decoder, layers, theta):
    """Queries of pair 0 are (8, 0) everywhere and keys one step ahead of them; no other channel
    says anything."""
    model = tiny_decoder(
        training_length=C, layers=layers, encodings={"rope_id": {"fastest_wavelength": 4.0}}
    )
    pairs = len(model.layout.spectra[0].inv_freq)
    layers_read = []
    capture(model, IDS, layers_read.append)
    planted = []
    for heads in layers_read:
        q, k = torch.zeros_like(heads.q), torch.zeros_like(heads.k)
        q[..., 0], k[..., 0], k[..., pairs] = 8.0, 8 * math.cos(theta), 8 * math.sin(theta)
        turned = [x.clone() for x in (q, k)]
        for x in turned:
            phase = theta * torch.arange(x.shape[2])
            a, b = x[..., 0].clone(), x[..., pairs].clone()
            x[..., 0], x[..., pairs] = (
                a * phase.cos() - b * phase.sin(),
                a * phase.sin() + b * phase.cos(),
            )
        planted.append(replace(heads, q=q, k=k, rotated_q=turned[0], rotated_k=turned[1]))
    fastest, means = {}, OffsetFeatureSearch()
    for heads in planted:
        fastest |= fastest_pairs(heads)
        means.update(heads)
    part = steps_part(fastest, means.result(), 2)
    assert part.numbers["steps"]["steps"] == pytest.approx([1.0] * 8, abs=1e-5)
    assert "token before in 100% of the 8 heads" in part.findings[0]
    before, after = (
        np.array(part.numbers["steps"][name]) for name in ("attention", "attention_without")
    )
    assert (before > 3 * after).all()
    # Without the pair nothing is left to tell keys apart.
    np.testing.assert_allclose(after, np.mean([1 / (i + 1) for i in range(C // 4, C)]), rtol=1e-5)


def test_a_model_without_rotation_is_a_problem(tiny_decoder):
    assert OffsetFeaturesStudy.problems(Target("tiny", tiny_decoder(), IDS)) == []
    (problem,) = OffsetFeaturesStudy.problems(Target("tiny", tiny_decoder(layers=["nope"]), IDS))
    assert "without rotation in any head" in problem


def test_effects_on_attention_are_measured_in_a_text_of_the_training_length(tiny_decoder):
    model = loud(tiny_decoder, factor=4.0).eval()
    model.layout = model.layout.map(lambda spectrum: spectrum.with_temperature(coefficient=3.0))
    steps, layers = section_of(Target("tiny", model, IDS)).numbers["steps"], []
    capture(model, IDS[:, :C], layers.append)
    expected = {place: row for heads in layers for place, row in fastest_pairs(heads).items()}
    places = zip(steps["layer"], steps["head"], steps["pair"], strict=True)
    for place, attention in zip(places, steps["attention"], strict=True):
        assert attention == pytest.approx(expected[place][0], rel=1e-4)
