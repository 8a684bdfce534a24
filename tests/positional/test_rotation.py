"""Rotation of queries and keys: geometry, precision, and what is computed when."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.golden.files import GOLDEN
from tests.positional.examples import encode, one_layer
from tests.reference import turned
from trainer.interchange.hf_rope import spectrum_from_rope_parameters
from trainer.positional import rotation
from trainer.positional.encodings import by_name
from trainer.positional.layout import LayerEncoding, uniform
from trainer.positional.rescaling import dynamic, yarn
from trainer.positional.rotation import head_groups, rotary_table, rotate
from trainer.positional.spectrum import Spectrum, Temperature

C = 64
ROPE, NOPE = by_name("rope", 16, C), Spectrum()
seeds = st.integers(0, 2**32 - 1)


def groups_of(*spectra, positions=8, length=None):
    positions = torch.arange(positions) if isinstance(positions, int) else positions
    (groups,) = head_groups(one_layer(C, *spectra), positions, length or positions.shape[-1])
    return groups


def queries_and_keys(seed=0, tokens=8, batch=2):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, tokens, 16, generator=generator)
    return q, torch.randn(batch, 2, tokens, 16, generator=generator)


@given(seeds, st.integers(0, 4096), st.integers(0, 4096), st.integers(0, 10**6))
def test_scores_depend_on_the_distance_alone(seed, i, j, shift):
    """In float64, with tables rounded to float32 once: 1e-6 of the norms."""
    q, k = (x[0, 0, 0].double() for x in queries_and_keys(seed))

    def score(i, j):
        return rotate(q, *tables(i)) @ rotate(k, *tables(j))

    def tables(position):
        return [table[0] for table in rotary_table(ROPE, torch.tensor([position]))]

    assert abs(score(i, j) - score(i + shift, j + shift)) < 1e-6 * q.norm() * k.norm()


def test_channels_are_paired_like_transformers():
    q, k = queries_and_keys()
    cos, sin = rotary_table(ROPE, torch.arange(8))
    both = cos[None], torch.cat([sin[:, 8:], sin[:, 8:]], dim=-1)[None]
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, *both), strict=True):
        torch.testing.assert_close(rotate(ours, cos, sin), theirs, rtol=0, atol=1e-6)


@given(st.integers(0, 10**6), seeds)
def test_a_pair_is_a_complex_number_that_turns(position, seed):
    vector = queries_and_keys(seed)[0][0, 0, 0]
    ours = rotate(vector, *(t[0] for t in rotary_table(ROPE, torch.tensor([position]))))
    expected = torch.tensor(turned(vector.tolist(), position, ROPE.inv_freq))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_gradients_are_those_of_the_formula(scale):
    half = replace(by_name("half_rope", 16, C), rotary_scale=scale)
    cos, sin = rotary_table(half, torch.arange(8))
    x = queries_and_keys()[0].double().requires_grad_()
    weights = queries_and_keys(seed=1)[0].double()
    pairs = cos.shape[-1] // 2
    first, second, others = x.split([pairs, pairs, 16 - 2 * pairs], dim=-1)
    c, s = cos[:, pairs:], sin[:, pairs:]
    plain = torch.cat([first * c - second * s, second * c + first * s, others], dim=-1)
    (expected,) = torch.autograd.grad((plain * weights).sum(), x)
    (gradient,) = torch.autograd.grad((rotate(x, cos, sin) * weights).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


def test_tables_are_right_to_float32_at_a_million_tokens_where_naive_phases_are_not():
    positions = torch.cat([torch.arange(1000), torch.arange(999_000, 1_000_001)])
    exact = positions.double()[:, None] * torch.tensor(ROPE.inv_freq, dtype=torch.float64)
    naive = positions.float()[:, None] * torch.tensor(ROPE.inv_freq)

    def error(cos, sin):
        cos, sin = cos[:, -8:], sin[:, -8:]
        return max((cos - exact.cos()).abs().max(), (sin - exact.sin()).abs().max())

    assert error(*rotary_table(ROPE, positions)) < 1e-6
    assert error(naive.cos(), naive.sin()) > 1e-2


@pytest.fixture
def computed(monkeypatch):
    """The frequencies whose tables were computed."""
    calls, table = [], rotation._table
    monkeypatch.setattr(rotation, "_table", lambda *args: calls.append(args[0]) or table(*args))
    return calls


def test_a_table_is_computed_once_for_each_distinct_spectrum(tiny_decoder, computed):
    model = tiny_decoder(
        layers=["rope", "slow", "rope", "nope"],
        heads={"nope": 0.5},
        encodings={"slow": {"type": "rope", "base": 1e6}},
        model={"num_hidden_layers": 6},
    )
    model(torch.arange(8)[None])
    assert len(computed) == 2
    model(torch.arange(8)[None])
    assert len(computed) <= 4


@pytest.mark.parametrize("name", ["nope", "alibi"])
def test_no_table_is_computed_where_nothing_rotates(tiny_decoder, computed, name):
    tiny_decoder(layers=[name])(torch.arange(8)[None])
    assert computed == []


def test_without_rotation_queries_and_keys_are_the_same_objects():
    q, k = queries_and_keys()
    new_q, new_k = encode(q, k, groups_of(NOPE, NOPE))
    assert new_q is q
    assert new_k is k


def test_half_of_the_heads_without_rotation_keep_their_queries_and_keys():
    q, k = queries_and_keys()
    new_q, new_k = encode(q, k, groups_of(ROPE, NOPE))
    rotated_q, rotated_k = encode(q, k, groups_of(ROPE, ROPE))
    torch.testing.assert_close(new_q, torch.cat([rotated_q[:, :2], q[:, 2:]], dim=1))
    torch.testing.assert_close(new_k, torch.cat([rotated_k[:, :1], k[:, 1:]], dim=1))


@pytest.mark.parametrize("spectra", [(ROPE, ROPE), (ROPE, NOPE)])
def test_every_sequence_may_have_other_positions(spectra):
    q, k = queries_and_keys()
    positions = torch.stack([torch.arange(8), torch.tensor([5, 0, 900, 7, 1, 1, 2, 3])])
    together = encode(q, k, groups_of(*spectra, positions=positions))
    for b in range(2):
        alone = encode(q[b : b + 1], k[b : b + 1], groups_of(*spectra, positions=positions[b]))
        for ours, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[b : b + 1], expected)


def test_temperature_of_the_sequence_multiplies_queries_alone():
    q, k = queries_and_keys()
    tempered = Spectrum(temperature=Temperature(0.5))
    new_q, new_k = encode(q, k, groups_of(tempered, tempered, length=4 * C))
    torch.testing.assert_close(new_q, q * (1 + 0.5 * math.log(4)))
    assert torch.equal(new_k, k)
    assert encode(q, k, groups_of(tempered, tempered, length=C))[0] is q


@pytest.mark.parametrize("batched", [False, True])
def test_temperature_per_query_is_that_of_the_keys_it_sees(batched):
    q, k = queries_and_keys(tokens=2 * C)
    spectrum = Spectrum(temperature=Temperature(0.1, 2.0, 1.5, per="query"))
    positions = torch.arange(2 * C)
    if batched:
        positions = torch.stack([positions, positions + 100])
    new_q, _ = encode(q, k, groups_of(spectrum, spectrum, positions=positions))
    for b, i in [(0, 0), (0, C - 1), (0, C), (1, 2 * C - 1)]:
        seen = i + 1 + (100 if batched and b else 0)
        factor = 1.5 * (1 + 0.1 * math.log(max(seen, C) / C)) ** 2
        torch.testing.assert_close(new_q[b, :, i], q[b, :, i] * factor)


CASES = json.loads((GOLDEN / "rope.json").read_text())
"""Rotations that transformers 5.23.0 computed."""


def name_of(case):
    return f"{case['rope']['rope_type']} {case['head_dim']} at {case['length']}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_frequencies_and_tables_are_those_of_transformers(case):
    training_length = case["training_length"]
    spectrum = spectrum_from_rope_parameters(case["rope"], case["head_dim"], training_length)
    spectrum = spectrum.at(case["length"], training_length)
    expected = torch.tensor(case["inv_freq"])
    torch.testing.assert_close(torch.tensor(spectrum.inv_freq), expected, rtol=1e-6, atol=0)
    assert spectrum.rotary_scale == pytest.approx(case["attention_factor"], rel=1e-6)
    positions = torch.tensor(case["positions"])
    for table, wanted in zip(
        rotary_table(spectrum, positions), (case["cos"], case["sin"]), strict=True
    ):
        # transformers computes the phase in float32: it is off by 2^-24 of itself, and so are its
        # frequencies, while ours are exact to float64.
        error = (table[:, table.shape[-1] // 2 :] - torch.tensor(wanted)).abs().amax(dim=-1)
        assert (error <= 2e-7 + 1e-7 * positions).all(), error


def test_heads_that_differ_in_their_scale_alone_have_tables_of_their_own():
    rope = by_name("rope", 16, 32)
    heads = LayerEncoding((rope, replace(rope, rotary_scale=2.0)))
    layout = replace(uniform(rope, layers=1, heads=2, training_length=32), layers=(heads,))
    ((plain, scaled),) = head_groups(layout, torch.arange(4), 4)
    torch.testing.assert_close(scaled.cos, 2 * plain.cos)


def test_temperature_in_steps_grows_where_a_query_sees_another_reference():
    """As in Llama 4, floor((position + 1) / R) + 1, and no further than a window reaches."""
    tempered = Temperature(0.5, per="query", reference=4, steps=True)
    layout = one_layer(C, Spectrum(temperature=tempered))
    ((group,),) = head_groups(layout, torch.arange(12), 12)
    expected = [1 + 0.5 * math.log((i + 1) // 4 + 1) for i in range(12)]
    assert group.temperature[:, 0].tolist() == pytest.approx(expected)
    windowed = one_layer(C, Spectrum(temperature=tempered), window=5)
    ((group,),) = head_groups(windowed, torch.arange(12), 12)
    expected = [1 + 0.5 * math.log(min(i + 1, 5) // 4 + 1) for i in range(12)]
    assert group.temperature[:, 0].tolist() == pytest.approx(expected)
    of_sequence = replace(tempered, per="sequence")
    scales = [of_sequence.at(n, C).scale for n in (3, 4, 7, 8)]
    assert scales == pytest.approx([1 + 0.5 * math.log(x) for x in (1, 2, 2, 3)])


def test_rows_of_other_lengths_have_frequencies_scales_and_temperatures_of_their_own():
    tempered = replace(dynamic(ROPE, yarn, C), temperature=Temperature(0.5))
    layout = one_layer(C, tempered)
    ((together,),) = head_groups(layout, torch.arange(8), (C, 4 * C))
    for row, length in enumerate((C, 4 * C)):
        ((alone,),) = head_groups(layout, torch.arange(8), length)
        torch.testing.assert_close(together.cos[row, 0], alone.cos)
        torch.testing.assert_close(together.sin[row, 0], alone.sin)
        assert together.temperature[row].item() == pytest.approx(alone.temperature or 1.0)
