"""Restrictions of attention beyond causality, as booleans, biases, bounds or block masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Restrictions beyond causality.

    ``window``: number of keys a query sees, itself included. ``documents``: ``[B, Tk]`` integers; a
    query sees keys of its own document. ``slopes``: ``[Hq]`` float32, of ALiBi. ``begins``: ``[B]``
    integers, the first key of each row. ``bounds``, ``longest``, ``blocks``: the same documents and
    windows in the form of the kernels, see :func:`trainer.model.backends.prepared`; no document has
    more than ``longest`` tokens (None: the length of a row).
    """

    window: int | None = None
    documents: Tensor | None = None
    slopes: Tensor | None = None
    begins: Tensor | None = None
    bounds: Tensor | None = None
    longest: int | None = None
    blocks: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether there is only causality."""
        return all(x is None for x in (self.window, self.documents, self.slopes, self.begins))


def allowed(mask: Mask, queries: range, keys: range, device: torch.device) -> Tensor:
    """Return visibility, ``[Tq, Tk]`` or ``[B, 1, Tq, Tk]`` booleans, for absolute positions."""
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    seen = j <= i
    if mask.window is not None:
        seen &= j > i - mask.window
    if mask.documents is not None:
        of_queries = mask.documents[:, None, queries.start : queries.stop, None]
        seen = seen & (of_queries == mask.documents[:, None, None, keys.start : keys.stop])
    if mask.begins is not None:
        seen = seen & (j >= mask.begins[:, None, None, None])
    return seen


def bias(mask: Mask, queries: range, keys: range, q: Tensor) -> Tensor:
    """Return SDPA's ``attn_mask``: booleans, or with ALiBi a bias ``[.., Hq, Tq, Tk]``.

    The bias is at least float32 on the CPU, and in the queries' dtype elsewhere.
    """
    seen = allowed(mask, queries, keys, q.device)
    if mask.slopes is None:
        return seen
    i = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=q.device)
    slope = mask.slopes[:, None, None] * (j - i)
    # CUDA kernels take only a bias of the queries' dtype. In 16 bits it is off by up to 0.4%, which
    # matters little: where the bias is large, the key is far and has almost no weight.
    precise = torch.promote_types(q.dtype, torch.float32)
    return slope.masked_fill(~seen, -math.inf).to(precise if q.device.type == "cpu" else q.dtype)


def bounds_of(documents: Tensor) -> Tensor:
    """Return the starts of the documents ``[B, T]`` within the batch's B T tokens, then B T; int32.

    A document starts where its number changes and at every row. Causes a host sync; during training
    the data loader computes the starts instead.
    """
    begins = F.pad(documents.diff(dim=1).ne(0), (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)
