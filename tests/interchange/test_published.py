"""Files of published models, as they are read and loaded."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trainer.interchange.published import load_quietly


def test_transformers_draws_no_bar_of_its_own(tmp_path, capfd):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    capfd.readouterr()
    assert load_quietly(tmp_path).config.hidden_size == 16
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()
