"""Generation: the likeliest token of the whole prefix, again and again, for each prompt alone;
draws have the right distribution."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.test_cache import MODELS
from tests.model.test_decoder import published
from trainer.model.generate import Sampler, generate
from trainer.positional.rescaling import ntk_aware
from trainer.positional.spectrum import LongFrequencies

PROMPT = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(2))
PROMPTS = PROMPT.tolist()
RAGGED = [PROMPTS[0], PROMPTS[1][:3], PROMPTS[0][2:9], PROMPTS[1][5:8], PROMPTS[1][:1]]


def changing(name):
    """What turns a layout into one that follows the length, beyond 8 tokens."""

    def change(spectrum):
        if name == "long":
            slow = tuple(f / 3 for f in spectrum.inv_freq)
            return replace(spectrum, long=LongFrequencies(8, slow, ntk_aware(slow, 8), 2.0, 8))
        return spectrum.with_temperature(coefficient=1.5, per=name) if name else spectrum

    return lambda layout: replace(layout.map(change), training_length=8)


@torch.no_grad()
def by_reading_everything_again(model, prompt, count):
    for _ in range(count):
        prompt = torch.cat([prompt, model(prompt)[:, -1:].argmax(-1)], dim=1)
    return prompt[:, -count:].tolist()


@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
def test_the_cache_changes_nothing(tiny_decoder, positional):
    model = tiny_decoder(**positional)
    assert generate(model, PROMPTS, 20) == by_reading_everything_again(model, PROMPT, 20)


@pytest.mark.parametrize("sampling", [(0.0, 1.0), (1.0, 0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("change", [None, "sequence", "query", "long"])
@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
def test_prompts_of_any_lengths_are_continued_as_if_alone(
    tiny_decoder, positional, change, sampling
):
    model = tiny_decoder(**positional)
    model.layout = changing(change)(model.layout)
    together = generate(model, RAGGED, 20, sampler=Sampler(*sampling))
    for row, prompt in enumerate(RAGGED):
        alone = generate(model, [prompt], 20, sampler=Sampler(*sampling, seed=row))
        assert together[row] == alone[0]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=9), min_size=1, max_size=6))
def test_prompts_end_on_their_own(tiny_decoder, prompts):
    model = tiny_decoder(model={"tie_word_embeddings": False}, layers=["rope", "alibi"])
    ends = set(range(0, 50, 7))
    expected = []
    for prompt in prompts:
        free = by_reading_everything_again(model, torch.tensor([prompt]), 18)[0]
        stops = [n for n, token in enumerate(free, 1) if token in ends]
        expected.append(free[: min(stops, default=18)])
    assert generate(model, prompts, 18, end_tokens=ends) == expected


@pytest.mark.parametrize("sampling", [(0.0, 1.0), (1.0, 0.9)], ids=["greedy", "drawn"])
def test_a_sequence_that_ends_changes_no_other(tiny_decoder, sampling):
    model = tiny_decoder(layers=["rope", "alibi"])
    free = generate(model, RAGGED, 6, sampler=Sampler(*sampling))
    for ending in range(len(RAGGED)):
        new = generate(
            model,
            RAGGED,
            6,
            sampler=Sampler(*sampling),
            on_token=lambda row, tokens, ending=ending: row == ending and len(tokens) == 2,
        )
        expected = [tokens[:2] if row == ending else tokens for row, tokens in enumerate(free)]
        assert new == expected


def test_transformers_generates_the_same(tiny_decoder):
    model = tiny_decoder(model={"tie_word_embeddings": False})
    hf = published("Llama", model)
    for prompt, ours in zip(RAGGED, generate(model, RAGGED, 20), strict=True):
        ids = torch.tensor([prompt])
        theirs = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )
        assert ours == theirs[0, len(prompt) :].tolist()


def test_tokens_are_shown_as_they_come_and_a_prompt_can_be_ended(tiny_decoder):
    model = tiny_decoder(model={"tie_word_embeddings": False})
    shown = [[] for _ in RAGGED]

    def on_token(row, tokens):
        shown[row].append(tokens[-1])
        return len(tokens) == 2 + row

    new = generate(model, RAGGED, 5, on_token=on_token)
    assert new == shown
    assert [len(tokens) for tokens in new] == [2, 3, 4, 5, 5]
    assert new == [t[: 2 + row] for row, t in enumerate(generate(model, RAGGED, 5))]


def test_nothing_is_added_when_nothing_is_asked_for(tiny_decoder):
    assert generate(tiny_decoder(), PROMPTS, 0) == [[], []]
    assert generate(tiny_decoder(), [], 5) == []


def test_an_empty_prompt_is_an_error(tiny_decoder):
    with pytest.raises(ValueError, match="at least one token"):
        generate(tiny_decoder(), [[1], []], 5)


@torch.no_grad()
def test_tokens_are_drawn_from_the_model_s_logits(tiny_decoder):
    model, sampling = tiny_decoder(), (1.5, 0.9, 4)
    sampler, prompt = Sampler(*sampling), PROMPT[:1]
    for _ in range(20):
        prompt = torch.cat([prompt, sampler(model(prompt)[:, -1], [0])[:, None]], dim=1)
    assert generate(model, PROMPTS[:1], 20, sampler=Sampler(*sampling)) == prompt[:, 12:].tolist()
    assert generate(model, PROMPTS[:1], 20) != prompt[:, 12:].tolist()


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


def test_the_likeliest_token_stays_however_small_the_nucleus():
    assert [Sampler(1.0, 0.0, seed)(LOGITS[None], [0]).item() for seed in range(9)] == [
        LOGITS.argmax().item()
    ] * 9


@pytest.mark.parametrize(
    ("top_p", "drawn"), [(0.24, {1}), (0.25, {1}), (0.26, {1, 2}), (0.5, {1, 2}), (0.51, {1, 2, 4})]
)
def test_a_nucleus_is_the_smallest_set_with_its_probability(top_p, drawn):
    """Of four equally likely tokens, the first ones."""
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf, 1.0, 1.0]])
    assert {Sampler(1.0, top_p, seed)(logits, [0]).item() for seed in range(40)} == drawn


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.0, 0.9), (2.0, 0.5)])
def test_distribution(temperature, top_p):
    n, p = 6000, expected(LOGITS, temperature, top_p)
    sampler = Sampler(temperature, top_p, seed=3)
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
    together = Sampler(1.3, top_p, seed)(logits, range(5))
    assert torch.equal(Sampler(1.3, top_p, seed)(logits[order], order), together[order])
    alone = Sampler(1.3, top_p, seed + 4)
    assert alone(logits[4:], [0]) == together[4]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_least_draw_takes_no_token_without_probability(monkeypatch, top_p):
    """Of [0, 1) the generator may draw exactly 0."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1))
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]])
    assert Sampler(1.0, top_p)(logits, [0]).item() == (1 if top_p == 1 else 3)
