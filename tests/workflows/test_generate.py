"""What generation needs is known before weights are read, and its speed when it is done."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from trainer.config import GenerationRequest
from trainer.data.tokenizer import train_tokenizer
from trainer.workflows import generate
from trainer.workflows.generate import Continuations


def test_the_end_of_text_token_and_a_single_token_are_said():
    single = Continuations(("a",), read=1, written=1, read_seconds=0.5, write_seconds=4.0, ended=1)
    ending = "; the end-of-text token ended the text"
    assert single.speed() == f"1 token read, 2 a second; 1 written{ending}"
    several = replace(single, texts=("a", "b"), read=30, written=2)
    assert several.speed().endswith("; the end-of-text token ended 1 of 2 texts")


@pytest.mark.parametrize(
    ("texts", "written", "said"),
    [
        (("a",), 1, "30 tokens read, 60 a second; 1 written"),
        (("a",), 9, "30 tokens read, 60 a second; 9 written, 2.0 a second"),
        (("a", "b"), 2, "30 tokens read, 60 a second; 2 written"),
        (("a", "b"), 3, "30 tokens read, 60 a second; 3 written, 0.2 a second"),
        (("a", "b"), 10_002, "30 tokens read, 60 a second; 10002 written, 2,500.0 a second"),
    ],
)
def test_the_first_tokens_belong_to_reading(texts, written, said):
    assert (
        Continuations(texts, read=30, written=written, read_seconds=0.5, write_seconds=4.0).speed()
        == said
    )


def test_reading_ends_with_the_first_token_of_every_prompt(tiny_decoder, monkeypatch):
    """The clock is read before anything, and after each token of each row."""
    times = iter((100.0, 103.0, 104.0, 104.5, 106.0))
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(times))

    def made(model, ids, most, *, on_token, **_):
        assert ids == [[9, 97], [9, 98, 99]]
        assert not any(on_token(row, 65 + n) for n, row in enumerate((0, 1, 0, 1)))
        return [[65, 67], [66, 68]]

    monkeypatch.setattr(generate, "generate", made)
    request = GenerationRequest("x", prompts=["a", "bc"], max_new_tokens=2)
    tokenizer = train_tokenizer([], 257, [])
    monkeypatch.setattr(generate, "end_tokens", lambda tokenizer: (0,))
    ids = {"a": [97], "bc": [98, 99]}
    fake = SimpleNamespace(
        encode=lambda text, **_: SimpleNamespace(ids=ids[text]), decode=tokenizer.decode
    )
    monkeypatch.setattr(generate, "TextStream", Stream)
    found = generate.write(tiny_decoder(), fake, 9, request, print)
    assert found == Continuations(
        ("AC", "BD"), read=5, written=4, read_seconds=4.0, write_seconds=2.0
    )


class Stream:
    """Text as it comes, of tokens that are letters."""

    stopped = False

    def __init__(self, tokenizer, stop):
        self.text = ""

    def push(self, token):
        self.text += chr(token)
        return chr(token)

    def finish(self):
        return ""
