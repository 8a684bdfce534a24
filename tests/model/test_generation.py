"""Greedy generation: the argmax of the whole prefix, again and again."""

import pytest
import torch

from tests.model.test_cache import MODELS
from tests.model.test_decoder import published
from trainer.model.generation import generate

PROMPT = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def by_reading_everything_again(model, prompt, count):
    for _ in range(count):
        prompt = torch.cat([prompt, model(prompt)[:, -1:].argmax(-1)], dim=1)
    return prompt


@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
def test_the_cache_changes_nothing(tiny_decoder, positional):
    model = tiny_decoder(**positional)
    expected = by_reading_everything_again(model, PROMPT, 20)
    assert torch.equal(generate(model, PROMPT, 20), expected)


def test_transformers_generates_the_same(tiny_decoder):
    model = tiny_decoder(model={"tie_word_embeddings": False})
    hf = published("Llama", model)
    theirs = hf.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=20, do_sample=False
    )
    assert theirs[:, 12:].unique().numel() > 2
    assert torch.equal(generate(model, PROMPT, 20), theirs)


def test_a_finished_sequence_is_filled_up_while_the_others_go_on(tiny_decoder):
    model = tiny_decoder(model={"tie_word_embeddings": False})
    free = generate(model, PROMPT, 20)
    end = next(t for t in free[0, 12:].tolist() if t not in free[1, 12:].tolist())
    stopped = generate(model, PROMPT, 20, end_token=end)
    at = 12 + free[0, 12:].tolist().index(end)
    assert torch.equal(stopped[0, : at + 1], free[0, : at + 1])
    assert (stopped[0, at:] == end).all()
    assert torch.equal(stopped[1], free[1])


def test_generation_ends_when_all_have_finished(tiny_decoder):
    model = tiny_decoder()
    first = generate(model, PROMPT[:1], 1)[0, -1].item()
    assert generate(model, PROMPT[:1], 20, end_token=first).shape == (1, 13)


def test_nothing_is_added_when_nothing_is_asked_for(tiny_decoder):
    assert torch.equal(generate(tiny_decoder(), PROMPT, 0), PROMPT)
