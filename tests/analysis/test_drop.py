"""Two models side by side: numbers against loops, torch and numpy; sentences against numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.analysis.attention_examples import attention_of, captured, cells, drawn
from trainer.analysis import drop
from trainer.analysis.drop import (
    MEASURES,
    compare_drop,
    compare_predictions,
    head_measures,
)
from trainer.analysis.target import NotApplicableError, Target

IDS = torch.randint(50, (2, 72), generator=torch.Generator().manual_seed(0))
TRAINED = 24


@pytest.fixture
def models(tiny_decoder):
    return tiny_decoder(training_length=TRAINED), tiny_decoder(
        training_length=TRAINED, layers=["nope"]
    )


@pytest.fixture
def targets(models):
    return [Target(n, model, IDS) for n, model in zip(("RoPE", "DroPE"), models, strict=True)]


def test_heads_are_read_within_the_training_length(models):
    measured = head_measures(models[0], IDS[:, :TRAINED])
    for heads in captured(models[0], IDS):
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


@pytest.mark.parametrize("window", [1, 5])
def test_entropy_is_1_where_attention_is_uniform_in_a_window(tiny_decoder, window):
    model = tiny_decoder(windows=[window])
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.q_proj.weight.zero_()
    measured = head_measures(model, IDS[:, :TRAINED])["entropy"]
    np.testing.assert_allclose(measured, float(window > 1), rtol=1e-6)  # 0 of a single key


def test_divergence_and_losses_are_torch_s_at_every_position(models, monkeypatch):
    monkeypatch.setattr(drop, "chunk_size", lambda *_: 7)
    divergence, *losses = compare_predictions(*models, IDS)
    with torch.no_grad():
        p, q = (model(IDS).double().log_softmax(-1)[:, :-1] for model in models)
    expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(0)
    np.testing.assert_allclose(divergence, expected, rtol=1e-3, atol=1e-7)
    assert divergence[-1] > 1e-3
    for loss, log in zip(losses, (p, q), strict=True):
        expected = F.nll_loss(log.mT, IDS[:, 1:], reduction="none").mean(0)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_rows_have_losses_and_divergences_of_both_models(models, targets):
    results = compare_drop(*targets)
    rows = results.rows
    kl, first, second = compare_predictions(*models, IDS)
    edges = [0, *rows["length"][rows["metric"] == "kl"].astype(int)]
    for name, metric, curve in (
        ("RoPE ‖ DroPE", "kl", kl),
        ("RoPE", "loss", first),
        ("DroPE", "loss", second),
    ):
        means = [curve[a:b].mean() for a, b in pairwise(edges)]
        np.testing.assert_allclose(cells(rows, metric, model=name), means, rtol=1e-3)
    names = [plot.name for plot in results.plots]
    assert names == ["drop_heads", "drop_positions"]


@pytest.mark.parametrize("longer", [0, 1])
def test_heads_are_compared_within_the_shorter_training_length(models, targets, longer):
    model = models[longer]
    model.layout = model.layout.with_training_length(2 * TRAINED)
    rows = compare_drop(*targets).rows
    of_heads = rows[rows["metric"] == "distance"]
    assert {*of_heads["length"]} == {TRAINED}
    for name, compared in zip(("RoPE", "DroPE"), models, strict=True):
        expected = head_measures(compared, IDS[:, :TRAINED])["distance"]
        np.testing.assert_allclose(cells(rows, "distance", model=name), expected.ravel())


def test_a_text_within_the_training_length_is_read_as_a_whole(models):
    targets = [Target(name, model, IDS[:, :16]) for name, model in zip("ab", models, strict=True)]
    rows = compare_drop(*targets).rows
    assert {*rows["length"][rows["metric"] == "distance"]} == {16}


def test_figures_have_the_earlier_model_across_and_curves_at_the_middle_of_buckets(targets):
    results = compare_drop(*targets)
    for panel, name in zip(drawn(results, "drop_heads"), MEASURES, strict=True):
        points = panel.points[""]
        for column, model in enumerate(("RoPE", "DroPE")):
            np.testing.assert_array_equal(points[:, column], cells(results.rows, name, model=model))
        assert panel.index.tolist() == [0] * 4 + [1] * 4
    divergence, losses = drawn(results, "drop_positions")
    kl = results.rows[results.rows["metric"] == "kl"]
    # The bucket of lengths 1 has its middle at 1, that of 9 and 10 at 9.5.
    ends = kl["length"].to_numpy()
    (line,) = divergence.lines
    np.testing.assert_allclose(line.x, (np.append(1, ends[:-1] + 1) + ends) / 2)
    assert line.y == kl["value"].tolist()
    for curve, name in zip(losses.lines, ("RoPE", "DroPE"), strict=True):
        assert curve.label == name
        np.testing.assert_array_equal(curve.y, cells(results.rows, "loss", model=name))


def test_models_of_another_shape_are_compared_but_for_their_heads(targets, tiny_decoder):
    other = tiny_decoder(training_length=TRAINED, model={"num_hidden_layers": 3})
    results = compare_drop(targets[0], Target("b", other, IDS))
    assert [plot.name for plot in results.plots] == ["drop_positions"]
    assert results.notes
    words = tiny_decoder(model={"vocab_size": 60})
    with pytest.raises(NotApplicableError, match=r"got \[50, 60\]"):
        compare_drop(targets[0], Target("b", words, IDS))
