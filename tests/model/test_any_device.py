"""Every forward pass makes its tensors on the device of the model, and reads none of them.

Torch's meta device stands for a GPU: what mixes its tensors with those of the CPU fails, and so
does what reads a value.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.model.backends import Mask
from trainer.model.config import QKNormConfig
from trainer.positional.encodings import ENCODINGS
from trainer.positional.layout import Intervention, drop
from trainer.positional.rescaling import RESCALINGS

LENGTH, LATER = 24, 80
LAYOUTS = {
    **{name: {"layers": [name]} for name in ENCODINGS},
    "windows": {"layers": ["rope", "nope"], "windows": [6, None]},
    "rope_id": {"layers": ["rope_id"], "training_length": 128},
    "half of the heads": {"heads": {"nope": 0.5}},
    "qk_norm": {"model": {"qk_norm": QKNormConfig("always", "full")}},
}


def on_meta(tiny_decoder, **changes):
    model = tiny_decoder(**{"training_length": LENGTH, **changes}).to("meta")
    model.compute_dtype = torch.bfloat16
    return model


def ids(rows=2, length=LENGTH):
    return torch.zeros(rows, length, dtype=torch.long, device="meta")


def every_pass(model):
    """Training, evaluation, a prompt in pieces, and steps of generation."""
    model.loss(ids(), ids(), mask=Mask(documents=ids())).backward()
    with torch.no_grad():
        model.token_losses(ids(length=LATER), ids(length=LATER))
        for begins in ((), (0, 3)):  # rows of one length, and of several
            cache = model.empty_cache(2, LATER)
            for piece in (10, 5):
                logits = model(ids(length=piece), cache=cache, length=LATER, last=1)
            cache.fill(begins, cache.length)
            for _ in range(2):
                logits = model(ids(length=1), cache=cache)
    assert logits.device.type == "meta"


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tiny_decoder, name):
    every_pass(on_meta(tiny_decoder, **LAYOUTS[name]))


def test_after_a_drop(tiny_decoder):
    model = on_meta(tiny_decoder, model={"qk_norm": QKNormConfig("after_drop")})
    model.layout = drop(model.layout, qk_norm=True)
    every_pass(model)


@pytest.mark.parametrize("rescaling", RESCALINGS.values(), ids=RESCALINGS)
def test_frequencies_that_follow_the_length(tiny_decoder, rescaling):
    model = on_meta(tiny_decoder, heads={"nope": 0.5})
    model.layout = model.layout.dynamically_rescaled(rescaling)
    every_pass(model)


def test_gains_noise_and_temperature(tiny_decoder):
    model = on_meta(tiny_decoder)
    noisy = Intervention(key=((1.0,) * 8, (0.5,) * 8), key_noise=(0.0, 0.3))
    layout = model.layout.map(lambda s: s.with_temperature(coefficient=0.8, per="query"))
    layers = tuple(replace(layer, intervention=noisy) for layer in layout.layers)
    model.layout = replace(layout, layers=layers)
    every_pass(model)
