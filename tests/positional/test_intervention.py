"""Interventions: factors on bands of heads, noise in their place, at the seam before the scores."""

from dataclasses import replace

import pytest
import torch

from tests.positional.examples import encoded, one_layer
from trainer.positional.encodings import by_name
from trainer.positional.intervention import intervene
from trainer.positional.layout import Intervention
from trainer.positional.spectrum import Spectrum

C, D = 64, 8
ROPE, NOPE = by_name("rope", D, C), Spectrum()
HALF = by_name("rope", D, C, rotary_fraction=0.5)
IDS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(3))
MODELS = {
    "rope": {},
    "nope": {"layers": ["nope"]},
    "half of the heads": {"heads": {"nope": 0.5}},
    "windows": {"layers": ["rope", "nope"], "windows": [6, None]},
}


def row(**channels):
    """Factors of one head; ``c3=0.5`` is half of channel 3."""
    return tuple(channels.get(f"c{c}", 1.0) for c in range(D))


ONES, ZEROS = row(), (0.0,) * D
EVERYTHING = Intervention(
    query=(ONES, row(c1=0.3, c5=0.3), ZEROS, row(c0=2.0, c4=2.0)),
    key=(row(c2=0.5, c6=0.5), ZEROS),
    query_noise=(0.0, 0.0, 0.8, 0.1),
    key_noise=(0.1, 0.7),
    seed=5,
)


def with_intervention(layout, intervention, layer=0):
    layers = list(layout.layers)
    layers[layer] = replace(layers[layer], intervention=intervention)
    return replace(layout, layers=tuple(layers))


def with_seam(q, k, spectra, intervention, positions=None):
    positions = torch.arange(q.shape[2]) if positions is None else positions
    q, k = encoded(q, k, one_layer(C, *spectra), positions, C)
    return (q, k) if intervention is None else intervene(intervention, q, k, positions, positions)


def queries_and_keys(tokens=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, tokens, D, generator=generator)
    return q, torch.randn(2, 2, tokens, D, generator=generator)


@torch.no_grad()
def head_outputs(model, layer=0):
    """Return the output of every query head, ``[T, Hq, D]``."""
    seen = []
    projection = model.layers[layer].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    model(IDS[:1])
    handle.remove()
    return seen[0].unflatten(-1, (-1, D))


@pytest.mark.parametrize(
    ("intervention", "changed"),
    [
        (Intervention(query=(ONES, ONES, row(c1=0.5, c5=0.5), ONES)), [2]),
        (Intervention(key=(ONES, row(c0=0.5, c4=0.5))), [2, 3]),
        (Intervention(query=(ONES,) * 4, query_noise=(0.0, 0.5, 0.0, 0.0)), [1]),
    ],
    ids=["a query head", "a key head", "noise"],
)
def test_only_the_heads_that_read_a_change_differ(tiny_decoder, intervention, changed):
    model = tiny_decoder()
    before = head_outputs(model)
    model.layout = with_intervention(model.layout, intervention)
    after = head_outputs(model)
    assert [h for h in range(4) if not torch.equal(before[:, h], after[:, h])] == changed


@pytest.mark.parametrize("side", ["query", "key"])
def test_a_head_of_zeros_attends_evenly(tiny_decoder, side):
    model = tiny_decoder()
    rows = (ZEROS, *(ONES,) * (3 if side == "query" else 1))
    model.layout = with_intervention(model.layout, Intervention(**{side: rows}))
    values = []
    handle = model.layers[0].self_attn.v_proj.register_forward_hook(
        lambda _, __, out: values.append(out[0].detach())
    )
    out = head_outputs(model)[:, 0]
    handle.remove()
    value = values[0][:, :D]
    mean = value.cumsum(0) / torch.arange(1, len(value) + 1)[:, None]
    torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spectra", [(ROPE, NOPE), (NOPE, ROPE), (HALF, ROPE)])
