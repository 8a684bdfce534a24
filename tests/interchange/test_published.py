"""Files of published models, as they are read and loaded."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trainer.interchange.published import load_quietly, tokenizer_from_file


def tiny():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config)


def test_transformers_reads_no_pickle(tmp_path):
    model = tiny()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_quietly(tmp_path)


def test_a_published_tokenizer_neither_cuts_nor_fills_up(tmp_path):
    tokenizer = Tokenizer(WordLevel({"a": 0, "<pad>": 1}, unk_token="a"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4, pad_id=1, pad_token="<pad>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_from_file(tmp_path / "tokenizer.json")
    assert read.encode(["a"] * 3, is_pretokenized=True).ids == [0] * 3


def test_transformers_draws_no_bar_of_its_own(tmp_path, capfd):
    tiny().save_pretrained(tmp_path)
    capfd.readouterr()
    assert load_quietly(tmp_path).config.hidden_size == 16
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()
