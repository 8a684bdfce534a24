"""Draws have the distribution that temperature and nucleus say."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.model.config import Sampling
from trainer.model.generate import Sampler

LOGITS = torch.tensor([2.0, 0.5, 1.5, -1.0, 0.0, 1.4])


def expected(logits, temperature, top_p):
    """Probabilities by a plain loop: the likeliest first, until they have ``top_p`` together."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    p = [w / sum(weights) for w in weights]
    nucleus, total = {}, 0.0
    for token in sorted(range(len(p)), key=lambda t: -p[t]):
        if total >= top_p:
            break
        nucleus[token] = p[token]
        total += p[token]
    return [nucleus.get(token, 0.0) / total for token in range(len(p))]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.0, 0.9), (2.0, 0.5)])
def test_distribution(temperature, top_p):
    n, p = 6000, expected(LOGITS, temperature, top_p)
    sampler = Sampler(Sampling(temperature, top_p, seed=3), 1)
    drawn = [sampler(LOGITS[None], [0]).item() for _ in range(n)]
    counts = [drawn.count(token) for token in range(len(p))]
    assert all(count == 0 for count, q in zip(counts, p, strict=True) if q == 0)
    possible = [(count, n * q) for count, q in zip(counts, p, strict=True) if q > 0]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in possible)
    # Of 5 degrees of freedom or fewer: exceeded by chance once in 10,000.
    assert chi_square < 25.8


@given(st.integers(0, 99), st.sampled_from([1.0, 0.8]), st.permutations(range(5)))
def test_rows_draw_independently_of_order_and_batch(seed, top_p, order):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(1.3, top_p, seed)
    together = Sampler(sampling, 5)(logits, range(5))
    assert torch.equal(Sampler(sampling, 5)(logits[order], order), together[order])
    alone = Sampler(Sampling(1.3, top_p, seed + 4), 1)
    assert alone(logits[4:], [0]) == together[4]


def test_temperature_0_takes_the_likeliest():
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Sampler(Sampling(), 7)(logits, range(7)), logits.argmax(-1))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_least_draw_takes_no_token_without_probability(monkeypatch, top_p):
    """Of [0, 1) the generator may draw exactly 0."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1))
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]])
    assert Sampler(Sampling(1.0, top_p), 1)(logits, [0]).item() == (1 if top_p == 1 else 3)
