"""Generation from a published model: the tokens that transformers gives."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.interchange.families import made
from trainer.config import GenerationRequest
from trainer.workflows.generate import continue_prompts


@pytest.mark.parametrize("prompts", [["w5 w7"], ["w5 w7", "w9 w1 w4"]])
def test_prompts_are_continued_as_by_transformers(tmp_path, prompts, caplog):
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = made("Llama")
    theirs.save_pretrained(tmp_path)
    shown = []
    caplog.set_level("INFO", logger="trainer")
    request = GenerationRequest(str(tmp_path), prompts=prompts, max_new_tokens=6)
    texts = continue_prompts(request, shown.append)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = theirs.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert text == tokenizer.decode(out[0, ids.shape[1] :].tolist())
    assert "".join(shown) == (f"{texts[0]}\n" if len(prompts) == 1 else "")
    read = sum(len(prompt.split()) for prompt in prompts)
    assert f"{read} tokens read" in caplog.messages[-1]
    assert f"{6 * len(prompts)} written" in caplog.messages[-1]
