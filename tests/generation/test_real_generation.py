"""Greedy continuations of a real pretrained model are transformers', token for token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.generation.generate import generate
from trainer.interchange.pretrained import read_pretrained

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"
PROMPTS = (
    "The capital of France is",
    "To sort a list in Python, one",
    "Once upon a time there was a small village where",
    "The three laws of motion say that",
    "def fibonacci(n):",
)


@pytest.mark.download
@torch.no_grad()
def test_five_prompts_of_fifty_tokens():
    from transformers import AutoModelForCausalLM

    found = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True
    )
    directory = found.stdout.strip()
    pretrained = read_pretrained(directory)
    tokenizer = pretrained.require_tokenizer()
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    ours = generate(pretrained.decoder(), prompts, 50)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, continuation in zip(prompts, ours, strict=True):
        ids = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=None
        )
        assert continuation == ids[0, len(prompt) :].tolist()
