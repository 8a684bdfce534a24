"""Theorems of the papers on a tiny model in float64: DroPE, Sec. 3 and 4.1."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.positional.encodings import by_name

T = 16
vectors = st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=1, max_size=12)


def watched(model, ids, *, embeddings=None):
    """Attention maps ``[H, T, T]`` (with gradients) and the states ``[T, d]`` that are fed into the
    attention of every layer."""
    maps, states = [], []

    def attend(q, k, v, mask):
        q, k, v = (x.double() for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        future = torch.ones(len(ids), len(ids)).triu(1).bool()
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -torch.inf)
        maps.append(scores.softmax(-1)[0])
        return scores.softmax(-1) @ v

    model.double()
    hooks = [
        block.input_layernorm.register_forward_hook(lambda _, __, out: states.append(out[0]))
        for block in model.layers
    ]
    if embeddings is not None:
        hooks.append(model.embed_tokens.register_forward_hook(lambda *_: embeddings[None]))
    for block in model.layers:
        block.self_attn.attend = attend
    logits = model(ids[None])[0]
    for hook in hooks:
        hook.remove()
    return maps, states, logits


def uniform(tokens=T):
    """alpha_ij = 1 / i for j <= i."""
    return (
        torch.ones(tokens, tokens, dtype=torch.float64).tril()
        / torch.arange(1, tokens + 1)[:, None]
    )


def centred(weights):
    """Positional weights of Def. 3.1: zero above the diagonal, every row sums to zero."""
    weights = weights.tril()
    rows = torch.arange(1, len(weights) + 1)[:, None]
    return (weights - weights.sum(-1, keepdim=True) / rows).tril()


def positional_bias(attention, weights):
    """A^c of Def. 3.1 for maps ``[H, T, T]``, summed over heads."""
    return (weights * attention).sum() / attention.shape[-1]


def query_key_parameters(model):
    return [
        getattr(block.self_attn, name).weight
        for block in model.layers
        for name in ("q_proj", "k_proj")
    ]


CONSTANT = torch.full((T,), 7)
WEIGHTS = centred(torch.randn(T, T, generator=torch.Generator().manual_seed(3)).double())


def test_proposition_3_2_nope_is_blind_on_a_constant_sequence(tiny_decoder):
    """Uniform maps, constant outputs, A^c = 0, and no gradient for queries and keys."""
    model = tiny_decoder(layers=["nope"])
    maps, _, logits = watched(model, CONSTANT)
    for attention in maps:
        torch.testing.assert_close(attention, uniform().expand_as(attention))
    torch.testing.assert_close(logits, logits[:1].expand_as(logits))
    for attention in maps:
        assert abs(positional_bias(attention, WEIGHTS)) < 1e-12
    bias = sum(positional_bias(attention, WEIGHTS) for attention in maps)
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(T))
    for value in (bias, loss):
        gradients = torch.autograd.grad(value, query_key_parameters(model), retain_graph=True)
        assert max(g.abs().max() for g in gradients) < 1e-12


def test_proposition_3_2_needs_nope(tiny_decoder):
    """Remark B.1: with RoPE the output is still constant, the maps and gradients are not."""
    model = tiny_decoder(layers=["rope"])
    maps, _, logits = watched(model, CONSTANT)
    torch.testing.assert_close(logits, logits[:1].expand_as(logits), rtol=0, atol=1e-5)
    assert (maps[0] - uniform()).abs().max() > 1e-2
    bias = positional_bias(maps[0], WEIGHTS)
    gradients = torch.autograd.grad(bias, query_key_parameters(model)[:2])
    assert min(g.norm() for g in gradients) > 1e-3


def test_proposition_3_3_rope_sees_positions_on_a_constant_sequence(tiny_decoder):
    """With c_ij = alpha_ij - 1/i: A^c > 0 and a gradient that is not zero, in every layer."""
    model = tiny_decoder(layers=["rope"])
    maps, _, _ = watched(model, CONSTANT)
    for index, attention in enumerate(maps):
        # A^c = sum alpha^2 - 1/i (App. B.2), so the weights take part in the gradient.
        bias = (attention.square().sum(-1) - 1 / torch.arange(1, T + 1)).mean()
        fixed = positional_bias(attention, (attention - uniform()).detach())
        queries = model.layers[index].self_attn.q_proj.weight
        for value in (bias, fixed):
            (gradient,) = torch.autograd.grad(value, queries, retain_graph=True)
            assert value > 1e-4
            assert gradient.norm() > 1e-4


def prefix_spread(states):
    """max over j <= i of |mean(h_1 .. h_i) - h_j| (Theorem 3.4)."""
    means = states.cumsum(0) / torch.arange(1, len(states) + 1)[:, None]
    return (means[:, None] - states[None]).norm(dim=-1).tril().max()


def small_embeddings(spread, tokens=T):
    """One common vector and differences of size ``spread``; the same ones for every spread."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randn(32, generator=generator).double()
    return common + spread * torch.randn(256, 32, generator=generator).double()[:tokens]


