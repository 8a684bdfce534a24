"""Layers to analyse, attention written as plain float64 loops, and values of rows."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.reference import softmax
from trainer.analysis.attention import Heads, capture
from trainer.positional.encodings import alibi_slopes, by_name
from trainer.positional.layout import LayerEncoding
from trainer.positional.rotation import rotary_table, rotate


def turned(x, spectrum):
    """``x`` ``[B, H, T, D]`` rotated by its positions."""
    return rotate(x, *rotary_table(spectrum, torch.arange(x.shape[2])))


def layer_of_heads(name="rope", *, texts=2, heads=4, kv_heads=2, T=40, D=8, window=None, index=0):
    """Queries and keys around two different centres, which is what makes clusters."""
    generator = torch.Generator().manual_seed(index)

    def cloud(count):
        centre = torch.randn(1, count, 1, D, generator=generator) * 1.5
        return centre + torch.randn(texts, count, T, D, generator=generator)

    q, k = cloud(heads), cloud(kv_heads)
    spectrum = by_name(name, D, T)
    encoding = LayerEncoding((spectrum,) * kv_heads, window)
    return Heads(index, encoding, q, k, turned(q, spectrum), turned(k, spectrum), 64)


def attention_of(heads, text, head, *, rotated=True, channels=slice(None)):
    """(attention, dot products) of one head: rows ``[T][T]``, float64, 0 where hidden;
    ``channels``: those whose products count."""
    q, k = (heads.rotated_q, heads.rotated_k) if rotated else (heads.q, heads.k)
    q, k = q[text, head], k[text, head // heads.queries_per_key]
    q, k = (x.double().numpy()[:, channels] for x in (q, k))
    T = len(q)
    slope = 0.0
    if rotated and heads.encoding.spectra[0].alibi:
        slope = alibi_slopes(heads.q.shape[1])[head]
    attention, dots = np.zeros((T, T)), np.full((T, T), -np.inf)
    for i in range(T):
        first = max(0, i + 1 - (heads.encoding.window or T))
        dots[i, first : i + 1] = k[first : i + 1] @ q[i]
        products = [float(dot) * heads.scale for dot in dots[i, first : i + 1]]
        if heads.softcap is not None:
            products = [heads.softcap * math.tanh(x / heads.softcap) for x in products]
        scores = [x - slope * (i - j) for j, x in enumerate(products, first)]
        sink = [] if heads.sinks is None else [float(heads.sinks[head])]
        attention[i, first : i + 1] = softmax([*scores, *sink])[: len(scores)]
    return attention, dots


def cells(rows, metric, *shape, **where):
    """Values of a metric in the rows of results, reshaped; ``where``: columns and their cells."""
    chosen = rows["metric"] == metric
    for column, cell in where.items():
        chosen &= rows[column] == cell
    found = rows["value"][chosen].to_numpy()
    return found.reshape(shape) if shape else found


def drawn(results, name):
    """What the figure of this name is drawn from: panels, or maps by title."""
    (figure,) = (plot.figure for plot in results.plots if plot.name == name)
    (content, *_), _ = figure
    return content


def captured(model, ids):
    """Queries and keys of every layer."""
    return capture(model, ids, lambda heads: heads)
