"""Muon and AdamW behind one object are Muon and AdamW."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from tests.program import run_ranks
from trainer.model.config import SoftmaxConfig
from trainer.runs.config import OptimizerConfig
from trainer.training.optimizers import make_optimizer


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


def test_hybrid_equals_two_optimizers_side_by_side(tiny_decoder):
    ours = tiny_decoder(model={"tie_word_embeddings": False})
    reference = copy.deepcopy(ours)
    config = OptimizerConfig(name="muon", lr=1e-3, muon_lr=0.02)
    matrices = [p for n, p in reference.named_parameters() if "layers" in n and p.ndim == 2]
    ids = {id(p) for p in matrices}
    rest = [p for p in reference.parameters() if id(p) not in ids]
    pair = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    steps(ours, [make_optimizer(ours, config)], 3)
    steps(reference, pair, 3)
    assert_equal(ours, reference)


def test_saved_and_loaded_state_goes_on_bitwise(tiny_decoder):
    for name in ("adamw", "muon"):
        config = OptimizerConfig(name=name, lr=1e-3)
        whole = tiny_decoder()
        optimizer = make_optimizer(whole, config)
        steps(whole, [optimizer], 2)
        other = copy.deepcopy(whole)
        loaded = make_optimizer(other, config)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(whole, [optimizer], 2)
        steps(other, [loaded], 2)
        assert_equal(whole, other)


def test_cleared_state_is_a_fresh_optimizer(tiny_decoder):
    config = OptimizerConfig(name="muon")
    model = tiny_decoder()
    optimizer = make_optimizer(model, config)
    steps(model, [optimizer], 2)
    other = copy.deepcopy(model)
    optimizer.state.clear()
    steps(model, [optimizer], 2)
    steps(other, [make_optimizer(other, config)], 2)
    assert_equal(model, other)


def test_shards_of_any_size_give_what_whole_matrices_do(tmp_path):
    """Also where ranks have fewer rows than others, or none."""
    script = Path(__file__).with_name("muon_ranks.py")
    for rank in run_ranks(3, script, cwd=tmp_path):
        assert rank.stdout.split() == ["True"] * 6, rank.stderr[-2000:]


def decayed(model, config):
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]
        for group in make_optimizer(model, config).param_groups
        if group["weight_decay"]
        for p in group["params"]
    }


def test_decay_is_on_matrices_and_by_option_on_embeddings(tiny_decoder):
    softmax = SoftmaxConfig(learned_scale=True, sinks=True)
    shape = {"tie_word_embeddings": False, "qkv_bias": True, "softmax": softmax}
    model = tiny_decoder(model=shape)
    for name in ("adamw", "muon"):
        blocks = {n for n, p in model.named_parameters() if "layers" in n and p.ndim == 2}
        assert decayed(model, OptimizerConfig(name=name)) == blocks
        assert decayed(model, OptimizerConfig(name=name, decay_embeddings=True)) == blocks | {
            "embed_tokens.weight",
            "lm_head.weight",
        }