def measures(model, spread, tokens=T):
    """For every layer: prefix spread, |A^c| and the norm of its gradient."""
    weights = WEIGHTS if tokens == T else centred(torch.ones(tokens, tokens).double().tril(-1))
    embeddings = small_embeddings(spread, tokens)
    maps, states, _ = watched(model, torch.zeros(tokens).long(), embeddings=embeddings)
    rows = []
    for block, attention, state in zip(model.layers, maps, states, strict=True):
        bias = positional_bias(attention, weights)
        attention_weights = [block.self_attn.q_proj.weight, block.self_attn.k_proj.weight]
        gradients = torch.autograd.grad(bias, attention_weights, retain_graph=True)
        gradient = torch.stack([g.norm() for g in gradients]).max()
        rows.append(torch.stack([prefix_spread(state), bias.abs(), gradient]).detach())
    return torch.stack(rows)


def test_theorem_3_4_nope_propagates_uniformity(tiny_decoder):
    """Ten times the spread of the embeddings: ten times all three, in every layer."""
    model = tiny_decoder(layers=["nope"], model={"num_hidden_layers": 3})
    ratio = measures(model, 1e-3) / measures(model, 1e-4)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 10), rtol=0.1, atol=0)


def test_theorem_3_4_its_constant_does_not_grow_with_the_length(tiny_decoder):
    model = tiny_decoder(layers=["nope"])
    spreads = [measures(model, 1e-4, n)[:, 0] for n in (16, 64, 256)]
    constants = [(spread / spread[0]).max() for spread in spreads]
    assert max(constants) < 1.5 * constants[0]


def test_theorem_3_4_needs_nope(tiny_decoder):
    """With RoPE A^c and its gradient stay where they are however small the spread is."""
    model = tiny_decoder(layers=["rope"], model={"num_hidden_layers": 3})
    ratio = measures(model, 1e-4)[:, 1:] / measures(model, 1e-5)[:, 1:]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.05, atol=0)


@given(vectors)
def test_lemma_b4_softmax_moves_less_than_its_logits(pairs):
    a, b = torch.tensor(pairs, dtype=torch.float64).T
    moved = ((a + b).softmax(0) - a.softmax(0)).abs().sum()
    assert moved <= b.abs().max() + 1e-12


def test_section_4_1_slow_frequencies_never_turn_once():
    """With base 1e4, d = 64, C = 32,000 two pairs turn less than once, not "at least five".

    Five or more need C below 2 pi * 10^(27 / 8) = 14,900. The conclusion stands: some do not turn.
    """

    def slow(length):
        spectrum = by_name("rope", 64, length)
        return sum(f * length < 2 * math.pi for f in spectrum.inv_freq)

    assert slow(32_000) == 2
    assert slow(14_800) == 5
    assert slow(15_000) == 4
