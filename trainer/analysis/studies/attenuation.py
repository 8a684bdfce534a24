"""What a model loses without its pairs of extreme frequency entropy, by their factor (Probing
Rotary Position Embeddings through Frequency Entropy, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.analysis.attenuation import Gate, Gates, Sweep, sweep
from trainer.analysis.frequency_entropy import FrequencyEntropy, frequency_entropies
from trainer.analysis.settings import rules
from trainer.analysis.studies.section import Part, Picture
from trainer.analysis.studies.study import Target
from trainer.plotting.lines import curves

NAMES = {"spectrum": "SpectrumFE", "sequence": "SequenceFE"}


def attenuation_part(
    target: Target, measures: Sequence[str], entropies: Sequence[FrequencyEntropy]
) -> Part:
    """Perplexity of the page's texts by gates and alphas of the target.

    ``measures``: that the text is long enough for; gates of others are left out. ``entropies``: of
    the page's texts. A model without rotation, or with an intervention, has none.
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
    where = "the text that they were chosen on"
    chosen = target.choice
    if chosen is None and settings.choice_length is not None:
        chosen = target.ids[:, : settings.choice_length]
        where = f"that text; they were chosen on its first {chosen.shape[1]:,} tokens"
    elif chosen is not None:
        where = f"it; they were chosen on {chosen.shape[1]:,} tokens of validation text"
    if chosen is not None:
        asked = sorted({gate.measure for together in gates for gate in together})
        entropies = frequency_entropies(target.model, chosen, asked, target.frames)
    lengths = dict.fromkeys(min(n, most) for n in settings.tokens or [most])
    found = [
        sweep(target.model, ids[:, : n + 1], entropies, gates, settings.alphas) for n in lengths
    ]
    sweeps = [one for of_length in found for one in of_length]
    return Part(
        tuple(_finding(one) for one in sweeps if one.pairs),
        tuple(_picture(one, where, alone=len(found) == 1) for one in found),
        numbers={
            "sweep": [
                {"gate": label(one.gates), "tokens": one.tokens, "pairs": one.pairs}
                | {f"alpha={alpha:g}": value for alpha, value in one.perplexity.items()}
                for one in sweeps
            ]
        },
    )


def label(gates: Gates) -> str:
    """A gate in words."""
    return " or ".join(
        f"{NAMES[gate.measure]} {'<' if gate.side == 'below' else '>'} {gate.tau:g}"
        for gate in gates
    )


def _finding(one: Sweep) -> str:
    weakest = min(one.perplexity)
    return (
        f"With the {one.pairs:,} pairs of {label(one.gates)} at {weakest:g} of their size, "
        f"perplexity of {one.tokens:,} tokens goes from {one.perplexity[1.0]:.2f} to "
        f"{one.perplexity[weakest]:.2f}."
    )


def _picture(sweeps: Sequence[Sweep], where: str, *, alone: bool) -> Picture:
    lines = {
        f"{label(s.gates)}\n({s.pairs:,} pairs)": (list(s.perplexity), list(s.perplexity.values()))
        for s in sweeps
    }
    tokens = sweeps[0].tokens
    return Picture(
        "attenuation" if alone else f"attenuation_{tokens}",
        curves(
            lines, x="factor α on the chosen pairs of queries and keys", y="perplexity", log_y=True
        ),
        f"Perplexity of the first {tokens:,} tokens of the text with the pairs of extreme entropy "
        f"multiplied by α, queries and keys each by their own entropy, on {where}. A rise to the "
        "left: these pairs matter; sets of very different size cannot be compared.",
        ("tokens", "gate", "pairs", "alpha", "perplexity"),
        [
            (s.tokens, label(s.gates), s.pairs, alpha, perplexity)
            for s in sweeps
            for alpha, perplexity in sorted(s.perplexity.items())
        ],
    )
