"""Attenuation of pairs, against the layout that weighted RoPE makes of the same entropies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.analysis.attenuation import Gate, attenuated, sweep
from trainer.analysis.frequency_entropy import frequency_entropies
from trainer.evaluation.method_config import WeightedRopeSettings
from trainer.evaluation.weighted_rope import apply, select

IDS = torch.randint(50, (1, 200), generator=torch.Generator().manual_seed(3))


def middle(entropies):
    return float(torch.cat([e.query["sequence"].ravel() for e in entropies]).nanmedian())


def chosen(factors):
    """Pairs whose two channels have a factor."""
    return sum(factor != 1 for head in factors for factor in head) // 2


def test_the_pairs_beyond_the_threshold_are_multiplied(tiny_decoder):
    model = tiny_decoder()
    entropies = frequency_entropies(model, IDS, ["sequence"])
    tau = middle(entropies)
    for side in ("below", "above"):
        settings = [WeightedRopeSettings("sequence", side, tau, 0.3)]
        weights = select(model, IDS, settings)
        changed, pairs = attenuated(
            model.layout, entropies, (Gate("sequence", side, tau),), 0.3, model.config.head_size
        )
        expected = apply(model.layout, weights)
        assert pairs == sum(chosen(w.query) + chosen(w.key) for w in weights) > 0
        for ours, theirs in zip(changed.layers, expected.layers, strict=True):
            assert ours.intervention.query == theirs.intervention.query
            assert ours.intervention.key == theirs.intervention.key


def test_the_sweep_is_the_perplexity_of_these_layouts(tiny_decoder):
    model = tiny_decoder()
    trained = model.layout
    entropies = frequency_entropies(model, IDS, ["sequence"])
    gate = Gate("sequence", "below", middle(entropies))
    nothing = Gate("sequence", "below", 0.0)
    found, empty = sweep(model, IDS, entropies, [(gate,), (nothing,)], (0.5, 1.0, 0.0))
    assert model.layout is trained
    assert list(found.perplexity) == [1.0, 0.5, 0.0]
    for alpha, ours in found.perplexity.items():
        settings = [WeightedRopeSettings("sequence", "below", gate.tau, alpha)]
        model.layout = apply(trained, select(model, IDS, settings))
        logits = model(IDS).detach()[0, :-1].double()
        model.layout = trained
        losses = torch.nn.functional.cross_entropy(logits, IDS[0, 1:])
        assert ours == pytest.approx(float(losses.exp()), rel=1e-4)
    assert found.perplexity[0.0] != pytest.approx(found.perplexity[1.0], rel=1e-3)
    assert empty.pairs == 0
    assert set(empty.perplexity.values()) == {found.perplexity[1.0]}


def test_pairs_that_stand_still_keep_their_size(tiny_decoder):
    model = tiny_decoder()
    still = replace(model.layout.layers[0].spectra[0], inv_freq=(1.0, 0.0, 0.1, 0.0))
    model.layout = model.layout.map(lambda _: still)
    entropies = frequency_entropies(model, IDS, ["sequence"])
    changed, pairs = attenuated(model.layout, entropies, (Gate("sequence", "below", 1.1),), 0.0, 8)
    assert pairs == 2 * (4 + 2) * 2
    assert changed.layers[1].intervention.key[1] == (0.0, 1.0) * 4
