"""Load an exported model with transformers and write its logits; ``gate.py`` runs this as a script.

Usage: ``python reload.py DIRECTORY QUESTION ANSWER``; see :func:`answers`.
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
def logits(
    model: torch.nn.Module, tokens: list[int], cached: bool, rows: int, decoded: int
) -> Tensor:
    """Compute ``[rows, vocab]``: with a cache, the last tokens one by one, then in one pass; or
    only so."""
    ids = torch.tensor([tokens])
    T = len(tokens)
    ends = [max(T - decoded, 1), *range(max(T - decoded, 1) + 1, T + 1)] if cached else []
    parts: list[Tensor] = []
    passed: dict[str, Any] = {}
    for begin, end in pairwise([0, *ends]):
        out = model(ids[:, begin:end], use_cache=True, logits_to_keep=1, **passed)
        name = "cache" if "cache" in out else "past_key_values"  # before transformers 5.24
        passed = {name: out[name]}
        parts.append(out.logits)
    whole = model(ids, use_cache=False, logits_to_keep=rows).logits
    return torch.cat([*parts, whole], dim=1)[0].float()


@torch.no_grad()
def behind_padding(
    model: Any, prompts: list[list[int]], length: int, count: int
) -> tuple[Tensor, Tensor]:
    """Generate ``count`` tokens ``[B, count]`` after prompts padded on the left to ``length``.

    Also returns the logits ``[B, count, vocab]`` that chose them.
    """
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, length:], torch.stack(out.logits, dim=1).float()


@torch.no_grad()
def before_padding(model: Any, prompts: list[list[int]], length: int) -> Tensor:
    """Compute logits ``[B, vocab]`` after prompts padded on the right to ``length``."""
    ids = torch.tensor([prompt + [0] * (length - len(prompt)) for prompt in prompts])
    mask = torch.tensor([[1] * len(p) + [0] * (length - len(p)) for p in prompts])
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=last).logits
    return logits.diagonal().mT.float()  # each row's logits after its own prompt


def answers(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Compute the answers to a request."""
    padded, counts = (asked["prompts"], asked["length"]), (asked["kept"], asked["decoded"])
    cases = zip(asked["cases"], asked["cached"], strict=True)
    return {
        "logits": [logits(model, case, cached, *counts) for case, cached in cases],
        "behind": behind_padding(model, *padded, asked["decoded"]),
        "before": before_padding(model, *padded) if asked["before"] else None,
    }


def counting(model: Any) -> Any:
    """Return the model, which from now on prints the number of tokens of every forward pass."""

    def count(_: torch.nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = positional[0] if positional else keywords["input_ids"]
        print(f"tokens read: {ids.numel()}", flush=True)

    model.register_forward_pre_hook(count, with_kwargs=True)
    return model


def main(directory: str, question: str, answer: str) -> None:
    """Read the request from a file; write the answers to a file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = json.loads(Path(question).read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    options = {"local_files_only": True, "trust_remote_code": asked["custom"]}
    tokenizer = AutoTokenizer.from_pretrained(directory, **options)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **options
    )
    model, info = loaded
    problems = {key: sorted(map(str, names)) for key, names in info.items() if names}
    torch.save(
        {
            "text_ids": tokenizer(asked["text"])["input_ids"],
            "problems": json.dumps(problems) if problems else "",
        }
        | answers(counting(model.eval()), asked),
        answer,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
