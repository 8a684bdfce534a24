"""Loads an exported model with transformers and writes its logits; run by ``gate.py`` as a script.

``python reload.py DIRECTORY QUESTION ANSWER``: see there.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: list[int], kept: int, decoded: int) -> Tensor:
    """``[rows, vocab]``: read with a cache, the last tokens one by one, then at once."""
    ids = torch.tensor([tokens])
    T = len(tokens)
    ends = [max(T - decoded, 1), *range(max(T - decoded, 1) + 1, T + 1)]
    parts, cache = [], None
    for begin, end in pairwise([0, *ends]):
        out = model(ids[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        parts.append(out.logits)
    whole = model(ids, use_cache=False, logits_to_keep=kept).logits
    return torch.cat([*parts, whole], dim=1)[0].float()


def main(directory: str, question: str, answer: str) -> None:
    """Answer the question in a file with a file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = json.loads(Path(question).read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    options = {"local_files_only": True, "trust_remote_code": asked["custom"]}
    tokenizer = AutoTokenizer.from_pretrained(directory, **options)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **options
    )
    model, info = loaded
    problems = {key: sorted(map(str, found)) for key, found in info.items() if found}
    torch.save(
        {
            "text_ids": tokenizer(asked["text"])["input_ids"],
            "problems": json.dumps(problems) if problems else "",
            "logits": [
                logits(model.eval(), case, asked["kept"], asked["decoded"])
                for case in asked["cases"]
            ],
        },
        answer,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
