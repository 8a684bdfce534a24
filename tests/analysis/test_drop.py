"""Two models side by side: numbers against loops, torch and numpy; sentences against numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.analysis.attention_examples import attention_of, cells
from trainer.analysis import drop
from trainer.analysis.capture import capture
from trainer.analysis.drop import (
    MEASURES,
    DropComparison,
    divergence_by_position,
    read,
    recovery,
)
from trainer.analysis.topic import Target
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
def targets(models):
    return [Target(n, model, IDS) for n, model in zip(("RoPE", "DroPE"), models, strict=True)]


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


def test_divergence_is_torch_s_at_every_position(models, monkeypatch):
    monkeypatch.setattr(drop, "chunk_size", lambda *_: 7)
    divergence = divergence_by_position(*models, IDS)
    with torch.no_grad():
        p, q = (model(IDS).double().log_softmax(-1) for model in models)
    expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(0)
    np.testing.assert_allclose(divergence, expected, rtol=1e-3, atol=1e-7)
    assert divergence[-1] > 1e-3


def test_rows_have_losses_divergences_and_the_recovery_of_both_models(models, targets):
    results = DropComparison(*targets, [*CURVE, (220, math.nan)], 100).results()
    rows = results.rows
    with torch.no_grad():
        p, q = (model(IDS).double().log_softmax(-1)[:, :-1] for model in models)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(0).numpy()
    first, second = (-x.gather(-1, IDS[:, 1:, None])[..., 0].mean(0).numpy() for x in (p, q))
    edges = [0, *rows["length"][rows["metric"] == "kl"].astype(int)]
    for name, metric, curve in (
        ("RoPE ‖ DroPE", "kl", kl),
        ("RoPE", "loss", first),
        ("DroPE", "loss", second),
    ):
        means = [curve[a:b].mean() for a, b in pairwise(edges)]
        np.testing.assert_allclose(cells(rows, metric, model=name), means, rtol=1e-3)
    assert cells(rows, "training_loss_peak").item() == pytest.approx(2 + math.exp(-0.2))
    assert not len(cells(rows, "steps_until_back"))
    names = [plot.name for plot in results.plots]
    assert names == [
        f"drop_{name}"
        for name in ("positional_heads", "attention", "positions", "indicators", "recovery")
    ]


def test_models_of_another_shape_are_compared_but_for_their_heads(targets, tiny_decoder):
    other = tiny_decoder(training_length=TRAINED, model={"num_hidden_layers": 3})
    results = DropComparison(targets[0], Target("b", other, IDS)).results()
    assert [plot.name for plot in results.plots] == ["drop_positions", "drop_indicators"]
    words = tiny_decoder(model={"vocab_size": 60})
    with pytest.raises(UserError, match="got 50 and 60"):
        DropComparison(targets[0], Target("b", words, IDS))
