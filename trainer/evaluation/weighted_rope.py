"""Weighted RoPE: a factor on rotary pairs of extreme frequency entropy, without training.

Source: Probing Rotary Position Embeddings through Frequency Entropy, Sec. 5. Pairs of queries and
of keys are chosen on a text by their own entropies (Eq. 11 and 12), and the layout is changed for
them, on top of any rescaling. Pairs that do not rotate stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from trainer.analysis.frequency_entropy import Gate, attenuation, frequency_entropies
from trainer.config import WeightedRopeSettings
from trainer.model.language_model import LanguageModel
from trainer.positional.intervention import Intervention
from trainer.positional.layout import LayerEncoding, Layout


def select(
    model: LanguageModel,
    ids: Tensor,
    rules: Sequence[WeightedRopeSettings],
    layout: Layout | None = None,
) -> tuple[Intervention, ...]:
    """Choose the factors of every layer from the mean entropies on texts ``[B, T]``.

    A side whose factors are all 1 is empty. A pair that several rules choose gets the smallest
    factor. ``model`` has its layout as trained; ``layout``: the rescaled one, if any.

    Raises:
        UserError: the text is too short.
    """
    gates = [Gate(rule.entropy, rule.side, rule.tau) for rule in rules]
    alphas = [rule.alpha for rule in rules]
    measures = sorted({gate.measure for gate in gates})
    with model.using(layout or model.layout):
        layers = frequency_entropies(model, ids, measures)
    return attenuation(model.layout, layers, gates, alphas, model.config.head_size)[0]


def pairs(chosen: Sequence[Intervention]) -> int:
    """Return the number of query and key pairs whose factor is not 1."""
    rows = (row for factors in chosen for row in (*factors.query, *factors.key))
    return sum(factor != 1 for row in rows for factor in row) // 2


def apply(layout: Layout, chosen: tuple[Intervention, ...]) -> Layout:
    """Return ``layout``, rescaled or not, with these factors.

    Raises:
        ValueError: a layer already has an intervention.
    """
    none = Intervention()
    if all(factors == none for factors in chosen):
        return layout
    changed = (
        encoding if factors == none else encoding.with_intervention(_fitted(factors, encoding))
        for encoding, factors in zip(layout.layers, chosen, strict=True)
    )
    return replace(layout, layers=tuple(changed))


def _fitted(factors: Intervention, encoding: LayerEncoding) -> Intervention:
    """Return the factors with a row of keys for every spectrum of the layer.

    DoPE gives the query heads of a layer copies of their keys. After it, a choice at one length may
    have more or fewer rows than the layer at another one, and all copies have equal rows.
    """
    rows, keys = factors.key, len(encoding.spectra)
    return replace(factors, key=tuple(rows[i * len(rows) // keys] for i in range(keys) if rows))
