"""A temperature per head: its fit, and what it does to logits, against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.evaluation import head_scale
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.head_scale import fit_heads
from trainer.evaluation.layouts import tempered
from trainer.evaluation.store import Store
from trainer.model.config import QKNormConfig, SoftmaxConfig
from trainer.positional.layout import Intervention
from trainer.positional.rescaling import yarn

C, LENGTH = 8, 32
WINDOWS = {n: np.random.default_rng(n).integers(0, 50, (3, n)) for n in (16, LENGTH)}
SHAPES = {
    "nope": (["nope"], {"num_key_value_heads": 4}),
    "rope, GQA": (["rope"], {}),
    "QK-norm": (["nope"], {"qk_norm": QKNormConfig("always")}),
}


def made(decoder, shape, **more):
    layers, model = SHAPES[shape]
    return decoder(training_length=C, layers=layers, model=model | more)


def coefficients(model):
    heads = model.config.num_attention_heads
    rows = range(len(model.layout.layers))
    return [[0.1 * (1 + row + 2 * head) for head in range(heads)] for row in rows]


def summed_losses(model, layout):
    total = 0.0
    with model.using(layout), torch.no_grad():
        for windows in WINDOWS.values():
            ids = torch.from_numpy(np.pad(windows, ((0, 0), (1, 0))))
            logits = model(ids[:, :-1])
            total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    return total


def encoded(model, layout, ids):
    found = []
    with model.using(layout), model.observed(lambda _, q, k, *more, **__: found.append(more[:2])):
        logits = model(ids)
    return found, logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True], ids=["as trained", "yarn"])
@torch.no_grad()
def test_each_head_has_its_own_factor(tiny_decoder, shape, scaled):
    model = made(tiny_decoder, shape)
    rows = coefficients(model)
    layers = range(len(rows))
    before = model.layout.rescaled(yarn, 4.0) if scaled else model.layout
    ids = torch.from_numpy(WINDOWS[LENGTH])
    plain, logits = encoded(model, before, ids)
    found, tempered_logits = encoded(model, before.tempered_by_head(rows, layers), ids)
    q, k = plain[0]
    copies = q.shape[1] // k.shape[1]
    theirs_q, theirs_k = found[0]
    for head, c in enumerate(rows[0]):  # of the first layer: its input is the same
        factor = 1 + c * math.log(LENGTH / C)
        torch.testing.assert_close(theirs_q[:, head], q[:, head] * factor)
        own = theirs_k[:, head // (q.shape[1] // theirs_k.shape[1])]
        torch.testing.assert_close(own, k[:, head // copies])
    assert not torch.allclose(logits, tempered_logits)
    short = ids[:, :C]
    unchanged = [
        encoded(model, x, short)[1] for x in (before, before.tempered_by_head(rows, layers))
    ]
    torch.testing.assert_close(*unchanged)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_coefficient_for_all_heads_is_the_single_one(tiny_decoder, shape):
    model = made(tiny_decoder, shape)
    rows = [[0.3] * 4 for _ in model.layout.layers]
    found = summed_losses(model, model.layout.tempered_by_head(rows, range(len(rows))))
    assert found == pytest.approx(summed_losses(model, tempered(model.layout, 0.3)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("learned", [False, True])
def test_a_fit_lowers_the_loss_and_leaves_the_model_alone(
    tiny_decoder, monkeypatch, shape, learned
):
    monkeypatch.setattr(head_scale, "STEPS", 4)
    model = made(tiny_decoder, shape, softmax=SoftmaxConfig(learned_scale=learned))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    read = []
    fitting = Fitting(
        model, "weights", FitText(WINDOWS, 0, "text"), Store(Path()), 64, lambda *x: read.append(x)
    )
    layers = range(len(model.layout.layers))
    base = tempered(model.layout, 0.0)
    found = fit_heads(fitting, lambda _: base, WINDOWS, layers, 0.2)
    losses = [
        summed_losses(model, model.layout.tempered_by_head(rows, layers))
        for rows in (found, [[0.2] * 4 for _ in layers])
    ]
    assert losses[0] < losses[1]
    assert all(0 <= c <= 100 for row in found for c in row)
    assert len({c for row in found for c in row}) > 1
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert read == [(3, 16), (3, 32)] * 5


def test_interventions_on_shared_keys_stay(tiny_decoder):
    layout = made(tiny_decoder, "rope, GQA").layout
    noisy = replace(layout.layers[0], intervention=Intervention(key_noise=(0.1, 0.2)))
    layout = replace(layout, layers=(noisy, *layout.layers[1:]))
    found = layout.tempered_by_head([[0.1, 0.2, 0.3, 0.4]], [0])
    assert found.layers[0].intervention.key_noise == (0.1, 0.1, 0.2, 0.2)
    assert found.layers[1:] == layout.layers[1:]
