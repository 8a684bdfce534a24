"""Attention of the last token of a needle prompt on the tokens around the needle, as trained and
under YaRN (DroPE Sec. 4.1, Fig. 8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention_rows import head_attention
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads, capture
from trainer.analysis.yarn_shift import FACTOR, REACH, rotating_heads
from trainer.model.language_model import LanguageModel
from trainer.positional.rescaling import yarn_turns


@dataclass(frozen=True)
class NeedlePrompt:
    """``ids``: ``[B, T]`` prompts that end with the question, its last ``question`` tokens, each
    with the same statement at ``needle``."""

    ids: Tensor
    needle: slice
    question: int = 1


@dataclass(frozen=True)
class NeedleShift:
    """``head``: (layer, query head) of those that rotate whose last token attends most to the
    needle. ``on_needle``: how much, as ``trained`` and under ``yarn``; ``around``: on each token
    from 8 before it to 8 behind it, or as many as there are; ``first``: place of the first of them
    behind the needle's first token. ``tokens``: of a prompt."""

    head: tuple[int, int]
    on_needle: dict[str, float]
    around: dict[str, Array]
    first: int
    tokens: int


@torch.no_grad()
def needle_shift(model: LanguageModel, prompt: NeedlePrompt) -> NeedleShift | None:
    """Read the prompts as trained and under YaRN with s = 2; None where no head rotates."""
    rotating = rotating_heads(model)
    if not rotating.any():
        return None
    ids, needle = prompt.ids, prompt.needle
    T = ids.shape[1]
    shown = slice(max(0, needle.start - REACH), min(T, needle.stop + REACH))
    inside = slice(needle.start - shown.start, needle.stop - shown.start)

    def last_token() -> Array:
        """``[layers, query heads, shown]``, mean over the prompts."""
        found: list[Array] = []

        def on_layer(heads: Heads) -> None:
            rows = [
                head_attention(heads, head, slice(T - 1, T))[:, 0, shown].double().mean(dim=0)
                for head in range(heads.q.shape[1])
            ]
            found.append(torch.stack(rows).cpu().numpy())

        capture(model, ids, on_layer)
        return np.stack(found)

    trained = last_token()
    with model.using(model.layout.rescaled(yarn_turns, FACTOR, "all")):
        scaled = last_token()
    on_needle = np.where(rotating, trained[..., inside].sum(axis=-1), -np.inf)
    layer, head = map(int, np.unravel_index(on_needle.argmax(), on_needle.shape))
    around = {"trained": trained[layer, head], "yarn": scaled[layer, head]}
    return NeedleShift(
        (layer, head),
        {name: float(values[inside].sum()) for name, values in around.items()},
        around,
        shown.start - needle.start,
        T,
    )
