"""Parts of the section on frequency entropy: shorter texts, and perplexity with pairs of extreme
entropy attenuated (Probing Rotary Position Embeddings through Frequency Entropy, Sec. 5.2, App. F;
Fig. 4 and 15 to 17)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from trainer.analysis.arrays import Array, stack_layers
from trainer.analysis.frequency_entropy.measure import (
    NAMES,
    FrequencyEntropy,
    Gate,
    Gates,
    Sweep,
    frequency_entropies,
    sweep,
)
from trainer.analysis.settings import rules
from trainer.analysis.studies.section import Part, Picture
from trainer.analysis.studies.study import Target
from trainer.plotting.lines import curves
from trainer.plotting.points import pair_scatter

NEAR = 2
"""Distance in pairs that counts as the same place."""


def shorter_texts_part(
    target: Target, whole: Mapping[str, Array], shown: Collection[tuple[int, int]]
) -> Part:
    """Compare entropies of queries on the target's prefixes with the whole text's (App. F, Fig. 15
    to 17).

    ``whole``: entropies on the whole text, ``[layers, heads, pairs]`` by measure. ``shown``:
    (layer, query head) of the pictures.
    """
    prefixes = sorted({n for n in target.prefixes if n < target.length})
    if not prefixes:
        return Part()
    by_length: dict[int, Mapping[str, Array]] = {}
    for n in prefixes:
        measures = [m for m in whole if m != "spectrum" or n >= target.frames.frame]
        layers = frequency_entropies(target.model, target.ids[:, :n], measures, target.frames)
        by_length[n] = {m: stack_layers([layer.query[m] for layer in layers]) for m in measures}
    by_length[target.length] = whole
    lengths = list(by_length)
    missing: Array = np.full(next(iter(whole.values())).shape, np.nan)
    by_measure = {m: np.stack([by_length[n].get(m, missing) for n in lengths]) for m in whole}
    panels = {
        NAMES[m]: {f"L{i}H{j}": values[:, i, j] for i, j in shown}
        for m, values in by_measure.items()
    }
    picture = Picture(
        name="frequency_entropy_lengths",
        figure=pair_scatter(panels, {}, target.pair_axis, ("tokens", [f"{n:,}" for n in lengths])),
        caption=(
            "Frequency entropy (0 to 1) of the query pairs of one head a layer, on the first "
            "tokens of the text and on the whole text. Points on top of each other: bands and "
            "periods are at the same pairs at every length."
        ),
        header=("tokens", "layer", "head", "pair", *(NAMES[m] for m in whole)),
        rows=[
            (lengths[n], layer, head, pair, *entropies)
            for layer, head in shown
            for n, pair in np.ndindex(len(lengths), missing.shape[-1])
            for entropies in [[float(v[n, layer, head, pair]) for v in by_measure.values()]]
            if np.isfinite(entropies).any()
        ],
    )
    return Part(tuple(_changes(lengths, by_measure)), (picture,))


def _changes(lengths: Sequence[int], by_measure: Mapping[str, Array]) -> list[str]:
    """Compare entropies ``[lengths, layers, heads, pairs]`` on the shortest text that has a measure
    with the whole text's."""
    findings = []
    for m, values in by_measure.items():
        last = len(values) - 1
        shortest = next((i for i in range(last) if np.isfinite(values[i]).any()), last)
        if shortest == last:
            continue
        first, whole = values[shortest], values[-1]
        same = (np.abs(strongest_pairs(first) - strongest_pairs(whole)) <= NEAR).mean()
        findings.append(
            f"From {lengths[shortest]:,} to {lengths[-1]:,} tokens {NAMES[m]} of a query pair "
            f"changes by {np.nanmean(np.abs(whole - first)):.3f} on average; in {same:.0%} of "
            f"heads the pair where it is lowest stays within {NEAR} of its place."
        )
    return findings


