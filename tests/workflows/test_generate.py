"""What generation needs is known before weights are read, and its speed when it is done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.errors import UserError
from trainer.runs.memory import cache_memory
from trainer.workflows import generate
from trainer.workflows.generate import Continuations, continue_prompts
from trainer.workflows.generation_request import GenerationRequest


def test_keys_and_values_have_to_fit_before_weights_are_read(tiny_decoder, monkeypatch):
    """Of as many tokens as the longest prompt has characters, and what follows, for all prompts."""
    config = tiny_decoder().config
    needed = cache_memory(config, 2, 1_000_005)

    def load():
        raise InterruptedError

    found = SimpleNamespace(config=config, load=load)
    monkeypatch.setattr(generate, "find_candidate", lambda given: found)
    request = GenerationRequest("x", prompts=["the", "a two"], max_new_tokens=10**6, threads=1)
    monkeypatch.setattr(generate, "free_memory", lambda device: needed)
    with pytest.raises(InterruptedError):
        continue_prompts(request, print, print)
    monkeypatch.setattr(generate, "free_memory", lambda device: needed - 1)
    size = f"{needed / 2**30:,.1f} GiB"
    with pytest.raises(UserError) as error:
        continue_prompts(request, print, print)
    assert error.value.problems == (
        f"max_new_tokens: keys and values of 1,000,005 tokens need {size}, and {size} are free; "
        "choose fewer.",
    )


@pytest.mark.parametrize(
    ("texts", "written", "said"),
    [
        (("a",), 1, "30 tokens read, 60 a second; 1 written"),
        (("a",), 9, "30 tokens read, 60 a second; 9 written, 2.0 a second"),
        (("a", "b"), 2, "30 tokens read, 60 a second; 2 written"),
        (("a", "b"), 10_002, "30 tokens read, 60 a second; 10002 written, 2,500.0 a second"),
    ],
)
def test_the_first_tokens_belong_to_reading(texts, written, said):
    assert Continuations(texts, read=30, written=written, first=0.5, rest=4.0).speed() == said
