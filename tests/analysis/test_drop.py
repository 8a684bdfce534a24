"""Two models side by side: numbers against loops, torch and numpy; sentences against numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.analysis.attention_examples import attention_of, picture
from trainer.analysis import drop
from trainer.analysis.capture import capture
from trainer.analysis.drop import (
    MEASURES,
    DropStudy,
    divergence_by_position,
    head_change,
    heads_part,
    read,
    recovery,
)
from trainer.analysis.studies.study import Target
from trainer.common.errors import UserError
from trainer.plotting.style import COLOURS

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
    models[1].layout = models[1].layout.map(
        lambda spectrum: spectrum.with_temperature(coefficient=2.0)
    )
    for name, values in read(models[1], IDS, within=TRAINED).heads.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-6)


def test_a_temperature_of_long_texts_does_not_change_indicators_within(tiny_decoder):
    model = tiny_decoder(training_length=32, layers=["nope"])
    expected = read(model, IDS, within=32).indicators
    model.layout = model.layout.map(lambda spectrum: spectrum.with_temperature(coefficient=2.0))
    for name, values in read(model, IDS, within=32).indicators.items():
        assert values[0] == pytest.approx(expected[name][0], abs=1e-6)
        assert name == "key_stable_rank" or values[-1] != pytest.approx(expected[name][-1])


def test_nothing_is_read_twice_unless_the_encoding_follows_the_length(models, monkeypatch):
    passes = []
    monkeypatch.setattr(drop, "capture", lambda *args: passes.append(args[1]) or capture(*args))
    read(models[0], IDS, within=TRAINED)
    assert [ids.shape[1] for ids in passes] == [72]


def test_models_of_two_training_lengths_are_compared_at_the_shorter(tiny_decoder):
    """The first was trained on all 72 tokens."""
    before, after = (
        Target(name, tiny_decoder(training_length=n), IDS) for name, n in (("A", 96), ("B", 24))
    )
    section = DropStudy(before, after).run()
    assert "Beyond the shorter training length the loss of A is" in " ".join(section.findings)
    caption = picture(section, "drop_indicators").caption
    assert "not trained" not in caption
    assert "Dashed: the shorter training length." in caption


def test_heads_are_read_within_the_training_length(models):
    measured, layers = read(models[0], IDS, within=TRAINED).heads, []
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
                assert measured[name][heads.layer, head] == pytest.approx(mean, rel=1e-3, abs=1e-6)


def test_indicators_by_the_length_of_the_prefix(models):
    measured, layers = read(models[0], IDS, within=TRAINED), []
    capture(models[0], IDS, layers.append)
    assert measured.lengths == [32, 64, 72]
    sinks, ranks = np.zeros(3), np.zeros(3)
    for index, (start, stop) in enumerate(((1, 32), (32, 64), (64, 72))):
        sinks[index] = np.mean(
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
        ranks[index] = np.mean([(s**2).sum() / s[0] ** 2 for s in values])
    np.testing.assert_allclose(measured.indicators["sink_mass"], sinks, rtol=1e-4)
    np.testing.assert_allclose(measured.indicators["key_stable_rank"], ranks, rtol=1e-4)


def test_losses_and_divergences_by_position(models, section):
    """Their sentences too, within and beyond the training length."""
    with torch.no_grad():
        p, q = (model(IDS).double().log_softmax(-1)[:, :-1] for model in models)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(0).numpy()
    first, second = (-x.gather(-1, IDS[:, 1:, None])[..., 0].mean(0).numpy() for x in (p, q))
    for where, among in (("Within", slice(TRAINED)), ("Beyond", slice(TRAINED, None))):
        (finding,) = [text for text in section.findings if text.startswith(where)]
        assert f"loss of RoPE is {first[among].mean():.3f}" in finding
        assert f"loss of DroPE {second[among].mean():.3f}" in finding
        assert f"{kl[among].mean():.3f} nats apart" in finding
    edges = section.numbers["edges"]
    for name, curve in (("kl", kl), ("loss_before", first), ("loss_after", second)):
        means = [curve[a:b].mean() for a, b in pairwise(edges)]
        np.testing.assert_allclose(section.numbers[name], means, rtol=1e-3)


def measures(**changed):
    """Zeros for two layers of two heads, except in the ``changed`` measures."""
    return {name: np.array(changed.get(name, np.zeros((2, 2))), dtype=float) for name in MEASURES}


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
    _, diagonal, previous = heads_part(was, now, ("a", "b")).findings
    assert diagonal == (
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


def test_a_loss_that_does_not_come_back(section):
    (finding,) = [text for text in section.findings if text.startswith("Before the drop")]
    end = np.mean([loss for _, loss in CURVE[-5:]])
    assert finding == (
        "Before the drop the training loss is 2.000; after it, it rises to "
        f"{2 + math.exp(-0.2):.3f} and ends {end - 2:.3f} nats above."
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
    measured = recovery(curve, 60)
    assert (measured.before, measured.peak, measured.back) == (2.0, 3.0, 110)
    assert measured.end == pytest.approx(1.3)
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
    with pytest.raises(UserError, match="expected 2 tokens or more, got 1"):
        DropStudy(Target("a", models[0], IDS[:, :1]), Target("b", models[1], IDS[:, :1]))


def test_lines_have_the_styles_of_their_names(section):
    losses = picture(section, "drop_positions").figure.axes[1]
    assert [line.get_color() for line in losses.lines[:2]] == [COLOURS[0], COLOURS[4]]
    assert losses.lines[0].get_ydata().tolist() == section.numbers["loss_before"]


def test_divergence_is_torch_s_at_every_position(models, monkeypatch):
    monkeypatch.setattr(drop, "chunk_size", lambda *_: 7)
    divergence = divergence_by_position(*models, IDS)
    with torch.no_grad():
        p, q = (model(IDS).double().log_softmax(-1) for model in models)
    expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(0)
    np.testing.assert_allclose(divergence, expected, rtol=1e-3, atol=1e-7)
    assert divergence[-1] > 1e-3


@pytest.mark.parametrize("lengths", [(24, 48), (48, 24)])
def test_only_what_both_models_were_trained_on_is_within(tiny_decoder, lengths):
    targets = [
        Target(name, tiny_decoder(training_length=length), IDS)
        for name, length in zip(("before", "after"), lengths, strict=True)
    ]
    study = DropStudy(*targets)
    assert study.trained == 24
    assert "first 24 tokens" in study.run().text
