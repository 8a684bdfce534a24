"""Weighted RoPE: which pairs are chosen by their frequency entropy, and that they alone change."""

from dataclasses import replace

import pytest
import torch

from trainer.analysis.attention import capture
from trainer.analysis.frequency_entropy import choose_factors, frequency_entropies
from trainer.analysis.weighted_rope import apply
from trainer.common.errors import UserError
from trainer.config import WeightedRopeSettings
from trainer.model.generate import generate
from trainer.positional.rescaling import RESCALINGS

IDS = torch.randint(50, (1, 1100), generator=torch.Generator().manual_seed(8))
SHORT = IDS[:, :48]
EVERYTHING = WeightedRopeSettings(tau=1.0, alpha=0.5)


def captured(model, layout):
    with model.using(layout):
        return capture(model, SHORT, lambda heads: heads)


def median(model, measure, ids):
    result = frequency_entropies(model, ids, [measure])
    return float(torch.cat([e[measure, "query"].flatten() for e in result]).median())


@pytest.mark.parametrize("side", ["below", "above"])
@pytest.mark.parametrize("measure", ["sequence", "spectrum"])
def test_pairs_on_one_side_of_the_threshold_get_the_factor(tiny_decoder, measure, side):
    model = tiny_decoder()
    settings = WeightedRopeSettings(measure, side, median(model, measure, IDS), 0.25)
    weights = choose_factors(model, IDS, [settings], model.layout)
    before, after = captured(model, model.layout), captured(model, apply(model.layout, weights))
    result = frequency_entropies(model, IDS, [measure])
    for name, entropies in (("q", result[0][measure, "query"]), ("k", result[0][measure, "key"])):
        expected = getattr(before[0], f"rotated_{name}").clone()
        for h, row in enumerate(entropies.tolist()):
            for m, entropy in enumerate(row):
                if entropy < settings.tau if side == "below" else entropy > settings.tau:
                    expected[:, h, :, [m, m + 4]] *= 0.25
        torch.testing.assert_close(getattr(after[0], f"rotated_{name}"), expected)


@torch.no_grad()
def test_nothing_chosen_is_the_very_same_model(tiny_decoder):
    model = tiny_decoder()
    for settings in (WeightedRopeSettings(tau=0.0), WeightedRopeSettings(tau=1.0, alpha=1.0)):
        weights = choose_factors(model, SHORT, [settings], model.layout)
        assert all(not w.query and not w.key for w in weights)
        assert apply(model.layout, weights) == model.layout


@pytest.mark.parametrize("rescaling", RESCALINGS)
@torch.no_grad()
def test_it_goes_with_any_rescaling(tiny_decoder, rescaling):
    model = tiny_decoder()
    rescaled = model.layout.rescaled(RESCALINGS[rescaling], 4.0)
    weights = choose_factors(model, SHORT, [EVERYTHING], rescaled)
    assert model.layout is not rescaled
    before, after = captured(model, rescaled)[0], captured(model, apply(rescaled, weights))[0]
    torch.testing.assert_close(after.rotated_q, 0.5 * before.rotated_q)
    torch.testing.assert_close(after.rotated_k, 0.5 * before.rotated_k)
    prompts = [SHORT[0, :9].tolist(), SHORT[0, 9:13].tolist()]
    model.layout = apply(rescaled, weights)
    assert generate(model, prompts, 8) == [generate(model, [p], 8)[0] for p in prompts]


def test_entropies_are_those_of_the_rescaled_model(tiny_decoder):
    """In the second layer, whose queries follow from the attention of the first."""
    model = tiny_decoder()
    rescaled = model.layout.rescaled(RESCALINGS["pi"], 8.0)
    plain = frequency_entropies(model, SHORT, ["sequence"])[1]["sequence", "query"][0, 0].item()
    with model.using(rescaled):
        value = frequency_entropies(model, SHORT, ["sequence"])[1]["sequence", "query"][0, 0].item()
    assert value != pytest.approx(plain, abs=1e-4)
    rule = WeightedRopeSettings(tau=(plain + value) / 2, alpha=0.5)
    factor = choose_factors(model, SHORT, [rule], rescaled)[1].query[0][0]
    assert factor == (0.5 if value < plain else 1)


def test_pairs_that_several_rules_choose_have_the_smallest_factor(tiny_decoder):
    model = tiny_decoder()
    middle = median(model, "sequence", SHORT)
    rules = [
        WeightedRopeSettings(tau=middle, alpha=0.2),
        EVERYTHING,
        WeightedRopeSettings(side="above", tau=middle, alpha=0.7),
    ]
    for order in (rules, rules[::-1]):
        values = {
            g
            for w in choose_factors(model, SHORT, order, model.layout)
            for row in w.query
            for g in row
        }
        assert values == {0.2, 0.5}


def test_pairs_without_rotation_keep_the_factor_1(tiny_decoder):
    half = {"encodings": {"rope": {"rotary_fraction": 0.5}}}
    model = tiny_decoder(layers=["rope", "nope"], heads={"nope": 0.5}, **half)
    first, second = choose_factors(model, SHORT, [EVERYTHING], model.layout)
    turns, still = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0), (1.0,) * 8
    assert first.query == (turns, turns, still, still)
    assert first.key == (turns, still)
    assert not second.query
    assert not second.key
    layout = apply(model.layout, (first, second))
    assert layout.layers[1] is model.layout.layers[1]


def test_a_pair_of_frequency_zero_does_not_rotate(tiny_decoder):
    model = tiny_decoder()
    model.layout = model.layout.map(lambda s: replace(s, inv_freq=(*s.inv_freq[:3], 0.0)))
    assert (
        choose_factors(model, SHORT, [EVERYTHING], model.layout)[0].key
        == ((0.5, 0.5, 0.5, 1.0) * 2,) * 2
    )


def test_spectra_need_a_whole_frame(tiny_decoder):
    model = tiny_decoder()
    rules = [WeightedRopeSettings(entropy="spectrum")]
    with pytest.raises(UserError, match="1024 tokens"):
        choose_factors(model, SHORT, rules, model.layout)
