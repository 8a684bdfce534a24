"""Offset features of two models: radii, angles and bounds recounted by hand, planted changes, and
models that cannot be compared head by head."""

from __future__ import annotations

import cmath
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import picture
from tests.analysis.offset_features.test_study import TURN, loud, pairs_of
from trainer.analysis.offset_features.changes import OffsetChanges
from trainer.analysis.studies.study import Target

IDS = torch.randint(50, (1, 90), generator=torch.Generator().manual_seed(4))
C, LONGER = 32, 256


def extended(tiny_decoder, **positional):
    """The same weights in a model of a longer context."""
    model = loud(tiny_decoder, **positional)
    model.layout = replace(model.layout, training_length=LONGER)
    return model


@pytest.fixture
def models(tiny_decoder):
    before, after = loud(tiny_decoder), extended(tiny_decoder)
    with torch.no_grad():
        after.layers[1].self_attn.k_proj.weight.mul_(0.5)
    return before, after


@pytest.fixture
def section(models):
    before, after = (Target(n, m, IDS) for n, m in zip(("base", "long"), models, strict=True))
    return OffsetChanges(before, after).run()


def means_of(model):
    """Rows of the file of one model: the text is read no further than the shorter context."""
    return [
        (layer, h, m, abs(k), cmath.phase(k / q) % TURN)
        for layer, h, m, _, q, k in pairs_of(model, IDS[:, :C])
    ]


def test_every_pair_of_both_models_is_in_the_file(section, models):
    rows = picture(section, "offset_changes_by_pair").rows
    before, after = map(means_of, models)
    expected = [
        (*was[:3], was[3], now[3], was[4], now[4]) for was, now in zip(before, after, strict=True)
    ]
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(section.numbers["radius_after"], [row[4] for row in rows], rtol=5e-6)
    json.dumps(section.numbers, allow_nan=False)


def test_both_models_are_counted_by_their_own_bounds_and_the_later_one_by_the_earlier(
    section, models
):
    before, after = models
    cases = (
        ("base, own bounds", before, C),
        ("long, own bounds", after, LONGER),
        ("long, bounds of base", after, C),
    )
    rows = {(row[0], row[4]): row for row in section.grids[0].rows}
    for name, model, length in cases:
        thetas = {(a, h, m): theta for a, h, m, theta, *_ in pairs_of(model)}
        large = [pair for pair in means_of(model) if pair[3] >= 6]
        under = [pair for pair in large if thetas[pair[:3]] * length < TURN]
        within = [pair for pair in under if pair[4] >= math.pi + thetas[pair[:3]] * length / 2]
        row = rows[name, "6"]
        assert row[5:8] == (
            len(large), f"{len(under) / len(large):.0%}", f"{len(within) / len(large):.0%}"
        )  # fmt: skip
        assert row[2] == f"{np.mean([t * length < TURN for t in thetas.values()]):.0%}"


def test_what_became_of_pairs_that_lost_their_bound(section, models):
    rows = picture(section, "offset_changes_by_pair").rows
    thetas = [theta for *_, theta, _, _ in pairs_of(models[0])]
    long = [max(row[3], row[4]) >= 6 for row in rows]
    for sentence, among in (
        ("no longer are", [LONGER * t >= TURN > C * t for t in thetas]),
        ("still are", [LONGER * t < TURN for t in thetas]),
    ):
        changes = [
            row[4] - row[3]
            for row, big, chosen in zip(rows, long, among, strict=True)
            if big and chosen
        ]
        assert changes
        (finding,) = (text for text in section.findings if sentence in text)
        assert f"the {len(changes)} long pairs" in finding
        assert f"{np.mean(changes):+.2f} on average" in finding
        assert f"{np.mean(np.array(changes) < 0):.0%} of them shrink" in finding


def test_angles_are_shown_as_the_shorter_way_that_they_turned(section):
    shown = picture(section, "offset_changes_by_pair")
    expected = []
    for _, _, _, before, after, was, now in shown.rows:
        if max(before, after) >= 6:
            turned = (now - was) % TURN
            expected.append(turned if turned < math.pi else turned - TURN)
    drawn = np.concatenate([dots.get_offsets()[:, 1] for dots in shown.figure.axes[1].collections])
    np.testing.assert_allclose(sorted(drawn[np.isfinite(drawn)]), sorted(expected), atol=1e-3)
    assert expected


def test_pairs_are_those_that_changed_most_or_those_asked_for(section, models):
    rows = picture(section, "offset_changes_by_pair").rows
    slow = [m for m in range(4) if 10_000 ** (-m / 4) * C < TURN]
    means = {m: np.mean([row[4] - row[3] for row in rows if row[2] == m]) for m in slow}
    shown = {row[2] for row in picture(section, "offset_changes_of_pairs").rows}
    assert shown == {min(means, key=means.get), max(means, key=means.get)}
    before, after = (Target(n, m, IDS, pairs=(2,)) for n, m in zip("ab", models, strict=True))
    asked = picture(OffsetChanges(before, after).run(), "offset_changes_of_pairs")
    assert {row[2] for row in asked.rows} == {2}
    assert [axes.get_title() for axes in asked.figure.axes] == ["pair 2"]


def test_a_model_beside_itself_does_not_change(models):
    section = OffsetChanges(Target("a", models[0], IDS), Target("b", models[0], IDS)).run()
    assert section.numbers["radius_before"] == section.numbers["radius_after"]
    assert not any("no longer" in text for text in section.findings)
    by_model = {}
    for row in section.grids[0].rows:
        by_model.setdefault(row[0], []).append(row[1:])
    assert len(by_model) == 3
    assert len({str(rows) for rows in by_model.values()}) == 1


def test_layers_that_rotate_in_both_are_compared(tiny_decoder, models):
    hybrid = extended(tiny_decoder, layers=["nope", "rope"])
    section = OffsetChanges(Target("a", models[0], IDS), Target("b", hybrid, IDS)).run()
    assert set(section.numbers["layer"]) == {1}
    part = extended(tiny_decoder, layers=["p_rope"])
    section = OffsetChanges(Target("a", models[0], IDS), Target("b", part, IDS)).run()
    assert set(section.numbers["pair"]) == {0, 1, 2, 3}


def test_models_without_a_common_layer_or_of_another_shape_have_a_table_alone(tiny_decoder):
    first = loud(tiny_decoder, layers=["rope", "nope"])
    second = loud(tiny_decoder, layers=["nope", "rope"])
    section = OffsetChanges(Target("a", first, IDS), Target("b", second, IDS)).run()
    assert section.findings == ("Heads were not compared: no layer rotates in both models.",)
    other = loud(tiny_decoder, model={"num_hidden_layers": 3})
    section = OffsetChanges(Target("a", first, IDS), Target("b", other, IDS)).run()
    assert "the models have 2 x 4 and 3 x 4" in section.findings[0]
    assert not section.pictures
    assert {row[0] for row in section.grids[0].rows} == {"a, own bounds", "b, own bounds"}
