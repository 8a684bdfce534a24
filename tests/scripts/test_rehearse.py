"""Launches and traffic of a micro-batch stay within their budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scripts.rehearse import PRODUCTS, SHAPES, of_loss, ours, theirs
from trainer.model import loss


def of_two_layers(name):
    shape = SHAPES[name]
    return replace(shape, model=replace(shape.model, num_hidden_layers=2))


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_costs_at_most_what_transformers_does(name, weights):
    """Of two layers and of one, whose difference has no loss in it."""
    pytest.importorskip("transformers")
    two = of_two_layers(name)
    one = replace(two, model=replace(two.model, num_hidden_layers=1))
    mine, other = (
        [(c.operators.total(), c.traffic.total()) for c in (of(two, weights), of(one, weights))]
        for of in (ours, theirs)
    )
    for both, alone, their_both, their_alone in zip(*mine, *other, strict=True):
        assert both - alone <= 1.1 * (their_both - their_alone)


@pytest.mark.parametrize("name", SHAPES)
def test_the_chunks_of_a_gpus_loss_are_few(name):
    """In a micro-batch of the whole model, of which they are the same few operators."""
    whole = loss.Chunks(logits=2**62, tokens=1, rows=2**31)
    layers = SHAPES[name].model.num_hidden_layers
    two = of_two_layers(name)
    chunked, at_once = ours(two, torch.bfloat16), ours(two, torch.bfloat16, whole)
    more = chunked.operators.total() - at_once.operators.total()
    assert more <= 0.3 * at_once.operators.total() * layers / 2
    assert chunked.traffic.total() <= 1.5 * at_once.traffic.total()


@pytest.mark.parametrize("name", SHAPES)
def test_the_loss_moves_what_its_two_passes_and_gradients_take(name):
    """Two readings and one writing of 2 bytes a logit; in backward both gradients are scaled, the
    head's from float32 to bfloat16. Some 20 bytes a token are left for losses and weights."""
    shape = SHAPES[name]
    counted, _ = of_loss(shape, torch.bfloat16, loss.CHUNKS["cuda"])
    vocab, width, tokens = (
        shape.model.vocab_size,
        shape.model.hidden_size,
        shape.rows * shape.length,
    )
    found = sum(size for name, size in counted.traffic.items() if name not in PRODUCTS)
    expected = 6 * tokens * vocab + 4 * tokens * width + 6 * vocab * width
    assert expected <= found <= 1.01 * expected
    assert counted.traffic["add_product"] > 0


def test_what_computes_nothing_is_not_counted():
    counted = ours(of_two_layers("Llama-2-7B"), torch.bfloat16).operators
    assert counted["mm"] >= 2 * 3 * 7
    assert not {"view", "t", "transpose", "empty", "device", "detach"} & counted.keys()
