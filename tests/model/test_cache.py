"""A cached continuation is the same as reading everything again."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from trainer.model import backends
from trainer.model.backends import BACKENDS, Mask
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import QKNormConfig
from trainer.model.generate import read_prompts, read_rows
from trainer.positional.layout import Intervention
from trainer.positional.rescaling import RESCALINGS, dynamic, longrope

IDS = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))
MODELS = {
    "rope": {},
    "nope": {"layers": ["nope"]},
    "alibi": {"layers": ["alibi"]},
    "windows": {"layers": ["rope", "nope"], "windows": [6, None]},
    "half of the heads": {"heads": {"nope": 0.5}},
    "rope_id": {"layers": ["rope_id"], "training_length": 128},
    "qk_norm": {"model": {"qk_norm": QKNormConfig("always", "full")}},
}


@torch.no_grad()
@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sizes", [[40], [10, 30], [25] + [1] * 15, [1] * 40])
def test_logits_with_a_cache_are_those_without(tiny_decoder, positional, sizes):
    model = tiny_decoder(**positional)
    cache = model.empty_cache(2, 40)
    pieces = [model(piece, cache=cache) for piece in IDS.split(sizes, dim=1)]
    assert cache.length == 40
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(IDS), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 5]])
def test_rows_that_begin_later_have_the_logits_they_have_alone(tiny_decoder, positional, sizes):
    model = tiny_decoder(**positional)
    prompts, more = [IDS[0, :12], IDS[1, :5]], IDS[:, 20:29]
    cache, begins = model.empty_cache(2, 21), (0, 7)
    for row, begin in enumerate(begins):
        for layer in cache.layers:  # what lies there must not matter
            layer.keys[row, :, :begin] = 9.0
        model(prompts[row][None], cache=cache.part(row, 1, begin))
    cache.fill(begins, 12)
    together = torch.cat([model(piece, cache=cache) for piece in more.split(sizes, dim=1)], dim=1)
    for row, prompt in enumerate(prompts):
        alone = model(torch.cat([prompt, more[row]])[None])[0, -9:]
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("in_cache", [4, 8, 99])
def test_rows_are_read_on_behind_prompts_of_other_lengths(tiny_decoder, monkeypatch, in_cache):
    """One row at a time, two, or all of them."""
    model = tiny_decoder(layers=["alibi", "rope"])
    prompts, more = [IDS[0, :5], IDS[1, :12], IDS[0, 3:12]], IDS[[0, 1, 1], 20:29]
    _, cache = read_prompts(model, [prompt.tolist() for prompt in prompts], 20)
    in_cache *= model.config.hidden_size
    monkeypatch.setattr("trainer.model.language_model.IN_CACHE", in_cache)
    read_rows(model, more[:, :4], cache)
    states = read_rows(model, more[:, 4:], cache)
    for row, prompt in enumerate(prompts):
        alone = model.hidden_states(torch.cat([prompt, more[row]])[None], last=1)
        torch.testing.assert_close(states[row : row + 1], alone, rtol=0, atol=1e-5)


ONES, FACTORS = (1.0,) * 4, (1.0, 1.5, 3.0, 6.0)
CHANGING = {
    name: lambda spectrum, by=by: dynamic(spectrum, by, 8) for name, by in RESCALINGS.items()
} | {"longrope": lambda spectrum: longrope(spectrum, ONES, FACTORS, 8)}
changing = pytest.mark.parametrize("change", CHANGING.values(), ids=CHANGING)


def stretching(tiny_decoder, change, depth=1, **positional):
    """A decoder trained on 8 tokens whose frequencies change in longer sequences."""
    model = tiny_decoder(training_length=8, model={"num_hidden_layers": depth}, **positional)
    model.layout = model.layout.map(change)
    return model


@torch.no_grad()
def token_by_token(model, ids, prompt):
    """Logits after the prompt and after each further token, with a cache."""
    cache = model.empty_cache(len(ids), ids.shape[1])
    logits = [model(ids[:, :prompt], cache=cache, last=1)]
    logits += [model(ids[:, n : n + 1], cache=cache) for n in range(prompt, ids.shape[1])]
    return torch.cat(logits, dim=1)


@torch.no_grad()
def reading_every_prefix(model, ids, prompt):
    return torch.cat([model(ids[:, :n], last=1) for n in range(prompt, ids.shape[1] + 1)], dim=1)


@changing
@pytest.mark.parametrize("prompt", [3, 11])
def test_one_layer_whose_frequencies_change_generates_as_it_reads(tiny_decoder, change, prompt):
    model = stretching(tiny_decoder, change)
    ids = IDS[:, :24]
    expected = reading_every_prefix(model, ids, prompt)
    torch.testing.assert_close(token_by_token(model, ids, prompt), expected, rtol=0, atol=1e-5)
    unchanged = reading_every_prefix(stretching(tiny_decoder, lambda s: s), ids, prompt)
    assert (unchanged - expected).abs().max() > 0.01


@pytest.mark.parametrize("per", ["sequence", "query"])
def test_temperature_and_noise_go_with_frequencies_that_change(tiny_decoder, per):
    model = stretching(
        tiny_decoder,
        lambda s: CHANGING["yarn"](s).with_temperature(coefficient=0.8, per=per),
        heads={"nope": 0.5},
    )
    noisy = Intervention(key=((1.0,) * 8, (0.5,) * 8), key_noise=(0.0, 0.3))
    model.layout = replace(
        model.layout,
        layers=tuple(replace(layer, intervention=noisy) for layer in model.layout.layers),
    )
    expected = reading_every_prefix(model, IDS[:, :20], 3)
    torch.testing.assert_close(token_by_token(model, IDS[:, :20], 3), expected, rtol=0, atol=1e-5)


@changing
@torch.no_grad()
@pytest.mark.parametrize("sizes", [[30], [10, 20], [5, 1, 1, 23]])
def test_parts_of_a_sequence_of_known_length_are_as_the_whole(tiny_decoder, change, sizes):
    model = stretching(tiny_decoder, change, depth=2)
    ids, cache = IDS[:, :30], model.empty_cache(2, 30)
    pieces = [model(piece, cache=cache, length=30) for piece in ids.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), rtol=0, atol=1e-5)


@changing
@torch.no_grad()
def test_rows_of_other_lengths_each_have_their_own_frequencies(tiny_decoder, change):
    model = stretching(tiny_decoder, change, depth=2)
    prompts, begins, cache = [IDS[0, :12], IDS[1, :5]], (0, 7), model.empty_cache(2, 20)
    for row, begin in enumerate(begins):
        model(prompts[row][None], cache=cache.part(row, 1, begin))
    cache.fill(begins, 12)
    together = torch.cat([model(IDS[:, n : n + 1], cache=cache) for n in range(20, 28)], dim=1)
    for row, prompt in enumerate(prompts):
        whole = torch.cat([prompt, IDS[row, 20:28]])[None]
        alone = token_by_token(model, whole, len(prompt))[0, 1:]
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 7, 39])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_read_in_chunks_gives_what_it_gives_at_once(tiny_decoder, name, chunk):
    """Losses, logits of the last positions, and what follows from the keys and values."""
    model = tiny_decoder(**MODELS[name]).double().eval()
    targets = IDS.roll(-1, dims=1)
    losses, last = model.token_losses(IDS, targets), model(IDS, last=9)
    torch.testing.assert_close(model.token_losses(IDS, targets, last=9), losses[:, -9:])
    states = model.hidden_states(IDS, length=99, last=3)
    seen = []
    handle = model.embed_tokens.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    model.prefill_chunk = chunk
    torch.testing.assert_close(model.token_losses(IDS, targets), losses)
    assert max(ids.shape[1] for ids in seen) == chunk
    torch.testing.assert_close(model.token_losses(IDS, targets, last=9), losses[:, -9:])
    torch.testing.assert_close(model(IDS, last=9), last)
    torch.testing.assert_close(model.prefilled(IDS, length=99, last=3), states)
    cache = model.empty_cache(2, 40)
    torch.testing.assert_close(model(IDS[:, :30], cache=cache), model(IDS[:, :30]))
    torch.testing.assert_close(model(IDS[:, 30:], cache=cache, last=9), last)
    handle.remove()
    assert sum(ids.shape[1] for ids in seen) == 40 * 4 + 30 * 2 + 10


@given(st.sets(st.integers(0, 6), min_size=1))
def test_kept_rows_take_their_keys_and_beginnings_along(rows):
    tokens = torch.arange(7.0)[:, None, None, None].expand(7, 1, 4, 2)
    cache = KVCache([LayerCache(tokens.clone(), -tokens, 4)], begins=(6, 5, 4, 3, 2, 1, 0))
    order = cache.keep(sorted(rows))
    assert sorted(order) == sorted(rows)
    assert cache.begins == tuple(6 - row for row in order)
    (layer,) = cache.layers
    assert layer.keys[:, 0, 0, 0].tolist() == (-layer.values)[:, 0, -1, 1].tolist() == order


@torch.no_grad()
def test_chunks_after_a_cache_know_the_whole_length(tiny_decoder):
    model = tiny_decoder().double().eval()
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=0.8))
    caches = [model.empty_cache(2, 40) for _ in range(2)]
    for cache in caches:
        model(IDS[:, :30], cache=cache)
    expected = model(IDS[:, 30:], cache=caches[0])
    model.prefill_chunk = 7
    torch.testing.assert_close(model(IDS[:, 30:], cache=caches[1]), expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", pytest.param("flex", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [1, 7, 39])
@pytest.mark.parametrize("name", ["rope", "alibi", "windows"])
def test_documents_read_in_chunks_do_not_see_each_other(
    tiny_decoder, monkeypatch, name, chunk, backend
):
    monkeypatch.setattr(backends, "_compiled", lambda function: getattr(flex_attention, function))
    model = tiny_decoder(**MODELS[name]).double().eval()
    for attention in model.attentions:
        attention.attend = BACKENDS[backend].attend
    lengths = [[13, 1, 26], [20, 5, 15]]
    rows = [torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths]
    documents = torch.stack(rows)
    mask = Mask(documents=documents)
    expected = torch.empty(2, 40, 50, dtype=torch.float64)
    for row, ids in enumerate(IDS):
        alone = [model(part[None])[0] for part in ids.split(lengths[row])]
        expected[row] = torch.cat(alone)
    targets = IDS.roll(-1, dims=1)
    losses = F.cross_entropy(expected.mT, targets, reduction="none")
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
    model.prefill_chunk = chunk
    close(model(IDS, mask=mask), expected)
    close(model.token_losses(IDS, targets, mask=mask).double(), losses)
    cache = model.empty_cache(2, 40)
    model(IDS[:, :17], cache=cache, mask=mask)
    close(model(IDS[:, 17:], cache=cache, mask=mask, last=9), expected[:, -9:])


@torch.no_grad()
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_cache_has_the_dtype_of_activations(tiny_decoder, weights):
    model = tiny_decoder().to(weights)
    assert model.empty_cache(2, 8).layers[0].keys.dtype == weights
    model.compute_dtype = torch.bfloat16
    cache, seen = model.empty_cache(2, 40), []
    with model.observed(lambda index, q, k, *_: seen.append(k.dtype)):
        model(IDS, cache=cache)
    assert {layer.values.dtype for layer in cache.layers} == set(seen) == {torch.bfloat16}
