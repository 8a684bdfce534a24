"""Verification of an export: a fresh process loads it, and its logits are compared.

The inputs are random tokens and text, up to beyond the training length but at most 4096 tokens.
They are read in one pass, and with a cache, with the last tokens one by one. Prompts of different
lengths are read as one batch with padding on the left, as in generation, and on the right. If
frequencies depend on the length, transformers keeps cached keys rotated as they were when read,
while ours are rotated again. Such a model is read with a cache only up to its training length.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.progress import Progress
from trainer.model.cache import KVCache
from trainer.model.decoder import Decoder

KEPT, DECODED, BEYOND, LONGEST = 32, 4, 256, 4096
PATIENCE = 5.0
"""Seconds of an export before its progress is shown."""
READ = "tokens read: "
"""How lines of ``reload.py`` about its progress begin."""
TEXT = (
    "The lighthouse keeper counted seventeen ships before the fog came in. By the time it lifted, "
    "nobody could say which of them had turned back, and which had only waited further out. "
)


def transformers_is_here() -> bool:
    """Whether transformers is installed to compare with."""
    return importlib.util.find_spec("transformers") is not None


def largest_difference(
    model: Decoder, directory: Path, text_ids: list[int], *, custom: bool
) -> float:
    """Return the largest difference between the decoder's logits and those of transformers, in
    float32.

    It is relative to the largest logit if that exceeds 1. ``model`` is on the CPU, with the weights
    that were written. ``text_ids``: tokens of :data:`TEXT` as a prompt. ``custom``: whether our
    code in the directory is needed.

    Raises:
        UserError: transformers cannot load the model, or tokenizes text differently.
    """
    random = _random_cases(model)
    cases = [*random, text_ids[: model.layout.training_length]]
    # transformers derives the frequencies of a whole batch from its longest row.
    by_batch = model.layout.frequencies_follow_length
    cached = [not by_batch or len(case) <= model.layout.training_length for case in cases]
    short = random[0][: max(1, model.layout.training_length - DECODED)]
    prompts = [short] if by_batch else [short, random[-1]]
    length, pads_right = len(random[-1]) + 1, custom or not by_batch
    request = {
        "custom": custom,
        "text": TEXT,
        "cases": cases,
        "cached": cached,
        "prompts": prompts,
        "length": length,
        "before": pads_right,
        "kept": KEPT,
        "decoded": DECODED,
        "threads": torch.get_num_threads(),
    }
    read = [len(case) * (1 + is_cached) for case, is_cached in zip(cases, cached, strict=True)]
    padded = len(prompts) * (length * (1 + pads_right) + DECODED - 1)
    continued = sum(len(prompt) + DECODED for prompt in prompts)
    with Progress("Comparing", 2 * sum(read) + padded + continued, after=PATIENCE) as progress:
        progress.advance(0)
        answer = _ask(directory, request, progress.advance)
        if answer["text_ids"] != text_ids:
            raise UserError.at(
                "export", "transformers tokenizes text differently than the run did."
            )
        if answer["problems"]:
            raise UserError.at(
                "export", f"transformers finds the weights wrong: {answer['problems']}."
            )
        pairs = []
        for theirs, case, is_cached, tokens in zip(
            answer["logits"], cases, cached, read, strict=True
        ):
            pairs.append((theirs, _logits(model, case, is_cached)))
            progress.advance(tokens)
        for row, (ids, new, theirs) in enumerate(zip(prompts, *answer["behind"], strict=True)):
            ours = _continued(model, ids, new.tolist())
            progress.advance(len(ids) + len(new))
            pairs.append((theirs, ours))
            if answer["before"] is not None:
                pairs.append((answer["before"][row], ours[0]))
    differences = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in pairs]
    return float(torch.stack(differences).max())  # NaN if any is


def _random_cases(model: Decoder) -> list[list[int]]:
    """Return token sequences of increasing lengths; some encodings remember the longest."""
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
    """Compute ``[rows, vocab]`` as ``reload.py`` does: with a cache, then in one pass."""
    ids = torch.tensor([tokens])
    T = len(tokens)
    ends = [max(T - DECODED, 1), *range(max(T - DECODED, 1) + 1, T + 1)] if cached else []
    cache = KVCache.empty(model.config, 1, T)
    parts = [model(ids[:, a:b], cache=cache, last=1) for a, b in pairwise([0, *ends])]
    return torch.cat([*parts, model(ids, last=KEPT)], dim=1)[0]


@torch.no_grad()
def _continued(model: Decoder, prompt: list[int], tokens: list[int]) -> Tensor:
    """Compute ``[tokens, vocab]``: the logits that predict each of the tokens after a prompt."""
    ids = torch.tensor([prompt + tokens])
    cache = KVCache.empty(model.config, 1, ids.shape[1])
    ends = [len(prompt) + place for place in range(len(tokens))]
    parts = [model(ids[:, a:b], cache=cache, last=1) for a, b in pairwise([0, *ends])]
    return torch.cat(parts, dim=1)[0]


def _ask(directory: Path, request: dict[str, Any], count: Callable[[int], None]) -> dict[str, Any]:
    """Return the answer of ``reload.py`` from a process of its own, without network.

    ``count`` gets the number of tokens of each forward pass there.
    """
    with tempfile.TemporaryDirectory(prefix="unrope-gate-") as scratch:
        question, answer = Path(scratch, "question.json"), Path(scratch, "answer.pt")
        question.write_text(json.dumps(request), encoding="utf-8")
        script = Path(__file__).with_name("reload.py")
        # -P: keep the script's directory off the import path
        result = _run(
            [sys.executable, "-P", str(script), str(directory), str(question), str(answer)],
            {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{scratch}/modules"},
            count,
        )
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["no error message"])[-1]
            raise UserError.at("export", f"transformers cannot load what was written: {reason}")
        return torch.load(answer, weights_only=True)


def _run(
    command: list[str], env: dict[str, str], count: Callable[[int], None]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``count`` gets the tokens that its output says it has read."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(READ):
                    count(int(line.removeprefix(READ)))
        except BaseException:
            process.kill()
            raise
        process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, "", errors.read())
