"""The decoder has the logits of published architectures, and the initial weights it promises."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.func import functional_call

from trainer.model.backends import Mask
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import drop
from trainer.positional.rotation import bias_slopes

IDS = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))


def published(kind, model, **more):
    """The transformers model of that kind with the shape and the weights of ``model``."""
    config = model.config
    hf = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            **{"head_dim": config.head_size} | more,
        )
    ).eval()
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in model.state_dict().items()
    }
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = model.head
    hf.load_state_dict(weights, strict=True)
    return hf


@torch.no_grad()
def assert_same_logits(model, hf):
    ours, theirs = model(IDS), hf(IDS).logits
    assert 0.1 < theirs.std() < 10
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama(tiny_decoder, tied, kv_heads):
    model = tiny_decoder(model={"tie_word_embeddings": tied, "num_key_value_heads": kv_heads})
    assert_same_logits(model, published("Llama", model))


EXACT = {
    "Llama, tied": ("Llama", {}),
    "Llama, one key-value head": (
        "Llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "Qwen3": (
        "Qwen3",
        {"qk_norm": QKNormConfig("always"), "head_dim": 16, "rms_norm_eps": 0.01},
    ),
}


def relative_error(found, expected):
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("kind", "shape"), EXACT.values(), ids=EXACT)
def test_loss_and_gradients_are_those_of_transformers_in_float64(tiny_decoder, kind, shape):
    """Up to cosines and the loss, which are float32 in both; tokens have weights."""
    model = tiny_decoder(model=shape).double()
    hf = published(kind, model).double()
    weights = torch.rand(2, 39, generator=torch.Generator().manual_seed(2))
    losses = F.cross_entropy(hf(IDS).logits[:, :-1].mT, IDS[:, 1:], reduction="none")
    expected = (losses * weights).sum() / weights.sum()
    expected.backward()
    loss = model.loss(IDS[:, :-1], IDS[:, 1:], weights)
    loss.backward()
    assert relative_error(loss, expected) < 1e-6
    for name, parameter in model.named_parameters():
        theirs = hf.get_parameter(name if name.startswith("lm_head") else f"model.{name}")
        assert relative_error(parameter.grad, theirs.grad) < 5e-6, name


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(("kind", "shape"), EXACT.values(), ids=EXACT)
def test_documents_and_padding_are_those_of_transformers(tiny_decoder, kind, shape, chunk):
    """A mask of blocks with positions from 0 in each, and padding on the left."""
    model = tiny_decoder(model=shape).double().eval()
    hf = published(kind, model).double()
    documents = (torch.arange(40) >= torch.tensor([[13], [1]])).long()
    seen = (documents[:, :, None] == documents[:, None]) & torch.ones(40, 40).tril().bool()
    within = seen.sum(-1) - 1
    expected = hf(IDS, attention_mask=seen[:, None], position_ids=within).logits
    model.prefill_chunk = chunk
    assert relative_error(model(IDS, mask=Mask(documents=documents)), expected) < 1e-6
    begins, cache = (0, 7), model.empty_cache(2, 40)
    for row, begin in enumerate(begins):
        model(IDS[row : row + 1, begin:20], cache=cache.part(row, 1, begin))
    cache.fill(begins, 20)
    positions = torch.arange(40) - torch.tensor(begins)[:, None]
    options = {"attention_mask": (positions >= 0).long(), "position_ids": positions.clamp(min=0)}
    expected = hf(IDS, **options).logits[:, 20:]
    assert relative_error(model(IDS[:, 20:], cache=cache), expected) < 1e-6


def test_llama_with_heads_wider_than_the_model(tiny_decoder):
    model = tiny_decoder(model={"head_dim": 16})
    assert_same_logits(model, published("Llama", model))


def test_qwen3_has_qk_norm_per_head(tiny_decoder):
    model = tiny_decoder(model={"qk_norm": QKNormConfig("always", "per_head"), "head_dim": 16})
    assert_same_logits(model, published("Qwen3", model))


def test_olmo2_has_qk_norm_over_the_full_projection(tiny_decoder):
    """OLMo 2 also moves the block's norms, so its formula is written here: rms over all heads."""
    model = tiny_decoder(
        layers=["nope"],
        model={"qk_norm": QKNormConfig("always", "full"), "num_hidden_layers": 1},
    )
    attention = model.layers[0].self_attn
    x = torch.randn(1, 6, 32)

    def normed(linear, norm, heads):
        y = linear(x)[0].double()
        y = y / (y.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * norm.weight
        return y.view(6, heads, 8).transpose(0, 1)

    q = normed(attention.q_proj, attention.q_norm, 4)
    k = normed(attention.k_proj, attention.k_norm, 2).repeat_interleave(2, 0)
    v = attention.v_proj(x)[0].double().view(6, 2, 8).transpose(0, 1).repeat_interleave(2, 0)
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(0, 1).reshape(6, 32) @ (
        attention.o_proj.weight.double().T
    )
    seen = {}
    attention.o_proj.register_forward_hook(lambda _, __, y: seen.update(y=y[0]))
    model.layers[0].input_layernorm.forward = lambda _: x
    model(torch.zeros(1, 6, dtype=torch.long))
    torch.testing.assert_close(seen["y"].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("targets", ["q", "k"])
def test_qk_norm_on_one_side_leaves_the_other_alone(tiny_decoder, targets):
    both = tiny_decoder(model={"qk_norm": QKNormConfig("always")})
    single = tiny_decoder(model={"qk_norm": QKNormConfig("always", targets=targets)})
    other = "k" if targets == "q" else "q"
    attention = single.layers[0].self_attn
    assert getattr(attention, f"{other}_norm") is None
    assert getattr(attention, f"{targets}_norm") is not None
    for block in both.layers:
        setattr(block.self_attn, f"{other}_norm", None)
    single.load_state_dict(both.state_dict())
    torch.testing.assert_close(single(IDS), both(IDS))


def test_qwen2_has_biases_on_queries_keys_and_values(tiny_decoder):
    model = tiny_decoder(model={"qkv_bias": True})
    assert_same_logits(model, published("Qwen2", model))


@pytest.mark.parametrize("window", [1, 7, 32])
def test_mistral_has_sliding_windows(tiny_decoder, window):
    model = tiny_decoder(windows=[window])
    assert_same_logits(model, published("Mistral", model, sliding_window=window))


def test_smollm3_has_layers_without_rotation(tiny_decoder):
    model = tiny_decoder(layers=["rope", "nope", "rope"], model={"num_hidden_layers": 4})
    assert_same_logits(model, published("SmolLM3", model, no_rope_layers=[1, 0, 1, 1]))


@pytest.mark.parametrize("positional", [{}, {"layers": ["alibi"]}, {"windows": [5]}])
def test_packed_documents_do_not_see_each_other(tiny_decoder, positional):
    """Rotation and ALiBi depend on distances alone, so positions may run on across documents."""
    model = tiny_decoder(**positional)
    lengths = [[13, 1, 26], [20, 20, 0]]
    documents = torch.stack(
        [torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    packed = model(IDS, mask=Mask(documents=documents))
    for row, (ids, parts) in enumerate(zip(IDS, lengths, strict=True)):
        alone = [model(part[None])[0] for part in ids.split(parts) if len(part)]
        torch.testing.assert_close(packed[row], torch.cat(alone), rtol=0, atol=1e-5)


def test_a_dropped_rope_decoder_is_a_nope_decoder(tiny_decoder):
    dropped, nope = tiny_decoder(layers=["rope"]), tiny_decoder(layers=["nope"])
    nope.load_state_dict(dropped.state_dict())
    assert not torch.allclose(dropped(IDS), nope(IDS), atol=1e-3)
    dropped.layout = drop(dropped.layout)
    assert torch.equal(dropped(IDS), nope(IDS))


@pytest.mark.parametrize("kind", ["per_head", "full"])
def test_query_and_key_norms_that_wait_for_the_drop(tiny_decoder, kind):
    """Until then norms change nothing and have zero (not missing) gradients."""
    plain = tiny_decoder()
    waiting = tiny_decoder(model={"qk_norm": QKNormConfig("after_drop", kind)})
    waiting.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(waiting(IDS), plain(IDS))

    def norm_gradients():
        waiting.zero_grad()
        waiting.loss(IDS[:, :-1], IDS[:, 1:]).backward()
        return {n: p.grad for n, p in waiting.named_parameters() if "q_norm" in n or "k_norm" in n}

    before = norm_gradients()
    assert len(before) == 4
    assert all(grad is not None and not grad.any() for grad in before.values())
    waiting.layout = drop(waiting.layout, qk_norm=True)
    assert all(grad.any() for grad in norm_gradients().values())


def test_the_loss_is_the_cross_entropy_of_the_logits(tiny_decoder):
    model = tiny_decoder()
    inputs, targets = IDS[:, :-1], IDS[:, 1:]
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(model.loss(inputs, targets), expected.mean())
    torch.testing.assert_close(model.token_losses(inputs, targets).flatten(), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_the_plain_cross_entropy(tiny_decoder, tied):
    model = tiny_decoder(model={"tie_word_embeddings": tied})
    names, parameters = zip(*model.named_parameters(), strict=True)
    inputs, targets = IDS[:, :-1], IDS[:, 1:]
    ours = torch.autograd.grad(model.loss(inputs, targets), parameters)
    logits = functional_call(model, dict(zip(names, parameters, strict=True)), inputs)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for a, b in zip(ours, torch.autograd.grad(plain, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("windows", [[None], [5]])
@pytest.mark.parametrize("last", [1, 3])
def test_the_last_positions_alone_have_the_logits_they_have_among_all(tiny_decoder, windows, last):
    model = tiny_decoder(windows=windows)
    ids = torch.randint(50, (2, 20))
    torch.testing.assert_close(model(ids, last=last), model(ids)[:, -last:])


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
    matrices = [p for n, p in model.named_parameters() if name in n and p.dim() == 2]
    return torch.cat([p.detach().flatten() for p in matrices]).std().item()


@pytest.mark.parametrize(
    ("options", "embedding", "into", "attention_out", "mlp_out"),
    [
        ({}, 0.02, 0.02, 0.02 / 4, 0.02 / 4),
        ({"initializer_by_depth": False}, 0.02, 0.02, 0.02, 0.02),  # DroPE's Table 5
        ({"initializer": "fan_in"}, 128**-0.5, 128**-0.5, 128**-0.5 / 4, 192**-0.5 / 4),
        (
            {"initializer": "fan_in", "initializer_by_depth": False},
            *(128**-0.5, 128**-0.5, 128**-0.5, 192**-0.5),
        ),
        (
            {"initializer": "fan_in", "tie_word_embeddings": False},
            *(1, 128**-0.5, 128**-0.5 / 4, 192**-0.5 / 4),
        ),
    ],
    ids=str,
)
def test_standard_deviations_of_initial_weights(options, embedding, into, attention_out, mlp_out):
    """Matrices that write to the residual stream of eight layers are divided by sqrt(16)."""
    model = decoder(**options)
    expected = {"embed_tokens": embedding, "o_proj": attention_out, "down_proj": mlp_out}
    expected |= dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], into)
    if model.lm_head is not None:
        expected["lm_head"] = 0.1 * 128**-0.5
    assert {name: std(model, name) for name in expected} == pytest.approx(expected, rel=0.03)
    assert (model.head is model.embed_tokens.weight) == model.config.tie_word_embeddings


def test_a_parameter_depends_on_its_name_and_the_seed_alone():
    """An untied head changes no other parameter; no two matrices start equal."""
    plain, untied, other = decoder(), decoder(tie_word_embeddings=False), decoder(seed=1)
    for name, value in plain.named_parameters():
        assert torch.equal(value, untied.get_parameter(name)), name
        assert value.dim() == 1 or not torch.equal(value, other.get_parameter(name)), name
    first_values = [p.flatten()[0].item() for p in plain.parameters() if p.dim() == 2]
    assert len({*first_values}) == len(first_values)


def test_slopes_follow_the_key_value_head_that_a_query_reads():
    slopes = bias_slopes(4, (True, False), torch.device("cpu"))
    assert slopes.tolist() == [*alibi_slopes(4)[:2], 0.0, 0.0]
