"""Initial weights have the standard deviations that the configuration promises."""

import math

import pytest
import torch

from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout


def decoder(seed=0, **more):
    config = ModelConfig(128, 192, 8, 4, 2, vocab_size=200, qkv_bias=True, **more)
    layout = build_layout(
        PositionalConfig(),
        num_layers=8,
        num_key_value_heads=2,
        head_dim=32,
        training_length=64,
    )
    return Decoder(config, layout, seed)


def std(model, name):
    """Over all layers together."""
    found = [p for n, p in model.named_parameters() if name in n and p.dim() == 2]
    return torch.cat([p.detach().flatten() for p in found]).std().item()


INTO, OUT_OF = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"]


@pytest.mark.parametrize("std_of_all", [0.02, 0.1])
def test_normal_has_one_standard_deviation_but_for_what_writes_to_the_stream(std_of_all):
    model = decoder(initializer_range=std_of_all)
    for name in ["embed_tokens", *INTO]:
        assert std(model, name) == pytest.approx(std_of_all, rel=0.03)
    for name in OUT_OF:
        assert std(model, name) == pytest.approx(std_of_all / math.sqrt(16), rel=0.03)


def test_without_division_by_depth_every_matrix_has_one_standard_deviation():
    """DroPE's Table 5: a range of 0.02."""
    model = decoder(initializer_by_depth=False)
    for name in ["embed_tokens", *INTO, *OUT_OF]:
        assert std(model, name) == pytest.approx(0.02, rel=0.03)
    plain = decoder(initializer="fan_in", initializer_by_depth=False)
    assert std(plain, "down_proj") == pytest.approx(1 / math.sqrt(192), rel=0.03)


def test_fan_in_keeps_the_size_of_activations():
    model = decoder(initializer="fan_in", tie_word_embeddings=False)
    assert std(model, "embed_tokens") == pytest.approx(1, rel=0.03)
    assert std(model, "lm_head") == pytest.approx(0.1 / math.sqrt(128), rel=0.03)
    for name in INTO:
        assert std(model, name) == pytest.approx(1 / math.sqrt(128), rel=0.03)
    assert std(model, "o_proj") == pytest.approx(1 / math.sqrt(128 * 16), rel=0.03)
    assert std(model, "down_proj") == pytest.approx(1 / math.sqrt(192 * 16), rel=0.03)


def test_a_tied_head_is_the_embedding():
    model = decoder(initializer="fan_in")
    assert model.head is model.embed_tokens.weight
    assert std(model, "embed_tokens") == pytest.approx(1 / math.sqrt(128), rel=0.03)
    assert decoder(tie_word_embeddings=False).head.shape == model.head.shape


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("initializer", ["normal", "fan_in"])
def test_the_first_loss_is_that_of_guessing(initializer, tied):
    model = decoder(initializer=initializer, tie_word_embeddings=tied)
    ids = torch.randint(200, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model.loss(ids[:, :-1], ids[:, 1:]).mean().item()
    assert loss == pytest.approx(math.log(200), abs=0.6)


@pytest.mark.parametrize("initializer", ["normal", "fan_in"])
def test_norms_start_at_one_and_biases_at_zero(initializer):
    vectors = [
        (n, p) for n, p in decoder(initializer=initializer).named_parameters() if p.dim() == 1
    ]
    assert len(vectors) == 8 * (2 + 3) + 1
    for name, value in vectors:
        assert (value == (0 if name.endswith("bias") else 1)).all(), name


def test_the_seed_decides_every_weight():
    first, second, other = decoder(), decoder(), decoder(seed=1)
    weights = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)


def test_no_two_matrices_start_equal():
    matrices = [p for p in decoder().parameters() if p.dim() == 2]
    firsts = {p.flatten()[0].item() for p in matrices}
    assert len(firsts) == len(matrices)


def test_a_parameter_starts_the_same_whatever_else_the_model_has():
    """Another vocabulary, a bias, an untied head: the blocks' matrices are what they were."""
    plain, other = decoder(), decoder(tie_word_embeddings=False)
    others = dict(other.named_parameters())
    for name, value in plain.named_parameters():
        assert torch.equal(value, others[name]), name


def test_on_the_meta_device_nothing_is_drawn():
    with torch.device("meta"):
        assert all(p.is_meta for p in decoder().parameters())
