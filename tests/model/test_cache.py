"""A cached continuation is the same as reading everything again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import QKNormConfig

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


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 99))
def test_what_is_appended_comes_back_in_order(sizes, seed):
    cache, generator = LayerCache(), torch.Generator().manual_seed(seed)
    pieces = [torch.randn(2, 2, n, 4, generator=generator) for n in sizes]
    for piece in pieces:
        keys, values = cache.append(piece, -piece)
    assert cache.length == sum(sizes)
    assert torch.equal(keys, torch.cat(pieces, dim=2))
    assert torch.equal(values, -torch.cat(pieces, dim=2))


def test_appending_copies_a_bounded_number_of_times_per_token():
    cache = LayerCache()
    buffers = set()
    for _ in range(512):
        cache.append(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        buffers.add(cache.keys.shape[2])
    assert len(buffers) <= 10


@torch.no_grad()
@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sizes", [[40], [10, 30], [25] + [1] * 15, [1] * 40])
def test_logits_with_a_cache_are_those_without(tiny_decoder, positional, sizes):
    model, cache = tiny_decoder(**positional), KVCache.empty(2)
    pieces = [model(piece, cache=cache) for piece in IDS.split(sizes, dim=1)]
    assert cache.length == 40
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(IDS), rtol=0, atol=1e-5)
