"""Muon and AdamW behind one object are Muon and AdamW."""

from __future__ import annotations

import copy

import pytest
import torch

from trainer.lightning import optimizers
from trainer.lightning.optimizers import (
    make_optimizer,
    scale_or_skip_next_step,
)


def loss_of(model):
    ids = torch.arange(24).view(2, 12)
    return model.loss(ids, ids)


def steps(model, optimizers, count):
    for _ in range(count):
        model.zero_grad(set_to_none=True)
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(a, b):
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_hybrid_equals_two_optimizers_side_by_side(tiny_decoder, monkeypatch):
    monkeypatch.setattr(optimizers, "_iteration_dtype", lambda _: torch.bfloat16)  # as torch's Muon
    ours = tiny_decoder(model={"tie_word_embeddings": False})
    reference = copy.deepcopy(ours)
    config = {"name": "muon", "lr": 1e-3, "muon_lr": 0.02}
    matrices = [p for n, p in reference.named_parameters() if "layers" in n and p.ndim == 2]
    ids = {id(p) for p in matrices}
    others = [p for p in reference.parameters() if id(p) not in ids]
    pair = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    steps(ours, [make_optimizer(ours, **config)], 3)
    steps(reference, pair, 3)
    assert_equal(ours, reference)


@pytest.mark.parametrize("most", [1, 3 * 24 * 16, 10**9])
def test_batches_of_matrices_are_updated_as_each_alone(tiny_decoder, monkeypatch, most):
    """Whatever their size: one matrix at a time, some, and all of a shape."""
    config = {"name": "muon"}
    models = [tiny_decoder(), tiny_decoder()]
    for model, elements in zip(models, (1, most), strict=True):
        monkeypatch.setattr(optimizers, "BATCH_ELEMENTS", elements)
        steps(model, [make_optimizer(model, **config)], 3)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def decayed(model, config):
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]
        for group in make_optimizer(model, **config).param_groups
        if group["weight_decay"]
        for p in group["params"]
    }


def test_decay_is_on_matrices_and_by_option_on_embeddings(tiny_decoder):
    shape = {"tie_word_embeddings": False, "qkv_bias": True}
    model = tiny_decoder(model=shape)
    for name in ("adamw", "muon"):
        blocks = {n for n, p in model.named_parameters() if "layers" in n and p.ndim == 2}
        assert decayed(model, {"name": name}) == blocks
        assert decayed(model, {"name": name, "decay_embeddings": True}) == blocks | {
            "embed_tokens.weight",
            "lm_head.weight",
        }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_next_step_is_scaled_or_skipped(tiny_decoder, name):
    """A step that is skipped leaves weights and all averages as they are, also the first one."""
    config = {"name": name, "lr": 1e-3}
    plain, scaled, skipped = (tiny_decoder() for _ in range(3))
    for model, factor, skip in ((plain, 1.0, 0), (scaled, 0.25, 0), (skipped, 1.0, 1)):
        optimizer = make_optimizer(model, **config)
        for first in (True, False):
            model.zero_grad(set_to_none=True)
            (loss_of(model) / factor).backward()
            before = copy.deepcopy([p.detach() for p in model.parameters()])
            averages = copy.deepcopy(optimizer.state)
            flag = torch.tensor(bool(skip) and not first)
            scale_or_skip_next_step(optimizer, torch.tensor(factor), flag)
            optimizer.step()
        if skip:
            assert all(map(torch.equal, before, model.parameters()))
            for old, new in zip(averages.values(), optimizer.state.values(), strict=True):
                for key in old:
                    assert torch.equal(old[key], new[key]), key
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    fresh = tiny_decoder()
    optimizer = make_optimizer(fresh, **config)
    loss_of(fresh).backward()
    scale_or_skip_next_step(optimizer, torch.tensor(1.0), torch.tensor(True))
    optimizer.step()
    assert_equal(fresh, tiny_decoder())


def test_an_unknown_name_is_answered_with_the_known_ones(tiny_decoder):
    with pytest.raises(ValueError, match=r"optimizer: expected one of adamw, muon.*, got 'sgd'"):
        make_optimizer(tiny_decoder(), "sgd")
