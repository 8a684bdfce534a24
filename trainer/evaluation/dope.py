"""DoPE: remove the rotary encoding of heads with extreme matrix entropy, without training.

Source: Denoising Rotary Position Embedding, Sec. 4.3. Heads are chosen on a text, among all layers
together (Sec. 5.1), and the layout is changed for them, on top of any rescaling. A head is a query
head with a copy of the keys that it reads. Settings resolve the paper's ambiguities.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.analysis.attention import SIDES, HeadIndex, Heads, Side, capture, pair_counts
from trainer.analysis.matrix_entropy import MatrixEntropy, at_stage, gram, matrix_entropy
from trainer.config import DopeSettings
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Intervention, Layout
from trainer.positional.spectrum import Frequencies, Spectrum

Chosen = dict[HeadIndex, tuple[float, float]]
"""Layers and query heads in the order of their choice, and the standard deviations of the noise
that can replace a head's queries and keys."""


def select(model: LanguageModel, ids: Tensor, settings: DopeSettings, layout: Layout) -> Chosen:
    """Choose heads on texts ``[B, T]``; ``model`` has its layout as trained, ``layout`` is the
    rescaled one, or the same."""
    trained = model.layout
    query_heads = model.config.num_attention_heads
    sides: Sequence[Side] = [*SIDES] if settings.by == "joint" else [settings.by]
    grams: dict[int, Tensor] = {}
    moments: dict[int, Tensor] = {}

    def per_query_head(values: Tensor) -> Tensor:
        return values.repeat_interleave(query_heads // len(values), dim=0)

    def on_layer(heads: Heads) -> None:
        layer = heads.layer
        stages = (at_stage(heads, side, settings.stage, trained) for side in sides)
        gram_of_sides = torch.stack([per_query_head(gram(x)) for x in stages]).sum(dim=0)
        grams[layer] = grams.get(layer, 0) + gram_of_sides.cpu()
        rotated = torch.stack(
            [_moments(heads.rotated_q), per_query_head(_moments(heads.rotated_k))]
        )
        moments[layer] = moments.get(layer, 0) + rotated.cpu() / len(ids)

    with model.using(layout):
        for text in ids:  # one at a time: all together would need the memory of all
            capture(model, text[None], on_layer)
    scores: dict[HeadIndex, float] = {}
    for i, encoding in enumerate(layout.layers):
        counts = pair_counts(encoding, query_heads, model.config.head_size)
        of_heads = _scores(matrix_entropy(grams[i], counts), settings).tolist()
        spectra = trained.layers[i].expanded(query_heads).spectra
        scores |= {(i, h): x for h, x in enumerate(of_heads) if spectra[h].rotates}
    ranked = sorted(scores, key=scores.__getitem__, reverse=settings.order == "descending")
    retained = ranked[settings.heads :]

    def noise(layer: int) -> tuple[float, float]:
        """Return the standard deviations of the query and key components of the layer's retained
        heads, or of all its heads if none is retained."""
        if settings.sigma is not None:
            return settings.sigma, settings.sigma
        heads = sorted(h for i, h in retained if i == layer) or [*range(query_heads)]
        mean, square = moments[layer][:, heads].mean(dim=1).unbind(dim=1)
        query, key = (square - mean.square()).clamp(min=0).sqrt().tolist()
        return query, key

    return {(layer, head): noise(layer) for layer, head in ranked[: settings.heads]}


def _moments(x: Tensor) -> Tensor:
    """Return means and mean squares of the components of heads, ``[H, 2]`` float64."""
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    return torch.stack([mean, var + mean.square()], dim=-1).double()


def _scores(entropies: MatrixEntropy, settings: DopeSettings) -> Tensor:
    """Return the scores that heads are sorted by, ``[H]``."""
    if settings.entropy == "trunc":
        return entropies.effective_rank(settings.r)
    if settings.entropy == "vanilla":
        return entropies.band_mean
    return entropies.spectral_norm


def lost_bands(trained: Spectrum, training_length: int, settings: DopeSettings) -> list[int]:
    """Return the pairs that a chosen head loses, by its frequencies as trained, at C tokens."""
    C = training_length
    slowest = 2 * math.pi / C if settings.variant == "by_parts" else math.inf
    return [m for m, theta in enumerate(trained.at(C, C).inv_freq) if 0 < theta < slowest]


def apply(layout: Layout, chosen: Chosen, settings: DopeSettings, model: LanguageModel) -> Layout:
    """Return ``layout``, rescaled or not, without the bands that the chosen heads lose, or with
    noise in the place of their queries and keys (Eq. 36 and 37).

    ``model`` has its layout as trained.
    """
    C = model.layout.training_length
    size = model.config.head_size
    every_head = range(model.config.num_attention_heads)
    layers = list(layout.layers)
    for i in {layer for layer, _ in chosen}:
        encoding = layout.layers[i].expanded(len(every_head))
        trained = model.layout.layers[i].expanded(len(every_head))
        lost = {h: lost_bands(trained.spectra[h], C, settings) for layer, h in chosen if layer == i}
        if settings.variant == "by_gaussian":
            factors = tuple((float(h not in lost),) * size for h in every_head)
            sigmas = [chosen.get((i, h), (0.0, 0.0)) for h in every_head]
            query, key = zip(*sigmas, strict=True)
            # One seed per layer; otherwise all layers would have the same noise.
            noise = Intervention(factors, factors, query, key, settings.seed * 1000 + i)
            layers[i] = encoding.with_intervention(noise)
        elif settings.removal == "zero":
            rows = torch.ones(len(every_head), size)
            for h, bands in lost.items():
                pairs = len(encoding.spectra[h].inv_freq)
                channels = [*range(size)]  # Eq. 35 also zeroes what does not rotate
                if settings.variant != "by_all":
                    channels = [*bands, *(m + pairs for m in bands)]
                rows[h, channels] = 0
            # Channels that are 0 in the queries add nothing to scores, whatever the keys are.
            zeros = Intervention(query=tuple(map(tuple, rows.tolist())))
            layers[i] = layers[i].with_intervention(zeros)
        else:
            spectra = list(encoding.spectra)
            for h, bands in lost.items():
                spectra[h] = _standing_still(spectra[h], bands)
            layers[i] = replace(encoding, spectra=tuple(spectra))
    return replace(layout, layers=tuple(layers))


def _standing_still(spectrum: Spectrum, bands: Sequence[int]) -> Spectrum:
    """Set the frequencies of the bands to zero; keep temperature and scale."""

    def still(inv_freq: Frequencies) -> Frequencies:
        return tuple(0.0 if m in bands else theta for m, theta in enumerate(inv_freq))

    long = spectrum.long
    if long is not None:
        long = replace(long, inv_freq=still(long.inv_freq))
    return replace(spectrum, inv_freq=still(spectrum.inv_freq), long=long, origin=())
