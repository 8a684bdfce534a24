"""The section about attention sinks, against attention written as plain loops."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import (
    attention_of,
    captured,
    cells,
    drawn,
    layer_of_heads,
)
from trainer.analysis import sinks as module
from trainer.analysis.attention import attention_map
from trainer.analysis.sinks import analyze_sinks, over_largest
from trainer.analysis.target import Target, position_edges
from trainer.config import AnalysisConfig

T = 40


def target_of(model, **more):
    ids = torch.randint(0, 50, (1, T), generator=torch.Generator().manual_seed(1))
    return Target("tiny", model.eval(), ids, **more)


def test_products_are_shown_over_the_largest_of_each_head():
    """RoPE-ID, Fig. 5, right: "normalized by the highest value"."""
    products = np.array([[[4.0, -2.0, 1.0], [0.5, 1.0, 0.25]], [[-1.0, -4.0, -2.0], [0, 0, 0]]])
    expected = [[[1, -0.5, 0.25], [0.5, 1, 0.25]], [[-0.25, -1, -0.5], [0, 0, 0]]]
    np.testing.assert_array_equal(over_largest(products), expected)


def test_curves_are_means_of_attention_in_buckets_of_positions(tiny_decoder):
    target = target_of(tiny_decoder())
    rows, layers = analyze_sinks(target).rows, captured(target.model, target.ids)

    def check(name, numbers, **where):
        by_bucket = [np.nanmean(numbers[a:b]) for a, b in pairwise(position_edges(T))]
        measured = cells(rows, name, layer=1, **where)
        np.testing.assert_allclose(measured, by_bucket, rtol=2e-4, atol=2e-5)

    heads = layers[1]
    for version in ("plain", "rotated"):
        attention, dots = attention_of(heads, 0, 3, rotated=version == "rotated")
        dots = np.where(np.isinf(dots), np.nan, dots)
        check("key_dot", np.nanmean(dots, axis=0), variant=version, head=3)
        check("peak", np.nanmax(dots, axis=1), variant=version, head=3)
        check("sink_weight", attention[:, 0], variant=version, head=3)
    check("key_norm", np.linalg.norm(heads.k[0, 1].double().numpy(), axis=-1), head=1)


def test_the_heads_that_are_shown_have_most_and_least_attention_on_the_first_at_the_end(
    tiny_decoder, monkeypatch
):
    shown = {}
    monkeypatch.setattr(module, "heat_maps", lambda titled, *_, **__: shown.update(titled))
    target = target_of(tiny_decoder())
    rows = analyze_sinks(target).rows
    at_end = rows[(rows["metric"] == "sink_weight") & (rows["length"] == T)]
    shares = cells(at_end, "sink_weight", variant="rotated")
    titles = []
    for index in (shares.argmax(), shares.argsort()[4], shares.argmin()):
        layer, head = divmod(int(index), 4)
        titles.append(f"L{layer}H{head}: {100 * shares[index]:.0f}% on the first")
    assert [*shown] == titles


def test_figures_have_curves_at_the_middle_of_buckets_and_maps_of_chosen_heads(
    tiny_decoder, monkeypatch
):
    monkeypatch.setattr(module, "CELLS", 12)  # of four tokens
    target = target_of(tiny_decoder(), config=AnalysisConfig(chosen=[(1, 2)]))
    results = analyze_sinks(target)
    edges = position_edges(T)
    middles = [(a + 1 + b) / 2 for a, b in pairwise(edges)]
    norms, products = drawn(results, "sinks_keys")
    weights, _ = drawn(results, "sinks_by_length")
    assert norms.lines[0].x == middles
    of_keys = cells(results.rows, "key_norm").reshape(4, -1)
    assert norms.lines[0].y == pytest.approx(of_keys.mean(axis=0))
    for line, variant in zip(products.lines, ("plain", "rotated"), strict=True):
        of_heads = cells(results.rows, "key_dot", variant=variant).reshape(8, -1)
        assert line.y == pytest.approx(over_largest(of_heads).mean(axis=0))
    for line, variant in zip(weights.lines, ("plain", "rotated"), strict=True):
        of_heads = cells(results.rows, "sink_weight", variant=variant).reshape(8, -1)
        assert line.y == pytest.approx(of_heads.mean(axis=0))
    ((title, cells_of_map),) = drawn(results, "sinks_attention").items()
    assert title.startswith("L1H2: ")
    assert cells_of_map.shape == (10, 10)
    np.testing.assert_array_equal(np.isnan(cells_of_map), np.triu(np.ones((10, 10)), 1))
    figure = next(plot.figure for plot in results.plots if plot.name == "sinks_attention")
    assert figure[1]["cell"] == (4, 4)


LONG_IDS = torch.randint(0, 50, (1, 96), generator=torch.Generator().manual_seed(1))


def following(tiny_decoder, layers):
    """A model of C = 24 whose temperature follows the length."""
    model = tiny_decoder(layers=layers, training_length=24).eval()
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=1.0))
    return model


@pytest.mark.parametrize("layers", [["nope"], ["rope"]])
def test_keys_within_the_training_length_meet_the_queries_of_the_whole_text(tiny_decoder, layers):
    model = following(tiny_decoder, layers)
    rows, heads = analyze_sinks(Target("tiny", model, LONG_IDS)).rows, captured(model, LONG_IDS)[1]
    edges = sorted({*position_edges(96), 24})
    for variant in rows["variant"][rows["metric"] == "key_dot"].unique():
        _, dots = attention_of(heads, 0, 3, rotated=variant == "rotated")
        by_key = np.nanmean(np.where(np.isinf(dots), np.nan, dots), axis=0)
        expected = [by_key[a:b].mean() for a, b in pairwise(edges)]
        measured = cells(rows, "key_dot", variant=variant, layer=1, head=3)
        np.testing.assert_allclose(measured, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("layers", [["nope"], ["rope"]])
def test_queries_within_the_training_length_are_read_in_a_text_of_it(tiny_decoder, layers):
    """The temperature of a text of 96 tokens would double the dot products near C = 24."""
    model, ids = following(tiny_decoder, layers), LONG_IDS
    rows = analyze_sinks(Target("tiny", model, ids)).rows
    short, long = captured(model, ids[:, :24]), captured(model, ids)
    where = {"variant": "rotated", "layer": 1, "head": 3}
    edges = [0, *rows["length"][(rows["metric"] == "peak") & (rows["layer"] == 1)].unique()]
    inside, whole = attention_of(short[1], 0, 3), attention_of(long[1], 0, 3)
    peaks, weights = (cells(rows, name, **where) for name in ("peak", "sink_weight"))
    for bucket, (start, stop) in enumerate(pairwise(map(int, edges))):
        attention, dots = inside if stop <= 24 else whole
        peak = np.max(dots[start:stop], axis=1).mean()
        assert peaks[bucket] == pytest.approx(peak, rel=1e-4)
        assert weights[bucket] == pytest.approx(attention[start:stop, 0].mean(), rel=1e-4)


@pytest.mark.parametrize(("T", "size", "cell"), [(40, 512, 1), (40, 20, 2), (260, 40, 7)])
def test_a_map_sums_keys_and_means_queries(T, size, cell):
    heads = layer_of_heads(T=T)
    reduced = attention_map(heads, 3, size=size)
    whole, _ = attention_of(heads, 0, 3)
    cells = -(-T // cell)
    assert reduced.shape == (cells, cells)
    assert cells <= size
    for a, b in ((0, 0), (cells - 1, 0), (cells - 1, cells - 1), (cells // 2, cells // 3)):
        part = whole[a * cell : (a + 1) * cell, b * cell : (b + 1) * cell]
        assert reduced[a, b] == pytest.approx(part.sum(axis=1).mean(), rel=1e-4, abs=1e-7)
    np.testing.assert_allclose(reduced.sum(axis=1), 1, rtol=1e-5)
