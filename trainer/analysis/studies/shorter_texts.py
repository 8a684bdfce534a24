"""Frequency entropy of the first tokens of a text beside that of the whole (Probing Rotary Position
Embeddings through Frequency Entropy, App. F, Fig. 15 to 17)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.frequency_entropy import frequency_entropies
from trainer.analysis.studies.arrays import stacked
from trainer.analysis.studies.attenuation import NAMES
from trainer.analysis.studies.section import Part, Picture
from trainer.analysis.studies.study import Target
from trainer.plotting.points import pair_scatter

NEAR = 2
"""Pairs to either side that count as the same."""


def shorter_texts_part(
    target: Target, whole: Mapping[str, Array], shown: Collection[tuple[int, int]]
) -> Part:
    """Entropies of queries at each of the target's prefixes.

    Args:
        target: a model and its text.
        whole: of the whole text, ``[layers, heads, pairs]`` by measure.
        shown: (layer, query head) of the pictures.
    """
    prefixes = sorted({n for n in target.prefixes if n < target.length})
    if not prefixes:
        return Part()
    found: dict[int, Mapping[str, Array]] = {}
    for n in prefixes:
        measures = [m for m in whole if m != "spectrum" or n >= target.frames.frame]
        layers = frequency_entropies(target.model, target.ids[:, :n], measures, target.frames)
        found[n] = {m: stacked([layer.query[m] for layer in layers]) for m in measures}
    found[target.length] = whole
    lengths = list(found)
    missing: Array = np.full(next(iter(whole.values())).shape, np.nan)
    by_measure = {m: np.stack([found[n].get(m, missing) for n in lengths]) for m in whole}
    panels = {
        NAMES[m]: {f"L{i}H{j}": values[:, i, j] for i, j in shown}
        for m, values in by_measure.items()
    }
    picture = Picture(
        "frequency_entropy_lengths",
        pair_scatter(panels, {}, target.pair_axis, ("tokens", [f"{n:,}" for n in lengths])),
        "Frequency entropy (0 to 1) of the query pairs of one head a layer, on the first tokens of "
        "the text and on the whole of it. Points on top of each other: bands and periods are where "
        "they are at every length.",
        ("tokens", "layer", "head", "pair", *(NAMES[m] for m in whole)),
        [
            (lengths[n], layer, head, pair, *(float(v[n, layer, head, pair]) for v in each))
            for each in [list(by_measure.values())]
            for layer, head in shown
            for n, pair in np.ndindex(len(lengths), missing.shape[-1])
            if any(np.isfinite(v[n, layer, head, pair]) for v in each)
        ],
    )
    return Part(
        tuple(_findings({m: (lengths, values) for m, values in by_measure.items()})), (picture,)
    )


def _findings(by_measure: Mapping[str, tuple[list[int], Array]]) -> list[str]:
    """How far the shortest text that has the measure is from the whole."""
    found = []
    for m, (lengths, values) in by_measure.items():
        with_it = [k for k, of in enumerate(values) if np.isfinite(of).any()]
        if len(with_it) < 2:
            continue
        first, whole = values[with_it[0]], values[-1]
        lowest = [np.nanargmin(of.reshape(-1, of.shape[-1]), axis=-1) for of in (first, whole)]
        same = (np.abs(lowest[0] - lowest[1]) <= NEAR).mean()
        found.append(
            f"From {lengths[with_it[0]]:,} to {lengths[-1]:,} tokens {NAMES[m]} of a query pair "
            f"changes by {np.nanmean(np.abs(whole - first)):.3f} on average; in {same:.0%} of "
            f"heads the pair where it is lowest stays within {NEAR} of its place."
        )
    return found
