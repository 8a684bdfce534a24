"""How often blocks are compiled: once a kind of layer, and once more after a drop."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from trainer.lightning.strategy import checkpoint_activations
from trainer.model import backends
from trainer.model.config import QKNormConfig
from trainer.positional.layout import drop

pytestmark = pytest.mark.slow

KINDS = {
    "rope": ({}, 1),
    "nope": ({"layers": ["nope"]}, 1),
    "half of the channels": ({"layers": ["half_rope"]}, 1),
    "alibi": ({"layers": ["alibi"]}, 1),
    "window": ({"windows": [8]}, 1),
    "rope and nope": ({"layers": ["rope", "nope"]}, 2),
    "nope and a window": ({"layers": ["nope"], "windows": [8, None]}, 2),
}


def compiled(tiny_decoder, positional, recomputed="none", **shape):
    torch._dynamo.reset()
    norms = QKNormConfig("after_drop")
    shape |= {"num_hidden_layers": 4, "qk_norm": norms}
    model = tiny_decoder(**positional, model=shape)
    counter = CompileCounterWithBackend("eager")
    for block in model.layers:
        checkpoint_activations(block, recomputed)
        block.compile(backend=counter, fullgraph=True)
    return model, counter


def train(model, length=32, **options):
    ids = torch.randint(50, (2, length))
    model.loss(ids, ids, **options).backward()


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [*((name, "none") for name in KINDS), ("rope", "selective"), ("rope and nope", "full")],
)
def test_a_run_with_a_drop(tiny_decoder, name, recomputed):
    positional, kinds = KINDS[name]
    model, counter = compiled(tiny_decoder, positional, recomputed)
    train(model)
    train(model)
    assert counter.frame_count == kinds
    model.layout = drop(model.layout, qk_norm=True)
    train(model)
    after = counter.frame_count
    assert after <= 2 * kinds
    train(model)
    assert counter.frame_count == after


@pytest.mark.parametrize("name", ["rope", "half of the channels", "rope and nope"])
def test_other_lengths_are_compiled_for_once(tiny_decoder, name):
    """The first other length makes the graph one for any, all later ones use it. (With masks the
    backend of a CPU goes through blocks of queries, as many as the length asks for.)"""
    positional, kinds = KINDS[name]
    model, counter = compiled(tiny_decoder, positional)
    for length in (32, 40, 48, 56):
        train(model, length)
    assert counter.frame_count <= 2 * kinds


def test_documents_as_bounds_are_one_graph(tiny_decoder):
    model, counter = compiled(tiny_decoder, {})
    for end in (10, 20):
        documents = (torch.arange(32) >= end).long().expand(2, 32)
        train(model, mask=backends.Mask(documents=documents))
    assert counter.frame_count == 1


def test_block_masks_come_from_outside_of_the_graph(tiny_decoder, monkeypatch):
    """FlexAttention has no backward on a CPU; its forward pass breaks no graph."""
    monkeypatch.setattr(backends, "_compiled_once", lambda function: function)  # the mask's own
    positional = {"windows": [8, None], "layers": ["alibi"]}
    model, counter = compiled(tiny_decoder, positional)
    for block in model.layers:
        block.self_attn.attend = backends.flex
    ids = torch.randint(50, (2, 128))
    with torch.no_grad():
        for end in (50, 60):
            documents = (torch.arange(128) >= end).long().expand(2, 128)
            model(ids, mask=backends.Mask(documents=documents))
    assert counter.frame_count == 2
