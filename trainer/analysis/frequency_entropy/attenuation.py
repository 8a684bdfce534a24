"""Perplexity with rotary pairs of extreme entropy attenuated (Probing Rotary Position Embeddings
through Frequency Entropy, Sec. 5.2, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.analysis.frequency_entropy.measure import (
    NAMES,
    FrequencyEntropy,
    Gates,
    Sweep,
    frequency_entropies,
    sweep,
)
from trainer.analysis.settings import rules
from trainer.analysis.studies.section import Part, Picture
from trainer.analysis.studies.study import Target
from trainer.common.words import counted
from trainer.plotting.lines import curves


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
        for together in map(rules, settings.gates)
        if all(gate.measure in measures for gate in together)
    ]
    busy = any(layer.intervention for layer in layout.layers)
    if not (settings.alphas and gates and layout.rotates) or busy:
        return Part(numbers={"sweep": []})
    ids, most = target.ids[: settings.texts], target.length - 1
    texts = counted(len(target.ids), "text")
    choice, choice_text = target.choice, f"pairs chosen on {texts} of {target.length:,} tokens"
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
