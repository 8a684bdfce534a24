"""Attention of heads to repeated text, and the directions of their queries (DoPE,
Sec. 5.4 and 5.5, Fig. 2 to 6).

The end of the text is copied to near its beginning. The last tokens then have been there before,
and a head that retrieves finds its copy: a needle that needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention_rows import head_attention
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads, capture
from trainer.analysis.matrix_entropy import gram
from trainer.analysis.sinks import attention_map
from trainer.model.language_model import LanguageModel

COPIED, DEPTH = 32, 0.1
CELLS = 128


@dataclass(frozen=True)
class NeedleView:
    """``needle``: the copy and the token behind it. ``queries``: how many last ones look.

    ``attention``: their mean attention ``[layers, query heads, T]``. Of chosen (layer, head):
    ``maps``, see :func:`trainer.analysis.sinks.attention_map`; ``similarity`` ``[queries, D]``,
    cosines of these queries with the eigenvectors of all of the head's, from the largest
    eigenvalue on, each vector with the sign that the mean query has along it.
    """

    needle: slice
    queries: int
    attention: Array
    maps: dict[tuple[int, int], Array]
    similarity: dict[tuple[int, int], Array]

    def on_needle(self) -> Array:
        """The attention that the needle gets, ``[layers, query heads]``."""
        return self.attention[..., self.needle].sum(axis=-1)


def with_copy(ids: Tensor) -> tuple[Tensor, slice]:
    """``ids`` ``[1, T]`` with the last tokens written at a tenth of the text as well, and where the
    copy is."""
    T = ids.shape[1]
    tokens, start = max(1, min(COPIED, T // 8)), int(DEPTH * T)
    changed = ids.clone()
    changed[:, start : start + tokens] = ids[:, -tokens:]
    return changed, slice(start, start + tokens)


def needle_view(
    model: LanguageModel, ids: Tensor, chosen: Collection[tuple[int, int]]
) -> NeedleView:
    """Read the first of the texts ``[B, T]`` with a copy of its end."""
    text, copy = with_copy(ids[:1])
    queries = copy.stop - copy.start
    view = NeedleView(slice(copy.start, copy.stop + 1), queries, np.empty(0), {}, {})
    attention: list[Array] = []

    def on_layer(heads: Heads) -> None:
        T = heads.q.shape[2]
        last = slice(T - queries, T)
        rows = [
            head_attention(heads, head, last)[0].mean(dim=0) for head in range(heads.q.shape[1])
        ]
        attention.append(torch.stack(rows).cpu().numpy())
        for layer, head in chosen:
            if layer == heads.layer:
                view.maps[layer, head] = attention_map(heads, head, size=CELLS)
                view.similarity[layer, head] = _similarity(heads.rotated_q[:, head], queries)

    capture(model, text, on_layer)
    return NeedleView(view.needle, queries, np.stack(attention), view.maps, view.similarity)


def _similarity(q: Tensor, queries: int) -> Array:
    """Of the last ``queries`` of ``q`` ``[1, T, D]``."""
    vectors = torch.linalg.eigh(gram(q[:, None])[0]).eigenvectors.flip(-1)
    along = q[0].double() @ vectors
    signed = along[-queries:] * along.mean(dim=0).sign()
    return (signed / q[0, -queries:].double().norm(dim=-1, keepdim=True)).cpu().numpy()
