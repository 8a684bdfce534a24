"""DoPE: remove the rotary encoding of heads with extreme matrix entropy, without training.

Source: Denoising Rotary Position Embedding, Sec. 4.3. Heads are chosen on a text, among all layers
together (Sec. 5.1), and the layout is changed for them, on top of any rescaling. A head is a query
head with a copy of the keys that it reads. Settings resolve the paper's ambiguities: it sorts both
ways, and by-all multiplies queries and keys by 0 (Eq. 35), while the text removes their encoding
"rather than completely zeroing out the head".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.analysis.attention import Heads, Side, capture, pair_counts
from trainer.analysis.matrix_entropy import MatrixEntropy, at_stage, gram, matrix_entropy
from trainer.common.errors import UserError
from trainer.config import DopeSettings
from trainer.model.config import ModelConfig
from trainer.model.language_model import LanguageModel
from trainer.positional.intervention import Intervention
from trainer.positional.layout import Layout
from trainer.positional.spectrum import Frequencies, Spectrum


@dataclass(frozen=True)
class Chosen:
    """A chosen head.

    ``head``: its index among the layer's query heads. ``score``: what heads are sorted by.
    ``bands``: pairs that it loses. ``noise``: standard deviations of the noise that replaces its
    queries and keys.
    """

    layer: int
    head: int
    score: float
    bands: tuple[int, ...]
    noise: tuple[float, float]

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


def select(
    model: LanguageModel, ids: Tensor, settings: DopeSettings, layout: Layout | None = None
) -> list[Chosen]:
    """Choose heads on texts ``[B, T]``, in order; evaluated texts may have another length
    (Table 3).

    ``model`` has its layout as trained; ``layout``: the rescaled one, if any.
    """
    trained, query_heads = model.layout, model.config.num_attention_heads
    spectra = [layer.expanded(query_heads).spectra for layer in trained.layers]
    rotating = [(i, h) for i, layer in enumerate(spectra) for h, s in enumerate(layer) if s.rotates]
    grams: dict[int, Tensor] = {}
    moments: dict[int, Tensor] = {}

    def on_layer(heads: Heads) -> None:
        layer = heads.layer
        grams[layer] = grams.get(layer, 0) + _grams(heads, settings, trained).cpu()
        moments[layer] = moments.get(layer, 0) + _moments(heads).cpu() / len(ids)

    used, size = layout or trained, (query_heads, model.config.head_size)
    with model.using(used):
        for text in ids:  # one at a time: all together would need the memory of all
            capture(model, text[None], on_layer)
    table = [
        _scores(matrix_entropy(grams[i], pair_counts(encoding, *size)), settings).tolist()
        for i, encoding in enumerate(used.layers)
    ]
    sign = 1 if settings.order == "ascending" else -1
    ranked = sorted(rotating, key=lambda place: sign * table[place[0]][place[1]])
    retained = set(ranked[settings.heads :])

    def noise(layer: int) -> tuple[float, float]:
        """Return the standard deviations of the query and key components of the layer's retained
        heads, or of all its heads if none is retained."""
        if settings.sigma is not None:
            return settings.sigma, settings.sigma
        every = range(query_heads)
        heads = [h for h in every if (layer, h) in retained] or [*every]
        mean, square = moments[layer][..., heads].mean(dim=-1).unbind(dim=1)
        query, key = (square - mean.square()).clamp(min=0).sqrt().tolist()
        return query, key

    return [
        Chosen(i, h, table[i][h], _lost_bands(spectra[i][h], trained, settings), noise(i))
        for i, h in ranked[: settings.heads]
    ]


def _scores(entropies: MatrixEntropy, settings: DopeSettings) -> Tensor:
    """Return the scores that heads are sorted by, ``[H]``.

    Raises:
        UserError: ``spectral`` is set for another score than the largest eigenvalue's.
    """
    if settings.spectral == "inverse":
        is_mean = settings.entropy == "vanilla"
        return entropies.band_mean if is_mean else entropies.effective_rank(settings.r)
    if (settings.entropy, settings.r) != ("trunc", 1):
        raise UserError("evaluation.dope.spectral: is for dope.entropy=trunc with dope.r=1")
    share = settings.spectral == "share"
    return entropies.eigenvalues[:, 0] if share else entropies.spectral_norm


def _grams(heads: Heads, settings: DopeSettings, trained: Layout) -> Tensor:
    """Compute the Gram matrices of all query heads, each with the keys that it reads."""
    queries = heads.q.shape[1]
    sides: tuple[Side, ...] = ("query", "key") if settings.by == "joint" else (settings.by,)
    stages = (at_stage(heads, side, settings.stage, trained) for side in sides)
    return torch.stack([_per_query_head(gram(stage), queries) for stage in stages]).sum(dim=0)


def _moments(heads: Heads) -> Tensor:
    """Return means and mean squares of query and key components, ``[2, 2, Hq]`` float64."""

    def moments(x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        by_head = torch.stack([mean, var + mean.square()], dim=-1).double()
        return _per_query_head(by_head, heads.q.shape[1]).T

    return torch.stack([moments(heads.rotated_q), moments(heads.rotated_k)])


def _per_query_head(values: Tensor, queries: int) -> Tensor:
    """Repeat values ``[H, ...]`` of heads for every query head that reads them."""
    return values.repeat_interleave(queries // len(values), dim=0)


def _lost_bands(spectrum: Spectrum, trained: Layout, settings: DopeSettings) -> tuple[int, ...]:
    """Return the pairs to remove, chosen by their frequencies as trained.

    A band is untrained beyond the training length by its trained frequency, whatever the rescaling.
    C is the longest training length; if frequencies depend on the length, those at C count.
    """
    C = trained.training_length
    slowest = 2 * math.pi / C if settings.variant == "by_parts" else math.inf
    return tuple(m for m, theta in enumerate(spectrum.at(C, C).inv_freq) if 0 < theta < slowest)


def apply(
    layout: Layout, chosen: Sequence[Chosen], settings: DopeSettings, config: ModelConfig
) -> Layout:
    """Return ``layout``, rescaled or not, without the bands that the chosen heads lose.

    Raises:
        ValueError: a layer already has an intervention.
    """
    layers = list(layout.layers)
    for index in {head.layer for head in chosen}:
        heads = {head.head: head for head in chosen if head.layer == index}
        encoding = layers[index].expanded(config.num_attention_heads)
        if settings.variant == "by_gaussian":
            # One seed per layer; otherwise all layers would have the same noise.
            seed = settings.seed * 1000 + index
            layers[index] = encoding.with_intervention(_noise(heads, config, seed))
        elif settings.removal == "zero":
            pairs = [len(spectrum.inv_freq) for spectrum in encoding.spectra]
            zeros = _zeros(heads, pairs, settings, config)
            layers[index] = layers[index].with_intervention(zeros)
        else:
            spectra = list(encoding.spectra)
            for h, head in heads.items():
                spectra[h] = _standing_still(spectra[h], head.bands)
            layers[index] = replace(encoding, spectra=tuple(spectra))
    return replace(layout, layers=tuple(layers))


def _noise(heads: Mapping[int, Chosen], config: ModelConfig, seed: int) -> Intervention:
    """Replace queries and keys by noise (Eq. 36 and 37)."""
    every = range(config.num_attention_heads)
    factors = tuple((float(h not in heads),) * config.head_size for h in every)
    query, key = (tuple(heads[h].noise[i] if h in heads else 0.0 for h in every) for i in (0, 1))
    return Intervention(factors, factors, query, key, seed)


def _zeros(
    heads: Mapping[int, Chosen], pairs: Sequence[int], settings: DopeSettings, config: ModelConfig
) -> Intervention:
    """Zero the bands in the queries: they then add nothing to scores, whatever the keys.

    ``pairs``: number of pairs of each query head.
    """
    rows = [[1.0] * config.head_size for _ in pairs]
    for h, head in heads.items():
        if settings.variant == "by_all":
            rows[h] = [0.0] * config.head_size
        else:
            for m in head.bands:
                rows[h][m] = rows[h][m + pairs[h]] = 0.0
    return Intervention(query=tuple(map(tuple, rows)))


def _standing_still(spectrum: Spectrum, bands: Sequence[int]) -> Spectrum:
    """Set the frequencies of the bands to zero; keep temperature and scale."""

    def still(inv_freq: Frequencies) -> Frequencies:
        return tuple(0.0 if m in bands else theta for m, theta in enumerate(inv_freq))

    long = spectrum.long and replace(spectrum.long, inv_freq=still(spectrum.long.inv_freq))
    return replace(spectrum, inv_freq=still(spectrum.inv_freq), long=long)
