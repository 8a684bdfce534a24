"""Two models side by side: numbers against loops, torch and numpy; sentences against numbers."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.analysis.attention_examples import attention_of
from tests.report.described import check
from trainer.analysis.capture import capture
from trainer.analysis.drop import (
    MEASURES,
    DropStudy,
    head_change,
    head_figure,
    heads_part,
    indicator_figure,
    position_figure,
    read,
    recovery,
    recovery_figure,
)
from trainer.analysis.studies.study import Target
from trainer.common.errors import UserError

IDS = torch.randint(50, (2, 72), generator=torch.Generator().manual_seed(0))
TRAINED = 24
CURVE = [
    *((step, 2.0) for step in range(10, 110, 10)),
    *((step, 2.0 + math.exp(-(step - 100) / 50)) for step in range(110, 210, 10)),
]


@pytest.fixture
def models(tiny_decoder):
    return tiny_decoder(training_length=TRAINED), tiny_decoder(
        training_length=TRAINED, layers=["nope"]
    )


@pytest.fixture
def section(models):
    before, after = (
        Target(name, model, IDS) for name, model in zip(("RoPE", "DroPE"), models, strict=True)
    )
    return DropStudy(before, after, CURVE, 100).run()


def test_a_temperature_of_long_texts_does_not_change_heads_within(models):
    expected = read(models[1], IDS, within=TRAINED).heads
    models[1].layout = models[1].layout.map(lambda one: one.with_temperature(coefficient=2.0))
    for name, values in read(models[1], IDS, within=TRAINED).heads.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-6)


def test_heads_are_read_within_the_training_length(models):
    found, layers = read(models[0], IDS, within=TRAINED).heads, []
    capture(models[0], IDS, layers.append)
    for heads in layers:
        for head in range(4):
            maps = [attention_of(heads, text, head)[0][:TRAINED, :TRAINED] for text in range(2)]
            expected = {name: [] for name in MEASURES}
            for a in maps:
                for i in range(1, TRAINED):
                    row = a[i, : i + 1]
                    expected["distance"].append(row @ np.arange(i, -1, -1))
                    expected["entropy"].append(-(row * np.log(row)).sum() / math.log(i + 1))
                    expected["sink_mass"].append(row[0])
                    expected["diagonal"].append((row[i] * (i + 1) - 1) / i)
                    expected["previous"].append((row[i - 1] * (i + 1) - 1) / i)
            for name, values in expected.items():
                queries = TRAINED if name in ("diagonal", "previous") else TRAINED - 1
                mean = sum(values) / (2 * queries)
                assert found[name][heads.layer, head] == pytest.approx(mean, rel=1e-3, abs=1e-6)


def test_indicators_by_the_length_of_the_prefix(models):
    found, layers = read(models[0], IDS, within=TRAINED), []
    capture(models[0], IDS, layers.append)
    assert found.lengths == [32, 64, 72]
    sinks, ranks = np.zeros(3), np.zeros(3)
    for at, (start, stop) in enumerate(((1, 32), (32, 64), (64, 72))):
        sinks[at] = np.mean(
            [
                attention_of(h, text, head)[0][start:stop, 0].mean()
                for h in layers
                for text in (0, 1)
                for head in range(4)
            ]
        )
        values = [
            np.linalg.svd(h.rotated_k[text, head, :stop].double().numpy(), compute_uv=False)
            for h in layers
            for text in (0, 1)
            for head in range(2)
        ]
        ranks[at] = np.mean([(s**2).sum() / s[0] ** 2 for s in values])
    np.testing.assert_allclose(found.indicators["sink_mass"], sinks, rtol=1e-4)
    np.testing.assert_allclose(found.indicators["key_stable_rank"], ranks, rtol=1e-4)


def test_losses_and_divergences_by_position(models, section):
    """Their sentences too, within and beyond the training length."""
    with torch.no_grad():
        p, q = (model(IDS).double().log_softmax(-1)[:, :-1] for model in models)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(0).numpy()
    first, second = (-x.gather(-1, IDS[:, 1:, None])[..., 0].mean(0).numpy() for x in (p, q))
    for where, among in (("Within", slice(TRAINED)), ("Beyond", slice(TRAINED, None))):
        (finding,) = [text for text in section.findings if text.startswith(where)]
        assert f"loss of RoPE is {first[among].mean():.3f}" in finding
        assert f"that of DroPE {second[among].mean():.3f}" in finding
        assert f"{kl[among].mean():.3f} nats apart" in finding
    edges = section.numbers["edges"]
    for name, curve in (("kl", kl), ("loss_before", first), ("loss_after", second)):
        means = [curve[a:b].mean() for a, b in pairwise(edges)]
        np.testing.assert_allclose(section.numbers[name], means, rtol=1e-3)


def measures(**given):
    """Two layers of two heads that do nothing, but for what is given."""
    return {name: np.array(given.get(name, np.zeros((2, 2))), dtype=float) for name in MEASURES}


def test_change_counts_every_measure_by_what_is_usual_in_it():
    was = measures()
    now = measures(distance=[[0, 100], [0, 0]], entropy=[[0.1, 0], [0.1, 0]])
    # Root mean squares 50 and 0.1 / sqrt(2); the other measures do not change at all.
    np.testing.assert_allclose(head_change(was, now), [[2**0.5, 2], [2**0.5, 0]])


def test_the_head_that_changed_most_comes_first():
    was = measures(distance=[[1, 2], [3, 4]])
    part = heads_part(was, measures(distance=[[1, 2], [30, 5]]), ("a", "b"))
    assert part.findings[0].startswith("Layer 1 head 0 changed most: its mean distance goes from 3")
    assert "the mean distance goes from 2.5 to 9.5 tokens" in part.findings[0]
    rows = part.grids[0].rows
    assert [row[:3] for row in rows[:2]] == [(1, 0, "3 → 30"), (1, 1, "4 → 5")]


def test_what_became_of_positional_heads():
    was = measures(diagonal=[[0.9, 0.6], [0.5, 0.1]])
    now = measures(diagonal=[[0.2, 0.7], [0.4, 0.8]], previous=[[0, 0.6], [0.5, 0]])
    _, own, previous = heads_part(was, now, ("a", "b")).findings
    assert own == (
        "3 heads of a have Aᶜ ≥ 0.5 towards its own token; 1 of them still has it in b, and 1 "
        "gained it. The strongest, layer 0 head 0, goes from 0.900 to 0.200."
    )
    assert previous.startswith("No head of a has Aᶜ ≥ 0.5 towards the previous token; 2 gained it")


def test_a_model_beside_itself(models):
    target = Target("one", models[0], IDS)
    section = DropStudy(target, target).run()
    np.testing.assert_allclose(section.numbers["kl"], 0, atol=1e-12)
    assert "drop_recovery" not in {picture.name for picture in section.pictures}
    assert all(row[2].split(" → ")[0] == row[2].split(" → ")[1] for row in section.grids[0].rows)


def test_models_of_another_shape_are_compared_but_for_their_heads(models, tiny_decoder):
    other = tiny_decoder(training_length=TRAINED, model={"num_hidden_layers": 3})
    section = DropStudy(Target("a", models[0], IDS), Target("b", other, IDS)).run()
    assert "Heads were not compared: the models have 2 x 4 and 3 x 4" in section.findings[0]
    assert {picture.name for picture in section.pictures} == {"drop_positions", "drop_indicators"}


def test_numbers_can_be_written_and_every_picture_has_its_own(section):
    json.dumps(section.numbers, allow_nan=False)
    names = [picture.name for picture in section.pictures]
    assert len(set(names)) == len(names) == 5
    for picture in section.pictures:
        assert {len(row) for row in picture.rows} == {len(picture.header)}


def test_a_loss_that_does_not_come_back(section):
    (finding,) = [text for text in section.findings if text.startswith("Before the drop")]
    end = np.mean([loss for _, loss in CURVE[-5:]])
    assert finding == (
        "Before the drop the training loss is 2.000; after it, it rises to "
        f"{2 + math.exp(-0.2):.3f} and ends {end - 2:.3f} nats above."
    )


def test_a_loss_that_the_drop_does_not_raise(models):
    target = Target("one", models[0], IDS)
    falling = [(step, 2.0) for step in range(0, 100, 10)] + [(110, 1.75), (120, 1.5)]
    (finding,) = DropStudy(target, target, falling, 100).run().findings[-1:]
    assert finding == (
        "Before the drop the training loss is 2.000; after it, it is at most 1.750 and ends "
        "0.375 nats below."
    )


def test_a_loss_that_was_never_away_is_not_back(models):
    target = Target("one", models[0], IDS)
    falling = [(step, 2.0) for step in range(0, 100, 10)]
    falling += [(step, 1.5) for step in range(110, 180, 10)]
    (finding,) = DropStudy(target, target, falling, 100).run().findings[-1:]
    assert finding.endswith("after it, it is at most 1.500 and ends 0.500 nats below.")


def test_a_loss_that_comes_back():
    """The mean of five is back at 2 when five of 3, 2.5, 2, 1.5, 1, 1 ... are: at the fifth."""
    losses = [3, 2.5, 2, 1.5, 1, 1, 1]
    curve = [(10, 9.0), *((step, 2.0) for step in range(20, 70, 10))]
    curve += [(step, float(loss)) for step, loss in zip(range(70, 140, 10), losses, strict=True)]
    found = recovery(curve, 60)
    assert (found.before, found.peak, found.back) == (2.0, 3.0, 110)
    assert found.end == pytest.approx(1.3)
    assert recovery(curve, 0) is None
    assert recovery(curve, 130) is None


def test_losses_that_are_no_numbers_are_passed_over(models):
    target = Target("one", models[0], IDS)
    study = DropStudy(target, target, [*CURVE, (220, math.nan), (0, 2.0)], 100)
    assert study.curve == [(0, 2.0), *CURVE]


def test_what_cannot_be_compared_is_refused(models, tiny_decoder):
    before = Target("a", models[0], IDS)
    other = tiny_decoder(model={"vocab_size": 60})
    with pytest.raises(UserError, match="share a vocabulary, got 50 and 60"):
        DropStudy(before, Target("b", other, IDS))
    with pytest.raises(UserError, match="must read the same tokens"):
        DropStudy(before, Target("b", models[1], IDS.flip(0)))
    with pytest.raises(UserError, match="expected 2 tokens or more, got 1"):
        DropStudy(Target("a", models[0], IDS[:, :1]), Target("b", models[1], IDS[:, :1]))


NAMES = ("RoPE", "DroPE")


def test_heads_before_and_after_lie_on_a_line_where_nothing_changed():
    panels = {"sink": (np.array([[0.0, 1]]), np.array([[0.5, 1]]))}
    check(
        head_figure(panels, NAMES),
        """
        panel 1,1 of 1x1 'sink'
          x linear 'RoPE'
          y linear 'DroPE'
          line: x 0 1; y 0 1
          points 0..1 of 0 0: x 0 1; y 0.5 1
        bar 'layer' 0..1
        """,
    )


def test_predictions_and_losses_by_position():
    middles, losses = np.array([8, 64, 128]), [np.array([5.0, 4, 6]), np.array([5, 4.5, 4.25])]
    figure = position_figure(middles, np.array([0.5, 0.25, 2]), losses, NAMES, 96)
    check(
        figure,
        """
        panel 1,1 of 1x2 'next-token predictions'
          x log 'tokens read'
          y linear 'KL divergence (nats)'
          line: x 8 64 128; y 0.5 0.25 2
          line: upright at 96
        panel 1,2 of 1x2 'loss'
          x log 'tokens read'
          y linear 'loss (nats/token)'
          line: x 8 64 128; y 5 4 6
          line: x 8 64 128; y 5 4.5 4.25
          line: upright at 96
        legend 'KL(RoPE ‖ DroPE)', 'RoPE', 'DroPE', 'training length'
        """,
    )


def test_indicators_by_length_the_first_of_which_may_be_logarithmic():
    """Of seven lengths every second one has a tick."""
    lengths = [32 * 2**n for n in range(7)]
    panels = {
        "offset": (np.geomspace(1, 64, 7), np.ones(7)),
        "sink": (np.geomspace(1, 64, 7), np.ones(7)),
    }
    check(
        indicator_figure(lengths, panels, NAMES, 64),
        """
        panel 1,1 of 1x2 'offset'
          x log 'tokens read'
          y log
          line: x 32 64 128 256 512 1024 2048; y 1 2 4 8 16 32 64
          line: x 32 64 128 256 512 1024 2048; y 1 1 1 1 1 1 1
          line: upright at 64
        panel 1,2 of 1x2 'sink'
          x log 'tokens read'
          y linear
          line: x 32 64 128 256 512 1024 2048; y 1 2 4 8 16 32 64
          line: x 32 64 128 256 512 1024 2048; y 1 1 1 1 1 1 1
          line: upright at 64
        legend 'RoPE', 'DroPE', 'training length'
        """,
    )
    few = {"sink": (np.ones(6), np.ones(6))}
    assert (
        indicator_figure(lengths[:6], few, NAMES, 64).axes[0].get_xticks().tolist() == lengths[:6]
    )


def test_the_loss_around_a_drop():
    check(
        recovery_figure([1, 2, 3, 4], [5.0, 4.0, 9.0, 6.0], 2),
        """
        panel 1,1 of 1x1
          x linear 'training step'
          y linear 'loss (nats/token)'
          line: x 1 2 3 4; y 5 4 9 6
          line: upright at 2
          note 'dropped at step 2': 2 1
        legend 'training loss'
        """,
    )
