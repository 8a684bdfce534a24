"""Matrix entropy of heads: how evenly queries or keys spread over directions (DoPE, Sec. 4.3).

The Gram matrix over all tokens of a head's queries or keys gives the entropy of every rotary pair's
2 x 2 block (Eq. 25), its mean over the pairs (Eq. 26), and the truncated effective rank of the
whole matrix (Eq. 30). In a head of low entropy all tokens share a few directions, which show as
bright bands in its attention map.

Stages. The paper takes entropies before any encoding (``pre_ntk``), "after applying Dynamic-NTK
scaling" (``post_ntk``) and "after the full RoPE rotation" (``post_rope``), and does not say how the
last two differ. Here all come from one forward pass and differ only in the rotation: none; with the
rescaled frequencies that the pass uses; with the frequencies as trained. Without a rescaling the
last two are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainer.analysis.attention import (
    Array,
    Heads,
    NeedlePrompt,
    Place,
    Side,
    attention_blocks,
    capture,
    last_attention,
    pair_counts,
    stack_heads,
)
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.positional.rotation import encode_keys, encode_queries, head_groups

Stage = Literal["pre_ntk", "post_ntk", "post_rope"]
CHUNK = 8192
"""Tokens converted to float64 at a time."""


class MatrixEntropy(NamedTuple):
    """Entropies of the heads of one layer in nats, float64.

    ``bands``: ``[H, pairs]``, between 0 and log 2; NaN where a head has fewer pairs than another.
    ``eigenvalues``: ``[H, D]`` of the Gram matrices divided by their traces, in descending order;
    ``trace``: ``[H]``.
    """

    bands: Tensor
    eigenvalues: Tensor
    trace: Tensor

    @property
    def spectral_norm(self) -> Tensor:
        """Largest eigenvalues of the Gram matrices themselves, ``[H]``."""
        return self.eigenvalues[:, 0] * self.trace

    @property
    def band_mean(self) -> Tensor:
        """Means over the pairs ``[H]``, between 0 and log 2 (Eq. 26)."""
        return self.bands.nanmean(dim=-1)

    def effective_rank(self, r: int | None) -> Tensor:
        """Compute the effective ranks ``[H]``: exp of the entropy of the ``r`` largest eigenvalues
        (Eq. 30).

        ``r`` = None uses all eigenvalues. For r = 1, Eq. 30 gives 1 for every head, while the paper
        takes it for the largest eigenvalue. This returns 1 over that eigenvalue, the effective rank
        of the min-entropy, so that a small value means low entropy for every r.
        """
        if r == 1:
            return 1 / self.eigenvalues[:, 0]
        largest = self.eigenvalues[:, :r]
        total = largest.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(largest.dtype).tiny)
        return torch.special.entr(largest / total).sum(dim=-1).exp()


def gram(x: Tensor) -> Tensor:
    """Compute Gram matrices ``[H, D, D]`` float64 of ``x`` ``[B, H, T, D]`` over all tokens."""
    total = x.new_zeros(x.shape[1], x.shape[-1], x.shape[-1], dtype=torch.float64)
    for part in x.split(CHUNK, dim=2):
        wide = part.double()
        total += (wide.mT @ wide).sum(dim=0)
    return total


def band_entropies(grams: Tensor, pairs: int) -> Tensor:
    """Compute entropies ``[..., pairs]`` of the pairs' 2 x 2 blocks in ``[..., D, D]``, each
    divided by its trace.

    A block of zeros has entropy 0.
    """
    diagonal = grams.diagonal(dim1=-2, dim2=-1)
    first, second = diagonal[..., :pairs], diagonal[..., pairs : 2 * pairs]
    across = grams.diagonal(offset=pairs, dim1=-2, dim2=-1)[..., :pairs]
    trace = (first + second).clamp(min=torch.finfo(grams.dtype).tiny)
    # The eigenvalues are (1 + gap) / 2 and (1 - gap) / 2 of the trace.
    gap = (torch.hypot(first - second, 2 * across) / trace).clamp(max=1)
    entropy = torch.special.entr((1 + gap) / 2) + torch.special.entr((1 - gap) / 2)
    return entropy.clamp(max=math.log(2)).where(first + second > 0, 0.0)


def matrix_entropy(grams: Tensor, counts: tuple[int, ...]) -> MatrixEntropy:
    """Compute the entropies of ``grams`` ``[H, D, D]``; ``counts``: pairs of each head."""
    bands = [band_entropies(head, pairs) for head, pairs in zip(grams, counts, strict=True)]
    trace = grams.diagonal(dim1=-2, dim2=-1).sum(dim=-1).clamp(min=torch.finfo(grams.dtype).tiny)
    # Rounding can turn an eigenvalue of 0 negative.
    eigenvalues = torch.linalg.eigvalsh(grams / trace[:, None, None]).clamp(min=0).flip(-1)
    return MatrixEntropy(bands=stack_heads(bands), eigenvalues=eigenvalues, trace=trace)


def at_stage(heads: Heads, side: Side, stage: Stage, trained: Layout) -> Tensor:
    """Return queries or keys ``[B, H, T, D]`` of a layer at a stage.

    ``trained``: the model's layout before a rescaling.
    """
    if stage == "pre_ntk":
        return heads.q if side == "query" else heads.k
    turned = heads.rotated_q, heads.rotated_k
    if stage == "post_rope":
        tokens = heads.q.shape[2]
        positions = torch.arange(tokens, device=heads.q.device)
        layer = replace(trained, layers=(trained.layers[heads.layer],))
        (groups,) = head_groups(layer, positions, tokens)
        turned = encode_queries(heads.q, groups), encode_keys(heads.k, groups)
    return turned[side == "key"]


def matrix_entropy_of(heads: Heads, side: Side, stage: Stage, trained: Layout) -> MatrixEntropy:
    """Compute the matrix entropy of the queries or keys of one captured layer."""
    x = at_stage(heads, side, stage, trained)
    return matrix_entropy(gram(x), pair_counts(heads.encoding, x.shape[1], x.shape[-1]))


COPIED, DEPTH = 32, 0.1


class NeedleView(NamedTuple):
    """Attention of heads to a needle, and the directions of their queries (DoPE, Sec. 5.4 and 5.5,
    Fig. 2 to 6).

    ``attention``: mean attention ``[layers, query heads, T]`` of the prompt's question, which looks
    for the needle; ``last``: attention of the last token alone. For each chosen (layer, head):
    ``average`` ``[T]``, mean attention over all queries, where a query counts as 0 for keys after
    it; ``similarity`` ``[queries, D]``, cosines of the last queries with the eigenvectors of all
    the head's queries, in descending order of eigenvalues. Each eigenvector has the sign of the
    mean query along it.
    """

    attention: Array
    last: Array
    average: dict[Place, Array]
    similarity: dict[Place, Array]


def copy_prompt(ids: Tensor) -> NeedlePrompt:
    """Make a prompt of the first text ``[B, T]``, with its last tokens also written at a tenth of
    it.

    The last tokens of the prompt have then occurred before, and a head that retrieves attends to
    the copy or to the token after it. Both are the needle.
    """
    T = ids.shape[1]
    tokens, start = max(1, min(COPIED, T // 8)), int(DEPTH * T)
    text = ids[:1].clone()
    text[:, start : start + tokens] = ids[:1, -tokens:]
    return NeedlePrompt(text, needle=slice(start, start + tokens + 1), question=tokens)


def needle_view(
    model: LanguageModel, prompt: NeedlePrompt, chosen: Collection[Place]
) -> NeedleView:
    """Read the first of the prompts."""
    average: dict[Place, Array] = {}
    similarity: dict[Place, Array] = {}

    def measure(heads: Heads) -> Tensor:
        for layer, head in chosen:
            if layer == heads.layer:
                average[layer, head] = _average(heads, head)
                queries = heads.rotated_q[:, head]
                similarity[layer, head] = _similarity(queries, prompt.question)
        rows = last_attention(heads, prompt.question)[0]
        return torch.stack([rows.mean(dim=1), rows[:, -1]]).cpu()

    mean, last = torch.stack(capture(model, prompt.ids[:1], measure), dim=1).numpy()
    return NeedleView(mean, last, average, similarity)


def _average(heads: Heads, head: int) -> Array:
    """Average the attention of all queries, ``[T]``."""
    T = heads.q.shape[2]
    total = torch.zeros(T, dtype=torch.float64, device=heads.q.device)
    for _, rows in attention_blocks(heads, head):
        total[: rows.shape[-1]] += rows[0].sum(dim=0, dtype=torch.float64)
    return (total / T).cpu().numpy()


def _similarity(q: Tensor, queries: int) -> Array:
    """Compute cosines of the last ``queries`` of ``q`` ``[1, T, D]`` with all eigenvectors."""
    vectors = torch.linalg.eigh(gram(q[:, None])[0]).eigenvectors.flip(-1)
    along = q[0].double() @ vectors
    signed = along[-queries:] * along.mean(dim=0).sign()
    return (signed / q[0, -queries:].double().norm(dim=-1, keepdim=True)).cpu().numpy()