def test_two_spectra_in_a_layer_keep_gains_with_their_heads(spectra):
    q, k = queries_and_keys()
    out_q, out_k = with_seam(q, k, spectra, EVERYTHING)
    noise_q, noise_k = with_seam(q * 0, k * 0, spectra, EVERYTHING)
    for kv, spectrum in enumerate(spectra):
        for h in (2 * kv, 2 * kv + 1):
            alone, plain_k = with_seam(q[:, h : h + 1], k[:, kv : kv + 1], (spectrum,), None)
            expected = alone[:, 0] * torch.tensor(EVERYTHING.query[h]) + noise_q[:, h]
            torch.testing.assert_close(out_q[:, h], expected, rtol=1e-6, atol=1e-6)
        expected = plain_k[:, 0] * torch.tensor(EVERYTHING.key[kv]) + noise_k[:, kv]
        torch.testing.assert_close(out_k[:, kv], expected, rtol=1e-6, atol=1e-6)


def noise_at(positions, intervention=EVERYTHING):
    """``[H, T, D]`` of queries and of keys; at positions ``[B, T]``, ``[B, H, T, D]``."""
    batch, tokens = positions.shape[0] if positions.dim() == 2 else 1, positions.shape[-1]
    zeros = [torch.zeros(batch, heads, tokens, D) for heads in (4, 2)]
    q, k = with_seam(*zeros, (ROPE, ROPE), intervention, positions)
    return (q, k) if positions.dim() == 2 else (q[0], k[0])


def test_noise_does_not_repeat_between_positions_heads_and_channels():
    """Not even between positions that are a power of two apart."""
    first = noise_at(torch.arange(5))[0]
    for distance in (5, 2048, 4096, 2**20, 2**31 - 5):
        assert not torch.equal(first, noise_at(torch.arange(5) + distance)[0])
    every = Intervention(query=(ONES,) * 4, query_noise=(1.0,) * 4)
    numbers = noise_at(torch.arange(20_000), every)[0]
    assert len(numbers.unique()) > 0.98 * numbers.numel()


def test_noise_of_a_head_depends_on_no_other_and_on_no_factor():
    positions = torch.arange(5)
    every = Intervention(query=(ONES,) * 4, query_noise=(1.0,) * 4)
    some = Intervention(query=(ONES, row(c1=0.5), ZEROS, ONES), query_noise=(0.0, 0.0, 1.0, 1.0))
    assert torch.equal(noise_at(positions, every)[0][2:], noise_at(positions, some)[0][2:])


def test_noise_is_gaussian_and_independent_between_heads_sides_and_seeds():
    positions = torch.arange(4096)
    intervention = Intervention((ONES,) * 4, (ONES,) * 2, (1.0, 0.5, 1.0, 0.0), (2.0, 0.0), seed=1)
    q, k = noise_at(positions, intervention)
    assert not q[3].any()
    assert not k[1].any()
    for noise, std in ((q[0], 1.0), (q[1], 0.5), (k[0], 2.0)):
        assert float(noise.std()) == pytest.approx(std, rel=0.02)
        assert abs(float(noise.mean())) < 0.02 * std
        kurtosis = float(noise.double().pow(4).mean()) / std**4
        assert kurtosis == pytest.approx(3, rel=0.1)
    again = noise_at(positions, replace(intervention, seed=2))[0]
    draws = torch.stack([*q[:3], k[0], *again[:3]]).flatten(1)
    for values in (draws, draws.abs()):  # equal sizes with other signs would be dependent too
        correlations = torch.corrcoef(values) - torch.eye(len(values))
        assert correlations.abs().max() < 0.03


@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_reading_in_parts_is_reading_in_one_go(tiny_decoder, positional):
    model = tiny_decoder(**positional)
    model.layout = with_intervention(model.layout, EVERYTHING)
    cache = model.empty_cache(2, IDS.shape[1])
    parts = [model(part, cache=cache) for part in IDS.split([7, 1, 1, 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(IDS), rtol=1e-4, atol=1e-4)
