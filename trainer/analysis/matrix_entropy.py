"""Matrix entropy of heads: how evenly queries or keys spread over directions (DoPE, Sec. 4.3), and
attention of the extreme heads on a needle (Sec. 5.4 and 5.5, Fig. 2 to 6, Table 1).

The Gram matrix over all tokens of a head's queries or keys gives the entropy of every rotary pair's
2 x 2 block (Eq. 25), its mean over the pairs (Eq. 26), and the truncated effective rank of the
whole matrix (Eq. 30). In a head of low entropy all tokens share a few directions, which show as
bright bands in its attention map.

Stages of one forward pass, whose last two the paper does not tell apart: before any encoding
(``pre_ntk``), rotated with the rescaled frequencies that the pass uses (``post_ntk``), and with the
frequencies as trained (``post_rope``). Without a rescaling the last two are equal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.attention import (
    SIDES,
    Array,
    HeadIndex,
    Heads,
    NeedlePrompt,
    Side,
    attention_blocks,
    capture,
    last_attention,
    pair_counts,
    stack_heads,
    stack_layers,
    view_heads,
)
from trainer.analysis.results import Findings, analysis, tidy
from trainer.analysis.target import NotApplicableError, Target
from trainer.model.language_model import LanguageModel
from trainer.plotting import ColourScale, Grid, Line, Panel, Plot, draw, heat_maps
from trainer.positional.layout import Layout
from trainer.positional.rotation import encode, head_groups

Stage = Literal["pre_ntk", "post_ntk", "post_rope"]
STAGES: dict[Stage, str] = {"pre_ntk": "before the rotation", "post_ntk": "as they attend"}
CHUNK = 8192
"""Tokens converted to float64 at a time."""
COPIED = 32
"""Largest number of tokens of a copied needle."""
DEPTH = 0.1
"""Place of a copied needle, as a share of the text."""
RANKS = (1, 4, 8, 16, 32)
SHOWN = 16
"""Rank by which heads are chosen, if a head has more channels."""
POINTS = 2048
"""Largest number of points of a curve along the text."""
Scores = dict[str, Array]
"""Band entropy and effective ranks by name, ``[layers, heads]``."""


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

        ``r`` = None uses all eigenvalues. For r = 1, where Eq. 30 gives 1 for every head, this
        returns 1 over the largest eigenvalue, the effective rank of the min-entropy.
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
    divided by its trace; 0 for a block of zeros."""
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
    """Return queries or keys ``[B, H, T, D]`` of a layer at a stage; ``trained``: the model's
    layout before a rescaling."""
    if stage != "post_rope":
        q, k = heads.states(rotated=stage == "post_ntk")
        return q if side == "query" else k
    tokens = heads.q.shape[2]
    positions = torch.arange(tokens, device=heads.q.device)
    layer = replace(trained, layers=(trained.layers[heads.layer],))
    (groups,) = head_groups(layer, positions, tokens)
    if side == "query":
        return encode(heads.q, groups, tempered=True)
    return encode(heads.k, groups)


def matrix_entropy_of(heads: Heads, side: Side, stage: Stage, trained: Layout) -> MatrixEntropy:
    """Compute the matrix entropy of the queries or keys of one captured layer."""
    x = at_stage(heads, side, stage, trained)
    return matrix_entropy(gram(x), pair_counts(heads.encoding, x.shape[1], x.shape[-1]))


