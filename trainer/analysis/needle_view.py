"""Attention of heads to a needle, and the directions of their queries (DoPE, Sec. 5.4 and 5.5,
Fig. 2 to 6).

The needle is a statement that the text ends with a question for, or, without any words, a copy of
the end of the text: the last tokens then have been there before, and a head that retrieves finds
them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention_rows import head_attention
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads, capture
from trainer.analysis.matrix_entropy import gram
from trainer.analysis.needle_prompt import NeedlePrompt
from trainer.analysis.sinks import attention_map
from trainer.model.language_model import LanguageModel

COPIED, DEPTH = 32, 0.1
CELLS, BLOCK = 128, 256


@dataclass(frozen=True)
class NeedleView:
    """``prompt``: what was read, of which the last ``queries`` tokens look for the needle.

    ``attention``: their mean attention ``[layers, query heads, T]``, and ``last`` that of the last
    token alone. Of chosen (layer, head): ``average`` ``[T]``, the mean attention of all queries, of
    which one gives nothing to what is behind it; ``maps``, see
    :func:`trainer.analysis.sinks.attention_map`; ``similarity`` ``[queries, D]``, cosines of these
    queries with the eigenvectors of all of the head's, from the largest eigenvalue on, each vector
    with the sign that the mean query has along it.
    """

    prompt: NeedlePrompt
    attention: Array
    last: Array
    average: dict[tuple[int, int], Array]
    maps: dict[tuple[int, int], Array]
    similarity: dict[tuple[int, int], Array]

    @property
    def needle(self) -> slice:
        """Where it is."""
        return self.prompt.needle

    @property
    def queries(self) -> int:
        """How many tokens look for it."""
        return self.prompt.question

    def on_needle(self) -> Array:
        """The attention that the needle gets from them, ``[layers, query heads]``."""
        return self.attention[..., self.needle].sum(axis=-1)


def with_copy(ids: Tensor) -> tuple[Tensor, slice]:
    """``ids`` ``[1, T]`` with the last tokens written at a tenth of the text as well, and where the
    copy is."""
    T = ids.shape[1]
    tokens, start = max(1, min(COPIED, T // 8)), int(DEPTH * T)
    changed = ids.clone()
    changed[:, start : start + tokens] = ids[:, -tokens:]
    return changed, slice(start, start + tokens)


def copied(ids: Tensor) -> NeedlePrompt:
    """The first of the texts ``[B, T]`` with a copy of its end; the needle is the copy and the
    token behind it."""
    text, copy = with_copy(ids[:1])
    return NeedlePrompt(text, slice(copy.start, copy.stop + 1), copy.stop - copy.start)


def needle_view(
    model: LanguageModel, prompt: NeedlePrompt, chosen: Collection[tuple[int, int]]
) -> NeedleView:
    """Read the first of the prompts."""
    queries = prompt.question
    attention: list[Array] = []
    final: list[Array] = []
    view = NeedleView(prompt, np.empty(0), np.empty(0), {}, {}, {})

    def on_layer(heads: Heads) -> None:
        T = heads.q.shape[2]
        last = slice(T - queries, T)
        rows = torch.stack(
            [head_attention(heads, head, last)[0] for head in range(heads.q.shape[1])]
        )
        attention.append(rows.mean(dim=1).cpu().numpy())
        final.append(rows[:, -1].cpu().numpy())
        for layer, head in chosen:
            if layer == heads.layer:
                view.average[layer, head] = _average(heads, head)
                view.maps[layer, head] = attention_map(heads, head, size=CELLS)
                view.similarity[layer, head] = _similarity(heads.rotated_q[:, head], queries)

    capture(model, prompt.ids[:1], on_layer)
    return replace(view, attention=np.stack(attention), last=np.stack(final))


def _average(heads: Heads, head: int) -> Array:
    """Mean attention of all queries ``[T]``."""
    T = heads.q.shape[2]
    total = torch.zeros(T, dtype=torch.float64, device=heads.q.device)
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        rows = head_attention(heads, head, slice(start, stop))[0]
        total[:stop] += rows.sum(dim=0, dtype=torch.float64)
    return (total / T).cpu().numpy()


def _similarity(q: Tensor, queries: int) -> Array:
    """Of the last ``queries`` of ``q`` ``[1, T, D]``."""
    vectors = torch.linalg.eigh(gram(q[:, None])[0]).eigenvectors.flip(-1)
    along = q[0].double() @ vectors
    signed = along[-queries:] * along.mean(dim=0).sign()
    return (signed / q[0, -queries:].double().norm(dim=-1, keepdim=True)).cpu().numpy()
