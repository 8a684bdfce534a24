"""The section about attention sinks, against attention written as plain loops."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import attention_of, layer_of_heads, picture
from trainer.analysis.capture import capture
from trainer.analysis.sinks import SinksStudy, attention_map, mean_at, over_largest
from trainer.analysis.studies.study import Target, run

T = 40


def target_of(model, **more):
    ids = torch.randint(0, 50, (1, T), generator=torch.Generator().manual_seed(1))
    return Target("tiny", model.eval(), ids, **more)


def section_of(target):
    return run([SinksStudy(target)], target)[0]


def test_near_is_the_mean_over_the_last_quarter():
    values = np.arange(20.0)
    assert mean_at(values, range(21), 16) == pytest.approx(np.mean(values[12:16]))
    # Buckets that the quarter cuts count for the part inside it: 12 to 14 and 15.
    assert mean_at(np.array([1.0, 5.0, 9.0]), [0, 10, 15, 20], 16) == pytest.approx((3 * 5 + 9) / 4)


def test_products_are_shown_over_the_largest_of_each_head():
    """RoPE-ID, Fig. 5, right: "normalized by the highest value"."""
    products = np.array([[[4.0, -2.0, 1.0], [0.5, 1.0, 0.25]], [[-1.0, -4.0, -2.0], [0, 0, 0]]])
    expected = [[[1, -0.5, 0.25], [0.5, 1, 0.25]], [[-0.25, -1, -0.5], [0, 0, 0]]]
    np.testing.assert_array_equal(over_largest(products), expected)


def test_curves_are_means_of_attention_in_buckets_of_positions(tiny_decoder):
    target = target_of(tiny_decoder())
    numbers = section_of(target).numbers
    layers = []
    capture(target.model, target.ids, layers.append)

    def check(curve, values):
        by_bucket = [np.nanmean(values[a:b]) for a, b in pairwise(numbers["edges"])]
        np.testing.assert_allclose(curve, by_bucket, rtol=2e-4, atol=2e-5)

    heads = layers[1]
    for version in ("plain", "rotated"):
        attention, dots = attention_of(heads, 0, 3, rotated=version == "rotated")
        dots = np.where(np.isinf(dots), np.nan, dots)
        check(numbers[version]["key_dot"][1][3], np.nanmean(dots, axis=0))
        check(numbers[version]["peak"][1][3], np.nanmax(dots, axis=1))
        check(numbers[version]["sink_weight"][1][3], attention[:, 0])
    check(numbers["key_norm"][1][1], np.linalg.norm(heads.k[0, 1].double().numpy(), axis=-1))
    positions = np.arange(1, T + 1)
    check(numbers["previous"][1][3], np.append(0, attention.diagonal(-1)) * positions)


@pytest.mark.parametrize("layers", [["nope"], ["rope"]])
def test_queries_within_the_training_length_are_read_in_a_text_of_it(tiny_decoder, layers):
    """The temperature of a text of 96 tokens would double the dot products near C = 24."""
    model = tiny_decoder(layers=layers, training_length=24).eval()
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=1.0))
    ids = torch.randint(0, 50, (1, 96), generator=torch.Generator().manual_seed(1))
    target, short, long = Target("tiny", model, ids), [], []
    section = section_of(target)
    capture(model, ids[:, :24], short.append)
    capture(model, ids, long.append)
    rotated, edges = section.numbers["rotated"], section.numbers["edges"]
    inside, whole = attention_of(short[1], 0, 3), attention_of(long[1], 0, 3)
    for bucket, (start, stop) in enumerate(pairwise(edges)):
        attention, dots = inside if stop <= 24 else whole
        peak = np.max(dots[start:stop], axis=1).mean()
        assert rotated["peak"][1][3][bucket] == pytest.approx(peak, rel=1e-4)
        weight = attention[start:stop, 0].mean()
        assert rotated["sink_weight"][1][3][bucket] == pytest.approx(weight, rel=1e-4)
    assert "read in a text of 24 tokens" in picture(section, "sinks_by_length").caption


def with_sink(scale):
    """A layer whose queries all lie opposite all keys but the first, which is near the origin."""
    heads = layer_of_heads("nope", texts=1, T=T, D=8)
    axis = torch.zeros(8)
    axis[0] = scale
    q = axis + 0.01 * heads.q
    k = -axis + 0.01 * heads.k
    k[:, :, 0] = 0.01 * heads.k[:, :, 0]
    return replace(heads, q=q, k=k, rotated_q=q, rotated_k=k)


@pytest.mark.parametrize(("scale", "there"), [(6.0, True), (0.1, False)])
def test_a_small_first_key_across_from_the_queries_is_a_sink(tiny_decoder, scale, there):
    study = SinksStudy(target_of(tiny_decoder(layers=["nope"])))
    study.on_layer(with_sink(scale))
    section = study.section()
    findings = " ".join(section.findings)
    assert "The first key is shorter than the median key in 100% of 2 key heads" in findings
    assert f"more than half of it in {4 if there else 0} of 4 heads" in findings
    assert ("No head has a sink" in findings) is not there
    sink = section.numbers["glance"][0]
    assert sink["judged"] is there
    assert (min(sink["values"]) > 0.9) is there


def test_a_sink_of_one_head_is_one(tiny_decoder):
    heads = with_sink(6.0)
    q = torch.cat([heads.q[:, :1], 0.01 * heads.q[:, 1:]], dim=1)
    study = SinksStudy(target_of(tiny_decoder(layers=["nope"])))
    study.on_layer(replace(heads, q=q, rotated_q=q))
    section = study.section()
    assert "more than half of it in 1 of 4 heads" in " ".join(section.findings)
    assert section.numbers["glance"][0] == section.numbers["glance"][0] | {
        "name": "Attention on the first token",
        "wanted": "high",
        "meaning": "by the queries near each length, mean over heads",
        "percent": True,
        "judged": True,
    }


def test_first_keys_are_held_against_the_other_keys_of_their_own_head(tiny_decoder):
    heads = layer_of_heads("nope", texts=1, T=T, D=8)
    length = torch.tensor([[10.0], [1.0]]).expand(2, T).clone()
    length[:, 0] = torch.tensor([5.0, 2.0])  # the one shorter than its others, the other longer
    k = length[None, :, :, None] * torch.nn.functional.normalize(heads.k, dim=-1)
    study = SinksStudy(target_of(tiny_decoder(layers=["nope"])))
    study.on_layer(replace(heads, k=k, rotated_k=k))
    sentence = "The first key is shorter than the median key in 50% of 2 key heads"
    assert sentence in " ".join(study.section().findings)


def test_the_median_key_is_of_all_keys_and_not_of_buckets_of_positions(tiny_decoder):
    """Of 127 other keys the first 62 are long: fewer than half, in most of the buckets."""
    heads = layer_of_heads("nope", texts=1, T=128, D=8)
    lengths = torch.ones(128)
    lengths[0], lengths[1:63] = 5, 10
    k = lengths[:, None] * torch.nn.functional.normalize(heads.k, dim=-1)
    ids = torch.zeros(1, 128, dtype=torch.long)
    study = SinksStudy(Target("tiny", tiny_decoder(layers=["nope"]).eval(), ids))
    study.on_layer(replace(heads, k=k, rotated_k=k))
    findings = " ".join(study.section().findings)
    assert "shorter than the median key in 0% of 2 key heads; its length is 5.00 times" in findings


@pytest.mark.parametrize("layers", [1, 2])
def test_attention_is_shown_of_a_strong_a_medium_and_a_weak_sink(tiny_decoder, layers):
    model = tiny_decoder(model={"num_hidden_layers": layers})
    target = target_of(model)
    heads, candidates = [], []
    capture(model, target.ids, heads.append)
    for layer in heads:
        sinks = [attention_of(layer, 0, head)[0][1:, 0].mean() for head in range(4)]
        order = np.argsort(sinks)
        candidates += [(sinks[i], layer.layer, i) for i in (order[0], order[2], order[3])]
    expected = candidates
    if layers > 1:
        best = sorted(candidates, reverse=True)
        expected = [best[0], best[3], best[-1]]
    shown = picture(section_of(target), "sinks_attention")
    assert list(dict.fromkeys(row[:2] for row in shown.rows)) == [head[1:] for head in expected]
    titles = [axes.get_title() for axes in shown.figure.axes if axes.get_title()]
    assert titles == [
        f"L{layer}H{i}: {100 * sink:.0f}% on the first" for sink, layer, i in expected
    ]


def test_a_model_without_rotation_shows_what_is_there_instead(tiny_decoder):
    section = section_of(target_of(tiny_decoder(layers=["nope"])))
    assert section.pictures[-1].name == "sinks_without_rotation"
    assert section.numbers["plain"]["sink_weight"] == section.numbers["rotated"]["sink_weight"]
    names = [indicator["name"] for indicator in section.numbers["glance"]]
    assert names[1:] == ["The token before, over uniform", "Entropy of attention"]
    rotating = section_of(target_of(tiny_decoder()))
    assert "sinks_without_rotation" not in {p.name for p in rotating.pictures}
    assert rotating.numbers["glance"][1]["name"] == "Largest dot product"


def test_a_bias_by_distance_counts_as_an_encoding_of_the_scores(tiny_decoder):
    section = section_of(target_of(tiny_decoder(layers=["alibi"])))
    numbers = section.numbers
    assert numbers["plain"]["sink_weight"] != numbers["rotated"]["sink_weight"]
    # It is added to scores, so that dot products have one line.
    drawn = {
        row[:2] for name in ("sinks_by_length", "sinks_keys") for row in picture(section, name).rows
    }
    assert {version for version, measure in drawn if measure == "sink_weight"} == {
        "plain",
        "rotated",
    }
    assert {v for v, m in drawn if m in ("peak", "key_dot", "key_dot_over_largest")} == {"plain"}
    (peak,) = (finding for finding in section.findings if "largest dot product" in finding)
    assert "without the bias" in peak


def test_maps_of_chosen_heads_hold_all_their_attention(tiny_decoder):
    target = target_of(tiny_decoder(), chosen=((0, 1), (1, 2)))
    shown = picture(section_of(target), "sinks_attention")
    assert {row[:2] for row in shown.rows} == {(0, 1), (1, 2)}
    for query in range(T):
        row = [r[-1] for r in shown.rows if r[:3] == (0, 1, query)]
        assert len(row) == query + 1
        assert sum(row) == pytest.approx(1, abs=1e-5)


def test_a_text_of_a_few_tokens_is_refused(tiny_decoder):
    assert SinksStudy.problems(Target("t", tiny_decoder(), torch.zeros(1, 7, dtype=torch.long)))


@pytest.mark.parametrize(("T", "size", "cell"), [(40, 512, 1), (40, 20, 2), (601, 100, 7)])
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