def copy_prompt(ids: Tensor) -> NeedlePrompt:
    """Make a prompt of the first text ``[B, T]``, with its last tokens also written at a tenth of
    it: the needle, with the token after it, to which a head that retrieves attends."""
    T = ids.shape[1]
    tokens = max(1, min(COPIED, T // 8))
    start = int(DEPTH * T)
    text = ids[:1].clone()
    text[:, start : start + tokens] = ids[:1, -tokens:]
    return NeedlePrompt(text, needle=slice(start, start + tokens + 1), question=tokens)


def question_attention(model: LanguageModel, prompt: NeedlePrompt) -> tuple[Array, Array]:
    """Return the attention ``[layers, query heads, T]`` of the first prompt's question, which looks
    for the needle: means over its tokens, and of the last token alone (DoPE, Sec. 5.4)."""

    def measure(heads: Heads) -> Tensor:
        rows = last_attention(heads, prompt.question)[0]
        return torch.stack([rows.mean(dim=1), rows[:, -1]]).cpu()

    mean, last = torch.stack(capture(model, prompt.ids[:1], measure), dim=1).numpy()
    return mean, last


def average_attention(heads: Heads, head: int) -> Array:
    """Average the attention ``[T]`` of all queries of the first text (Fig. 2); a query counts as 0
    for keys after it."""
    T = heads.q.shape[2]
    total = torch.zeros(T, dtype=torch.float64, device=heads.q.device)
    for _, rows in attention_blocks(heads, head):
        total[: rows.shape[-1]] += rows[0].sum(dim=0, dtype=torch.float64)
    return (total / T).cpu().numpy()


def query_directions(heads: Heads, head: int, queries: int) -> Array:
    """Compute cosines ``[queries, D]`` of a head's last queries in the first text with the
    eigenvectors of all its queries, in descending order of eigenvalues (Sec. 5.5, Fig. 3 to 6).

    Each eigenvector has the sign of the mean query along it.
    """
    q = heads.rotated_q[:1, head]
    vectors = torch.linalg.eigh(gram(q[:, None])[0]).eigenvectors.flip(-1)
    along = q[0].double() @ vectors
    signed = along[-queries:] * along.mean(dim=0).sign()
    return (signed / q[0, -queries:].double().norm(dim=-1, keepdim=True)).cpu().numpy()


def scores_of(layers: Sequence[MatrixEntropy]) -> Scores:
    """Return the mean entropy of every head's bands, and the effective rank of its r largest
    eigenvalues and of all."""
    channels = layers[0].eigenvalues.shape[-1]
    scores = {"band entropy": [layer.band_mean for layer in layers]}
    for r in RANKS:
        if r < channels:
            scores[f"effective rank, r = {r}"] = [layer.effective_rank(r) for layer in layers]
    scores["effective rank"] = [layer.effective_rank(None) for layer in layers]
    return {name: torch.stack(values).cpu().numpy() for name, values in scores.items()}


@analysis("matrix_entropy", "Matrix entropy")
def analyze_matrix_entropy(target: Target) -> Findings:
    """Compute band entropies, truncated effective ranks and attention on a needle of heads."""
    target.require(16)  # room for a needle
    needle = target.config.needle
    if needle.kind == "question" and target.question is None:
        raise NotApplicableError(
            f"analysis.needle.kind: {target.length} tokens are too few for a question, not for copy"
        )
    model = target.model
    # Without a rotation the stages differ at most by a temperature.
    stages: list[Stage] = ["pre_ntk", "post_ntk"] if model.layout.rotates else ["post_ntk"]

    def measure(heads: Heads) -> dict[tuple[Side, Stage], MatrixEntropy]:
        return {
            (side, stage): matrix_entropy_of(heads, side, stage, model.layout)
            for side, stage in product(SIDES, stages)
        }

    layers = capture(model, target.ids, measure)
    scores: dict[tuple[Side, Stage], Scores] = {}
    tables = []
    for side, stage in layers[0]:
        entropies = [layer[side, stage] for layer in layers]
        scores[side, stage] = scores_of(entropies)
        bands = stack_layers([entropy.bands for entropy in entropies])
        variant = f"{SIDES[side]}, {STAGES[stage]}"
        tables.append(tidy(scores[side, stage], "layer", "head", variant=variant))
        of_pairs = {"band entropy of a pair": bands}
        tables.append(tidy(of_pairs, "layer", "head", "pair", variant=variant))
    prompt = target.question or copy_prompt(target.ids)
    ranked = scores[needle.by, "post_ntk"]
    if needle.ranked_on == "prompt":
        of_prompt = capture(model, prompt.ids[:1], measure)
        ranked = scores_of([layer[needle.by, "post_ntk"] for layer in of_prompt])
    shown = {(i, j): f"L{i}H{j}" for i, j in target.config.chosen}
    shown = shown or extreme_heads(ranked, model.config.num_attention_heads, needle.by)
    mean, last = question_attention(model, prompt)
    where = prompt.needle
    numbers = {
        "attention_on_needle": mean[..., where].sum(axis=-1),
        "attention_on_first_token": mean[..., 0],
        "last_token_on_needle": last[..., where].sum(axis=-1),
    }
    tables.append(tidy(numbers, "layer", "head", variant="needle prompt"))
    return Findings(needle_plots(model, prompt, shown, last), tables)


def extreme_heads(scores: Scores, heads: int, side: Side) -> dict[HeadIndex, str]:
    """Return titles of the query heads of lowest and highest band entropy and effective rank, by
    place. ``scores``: of the ``side``, ``heads``: number of query heads of a layer."""
    shown: dict[HeadIndex, str] = {}
    rank = f"effective rank, r = {SHOWN}"
    if rank not in scores:
        rank = "effective rank"
    of_keys = " of keys" if side == "key" else ""
    for name in ("band entropy", rank):
        values = scores[name].repeat(heads // scores[name].shape[1], axis=1)
        for end, index in (("lowest", values.argmin()), ("highest", values.argmax())):
            i, j = divmod(int(index), heads)
            shown.setdefault((i, j), f"L{i}H{j}: {end} {name}{of_keys}")
    return shown


def needle_plots(
    model: LanguageModel, prompt: NeedlePrompt, shown: Mapping[HeadIndex, str], last: Array
) -> list[Plot]:
    """Draw the attention of single heads by position, and directions of their queries; ``last``
    ``[layers, query heads, T]``: attention of the last token."""

    def view(heads: Heads, head: int) -> tuple[Array, Array]:
        return average_attention(heads, head), query_directions(heads, head, prompt.question)

    views = view_heads(model, prompt.ids[:1], [*shown], view)
    T = prompt.ids.shape[1]
    needle = prompt.needle
    mark = ((needle.start + needle.stop) / 2, "needle")
    # Means within at most so many buckets of positions.
    starts = np.arange(0, T, -(-T // POINTS))
    widths = np.diff([*starts, T])
    panels = []
    directions = {}
    from_zero = partial(Axes.set_ylim, bottom=0)
    for place, title in shown.items():
        average, directions[title] = views[place]
        for kind, attention in (("average", average), ("last token", last[place])):
            values = (np.add.reduceat(attention, starts) / widths).tolist()
            line = Line("", 1, starts.tolist(), values)
            panels.append(Panel(f"{title}\n{kind}", [line], prepare=from_zero, vertical=mark))
    x = "eigenvector of the head's queries, from the largest eigenvalue on"
    cosines = ColourScale("cosine similarity", high=1, signed=True)
    grid = Grid(2, 2.0, x=x, y=f"token, from {T - prompt.question:,} on")
    return [
        Plot(
            "needle_heads",
            draw(panels, Grid(2, 1.7, x="position of the key (tokens)", y="attention weight")),
            "Attention weight of single heads by the key's position, mean over all queries and of "
            "the last token (DoPE, Fig. 2).",
        ),
        Plot(
            "query_directions",
            heat_maps(directions, cosines, grid),
            "Cosines of the last queries with the eigenvectors of their head's Gram matrix (DoPE, "
            "Fig. 3-6).",
        ),
    ]
