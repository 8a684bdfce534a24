"""Generation from a published model: the tokens that transformers gives, up to a stop string."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.interchange.families import made
from trainer.config import GenerationRequest
from trainer.model.generate import text_until
from trainer.workflows.generate import continue_prompts


@pytest.mark.parametrize("prompts", [["w5 w7"], ["w5 w7", "w9 w1 w4"]])
def test_prompts_are_continued_as_by_transformers(tmp_path, prompts, caplog):
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = made("Llama")
    theirs.save_pretrained(tmp_path)
    caplog.set_level("INFO", logger="trainer")
    request = GenerationRequest(str(tmp_path), prompts=prompts, max_new_tokens=6)
    texts = continue_prompts(request)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = theirs.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert prompt + text == tokenizer.decode(out[0].tolist())  # with the space between them
    read = sum(len(prompt.split()) for prompt in prompts)
    assert f"{read} tokens read" in caplog.messages[-1]
    assert f"{6 * len(prompts)} written" in caplog.messages[-1]
    word = texts[0].split()[2]
    (cut, *_) = continue_prompts(replace(request, stop=[word]))
    assert cut == texts[0].partition(word)[0]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_across_tokens_and_never_shown(text, stop):
    expected = shown = text
    for n in range(len(text) + 1):  # one character a token
        if ends := [n - len(s) for s in stop if text[:n].endswith(s)]:
            expected = text[: min(ends)]
            break
    for n in range(len(text) + 1):
        shown = text_until(text[:n], stop)
        if shown != text[:n]:
            break
    assert shown == expected
