"""The proof of an export: a fresh process loads it as anybody would, and its logits are compared.

Random tokens and text, of lengths up to beyond the training length but no more than 4096 tokens,
read at once and read with a cache, the last tokens one by one; and prompts of different lengths in
one batch, with padding on the left, as generation has it, and on the right. Where frequencies
follow the length, transformers goes on with keys as they were rotated when they were read, and ours
are rotated anew: such a model is read with a cache up to its training length, and beyond at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.model.cache import KVCache
from trainer.model.decoder import Decoder

KEPT, DECODED, BEYOND, LONGEST = 32, 4, 256, 4096
TEXT = (
    "The lighthouse keeper counted seventeen ships before the fog came in. By the time it lifted, "
    "nobody could say which of them had turned back, and which had only waited further out. "
)


def transformers_is_here() -> bool:
    """Whether there is anything to compare with."""
    return importlib.util.find_spec("transformers") is not None


def largest_difference(
    model: Decoder, directory: Path, text_ids: list[int], *, custom: bool
) -> float:
    """Of any two logits of the decoder and of the model that transformers loads, in float32, as a
    share of the largest logit where that is more than 1.

    Args:
        model: on the CPU, with the weights that were written.
        directory: what was written.
        text_ids: tokens of :data:`TEXT` as a prompt of the model has them.
        custom: whether code in the directory, ours, is needed.

    Raises:
        UserError: transformers cannot load it, or reads text as other tokens.
    """
    random = _random_cases(model)
    cases = [*random, text_ids[: model.layout.training_length]]
    # transformers takes the frequencies of a whole batch from the longest of its rows.
    by_batch = model.layout.frequencies_follow_length
    cached = [not by_batch or len(case) <= model.layout.training_length for case in cases]
    short = random[0][: max(1, model.layout.training_length - DECODED)]
    prompts = [short] if by_batch else [short, random[-1]]
    request: dict[str, Any] = {
        "custom": custom,
        "text": TEXT,
        "cases": cases,
        "cached": cached,
        "prompts": prompts,
        "length": len(random[-1]) + 1,
        "before": custom or not by_batch,
        "kept": KEPT,
        "decoded": DECODED,
    }
    answer = _ask(directory, request | {"threads": torch.get_num_threads()})
    if answer["text_ids"] != text_ids:
        raise UserError.at("export", "transformers reads text as other tokens than the run did.")
    if answer["problems"]:
        raise UserError.at("export", f"transformers finds the weights wrong: {answer['problems']}.")
    ours = [_logits(model, *case) for case in zip(cases, cached, strict=True)]
    pairs = list(zip(answer["logits"], ours, strict=True))
    for row, (ids, tokens, theirs) in enumerate(zip(prompts, *answer["behind"], strict=True)):
        continued = _continued(model, ids, tokens.tolist())
        pairs.append((theirs, continued))
        if answer["before"] is not None:
            pairs.append((answer["before"][row], continued[0]))
    differences = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return float(torch.stack(differences).max())  # NaN where any is


def _random_cases(model: Decoder) -> list[list[int]]:
    """Tokens of increasing lengths, since some encodings remember the longest they have seen."""
    trained = model.layout.training_length
    generator = torch.Generator().manual_seed(0)
    lengths = (min(17, trained), trained, trained + min(trained // 2 + 1, BEYOND))
    vocab_size = model.embed_tokens.num_embeddings
    return [
        torch.randint(vocab_size, (n,), generator=generator).tolist()
        for n in dict.fromkeys(min(n, LONGEST) for n in lengths)
    ]


@torch.no_grad()
def _logits(model: Decoder, tokens: list[int], cached: bool) -> Tensor:
    """``[rows, vocab]``: read with a cache, then at once; as ``reload.py`` does it."""
    ids = torch.tensor([tokens])
    T = len(tokens)
    ends = [max(T - DECODED, 1), *range(max(T - DECODED, 1) + 1, T + 1)] if cached else []
    cache = KVCache.empty(model.config, 1, T)
    parts = [model(ids[:, a:b], cache=cache, last=1) for a, b in pairwise([0, *ends])]
    return torch.cat([*parts, model(ids, last=KEPT)], dim=1)[0]


@torch.no_grad()
def _continued(model: Decoder, prompt: list[int], tokens: list[int]) -> Tensor:
    """``[tokens, vocab]``: the logits from which each of the tokens behind a prompt is chosen."""
    ids = torch.tensor([prompt + tokens])
    cache = KVCache.empty(model.config, 1, ids.shape[1])
    ends = [len(prompt) + place for place in range(len(tokens))]
    parts = [model(ids[:, a:b], cache=cache, last=1) for a, b in pairwise([0, *ends])]
    return torch.cat(parts, dim=1)[0]


def _ask(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What ``reload.py`` says in a process of its own, without network."""
    with tempfile.TemporaryDirectory(prefix="unrope-gate-") as scratch:
        question, answer = Path(scratch, "question.json"), Path(scratch, "answer.pt")
        question.write_text(json.dumps(request), encoding="utf-8")
        script = Path(__file__).with_name("reload.py")
        # -P: its neighbours are not on the path of what it imports.
        result = subprocess.run(
            [sys.executable, "-P", str(script), str(directory), str(question), str(answer)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{scratch}/modules"},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            said = (result.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise UserError.at("export", f"transformers cannot load what was written: {said}")
        return torch.load(answer, weights_only=True)