def attenuation_part(
    target: Target, measures: Sequence[str], entropies: Sequence[FrequencyEntropy]
) -> Part:
    """Measure perplexity of the page's texts by gate and alpha (Sec. 5.2, Fig. 4).

    ``measures``: measures for which the text is long enough; gates of others are skipped.
    ``entropies``: entropies on the page's texts. A model without rotation, or with an intervention,
    is not measured.
    """
    settings, layout = target.attenuation, target.model.layout
    gates = [
        together
        for together in (tuple(Gate(*rule) for rule in rules(gate)) for gate in settings.gates)
        if all(gate.measure in measures for gate in together)
    ]
    busy = any(layer.intervention for layer in layout.layers)
    if not (settings.alphas and gates and layout.rotates) or busy:
        return Part(numbers={"sweep": []})
    ids, most = target.ids[: settings.texts], target.length - 1
    choice, choice_text = target.choice, "pairs chosen on the same text"
    if choice is not None:
        choice_text = f"pairs chosen on {choice.shape[1]:,} tokens of validation text"
    elif settings.choice_length is not None:
        choice = target.ids[:, : settings.choice_length]
        choice_text = f"pairs chosen on the first {choice.shape[1]:,} tokens of this text"
    if choice is not None:
        needed = sorted({gate.measure for together in gates for gate in together})
        entropies = frequency_entropies(target.model, choice, needed, target.frames)
    lengths = dict.fromkeys(min(n, most) for n in settings.tokens or [most])
    by_length = [
        sweep(target.model, ids[:, : n + 1], entropies, gates, settings.alphas) for n in lengths
    ]
    sweeps = [measured for sweeps in by_length for measured in sweeps]
    return Part(
        tuple(_finding(measured) for measured in sweeps if measured.pairs),
        tuple(_picture(sweeps, choice_text, alone=len(by_length) == 1) for sweeps in by_length),
        numbers={
            "sweep": [
                {"gate": in_words(s.gates), "tokens": s.tokens, "pairs": s.pairs}
                | {f"alpha={alpha:g}": value for alpha, value in s.perplexity.items()}
                for s in sweeps
            ]
        },
    )


def strongest_pairs(entropy: Array) -> Array:
    """Return the pair of lowest entropy of every head, from ``[layers, heads, pairs]``."""
    return np.nanargmin(entropy.reshape(-1, entropy.shape[-1]), axis=-1)


def in_words(gates: Gates) -> str:
    """Describe gates in words."""
    return " or ".join(
        f"{NAMES[gate.measure]} {'<' if gate.side == 'below' else '>'} {gate.tau:g}"
        for gate in gates
    )


def _finding(measured: Sweep) -> str:
    perplexity, weakest = measured.perplexity, min(measured.perplexity)
    return (
        f"With the {measured.pairs:,} pairs of {in_words(measured.gates)} at {weakest:g} of their "
        f"size, perplexity of {measured.tokens:,} tokens goes from {perplexity[1.0]:.2f} to "
        f"{perplexity[weakest]:.2f}."
    )


def _picture(sweeps: Sequence[Sweep], choice_text: str, *, alone: bool) -> Picture:
    lines = {
        f"{in_words(s.gates)}\n({s.pairs:,} pairs)": (
            list(s.perplexity),
            list(s.perplexity.values()),
        )
        for s in sweeps
    }
    tokens = sweeps[0].tokens
    return Picture(
        name="attenuation" if alone else f"attenuation_{tokens}",
        figure=curves(
            lines, x="factor α on the chosen pairs of queries and keys", y="perplexity", log_y=True
        ),
        caption=(
            f"Perplexity of the first {tokens:,} tokens of the text with the pairs of extreme "
            f"entropy multiplied by α, queries and keys each by their own entropy; {choice_text}. "
            "A rise to the left: these pairs matter; sets of very different size cannot be "
            "compared."
        ),
        header=("tokens", "gate", "pairs", "alpha", "perplexity"),
        rows=[
            (s.tokens, in_words(s.gates), s.pairs, alpha, perplexity)
            for s in sweeps
            for alpha, perplexity in sorted(s.perplexity.items())
        ],
    )
