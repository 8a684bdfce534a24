"""DoPE: remove the rotary encoding of heads with extreme matrix entropy, without training.

Source: Denoising Rotary Position Embedding, Sec. 4.3. Heads are chosen on a text, among all layers
together (Sec. 5.1), and the layout is changed for them, on top of any rescaling. A head is a query
head with a copy of the keys that it reads. Settings resolve the paper's ambiguities: it sorts both
ways, and by-all multiplies queries and keys by 0 (Eq. 35), while the text removes their encoding
"rather than completely zeroing out the head".
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.analysis.attention import Heads, Side, capture, pair_counts
from trainer.analysis.matrix_entropy import MatrixEntropy, at_stage, gram, matrix_entropy
from trainer.common.errors import UserError
from trainer.config import DopeSettings
from trainer.model.language_model import LanguageModel
from trainer.positional.intervention import Factors, Intervention
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class Chosen:
    """A chosen head.

    ``head``: its index among the layer's query heads. ``bands``: pairs that it loses. ``noise``:
    standard deviations of the noise that replaces its queries and keys.
    """

    layer: int
    head: int
    score: float
    bands: tuple[int, ...]
    noise: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Selection:
    """Chosen heads, in order, of a model with ``queries`` query heads per layer of ``head_dim``
    channels."""

    settings: DopeSettings
    heads: tuple[Chosen, ...] = ()
    queries: int = 0
    head_dim: int = 0

    @property
    def words(self) -> str:
        """The heads in words, in order: L for the layer, H for a query head."""
        return ", ".join(f"L{head.layer}H{head.head}" for head in self.heads) or "no head"


def select(
    model: LanguageModel, ids: Tensor, settings: DopeSettings, layout: Layout | None = None
) -> Selection:
    """Choose heads on texts ``[B, T]``; evaluated texts may have another length (Table 3).

    ``model`` has its layout as trained; ``layout``: the rescaled one, if any.
    """
    trained, config = model.layout, model.config
    count = config.num_attention_heads
    places = ((i, h) for i in range(len(trained.layers)) for h in range(count))
    rotating = [(i, h) for i, h in places if spectrum_of(trained.layers[i], h, count).rotates]
    grams: dict[int, Tensor] = {}
    pairs: dict[int, tuple[int, ...]] = {}
    moments: dict[int, Tensor] = {}

    def on_layer(heads: Heads) -> None:
        layer, queries = heads.layer, heads.q.shape[1]
        grams[layer] = grams.get(layer, 0) + _grams(heads, settings, trained).cpu()
        pairs[layer] = pair_counts(heads.encoding, queries, heads.q.shape[-1])
        if settings.variant == "by_gaussian" and settings.sigma is None:
            moments[layer] = moments.get(layer, 0) + _moments(heads).cpu() / len(ids)

    with model.using(layout or trained):
        for text in ids:  # one at a time: all together would need the memory of all
            capture(model, text[None], on_layer)
    entropies = (matrix_entropy(grams[layer], pairs[layer]) for layer in sorted(grams))
    table = torch.stack([_scores(each, settings) for each in entropies]).tolist()
    sign = 1 if settings.order == "ascending" else -1
    ranked = sorted(rotating, key=lambda place: sign * table[place[0]][place[1]])
    chosen = ranked[: settings.heads]
    sigma = settings.sigma or 0.0
    noise = [(sigma, sigma)] * len(table)
    if moments:
        retained = set(rotating) - set(chosen)
        noise = [
            _noise(moments[i], [(i, h) in retained for h in range(count)]) for i in sorted(moments)
        ]
    heads = []
    for layer, head in chosen:
        spectrum = spectrum_of(trained.layers[layer], head, count)
        bands = _lost_bands(spectrum, trained.training_length, settings)
        heads.append(Chosen(layer, head, table[layer][head], bands, noise[layer]))
    return Selection(settings, tuple(heads), count, config.head_size)


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


def _lost_bands(
    spectrum: Spectrum, training_length: int, settings: DopeSettings
) -> tuple[int, ...]:
    """Return the pairs to remove, chosen by their frequencies as trained.

    A band is untrained beyond the training length by its trained frequency, whatever the rescaling.
    C is the longest training length; if frequencies depend on the length, those at C count.
    """
    slowest = 2 * math.pi / training_length if settings.variant == "by_parts" else math.inf
    trained = spectrum.at(training_length, training_length).inv_freq
    return tuple(m for m, theta in enumerate(trained) if 0 < theta < slowest)


def _noise(moments: Tensor, is_retained: list[bool]) -> tuple[float, float]:
    """Return the standard deviations of the query and key components of a layer's retained heads.

    ``moments``: means and mean squares, ``[2, 2, H]``. A layer without retained heads gets the
    value over all its heads.
    """
    if any(is_retained):
        moments = moments[..., is_retained]
    mean, square = moments.mean(dim=-1).unbind(dim=1)
    query, key = (square - mean.square()).clamp(min=0).sqrt().tolist()
    return query, key


def spectrum_of(encoding: LayerEncoding, head: int, count: int) -> Spectrum:
    """Return the spectrum of query head ``head`` out of ``count``."""
    return encoding.spectra[head // (count // len(encoding.spectra))]


def apply(layout: Layout, selection: Selection) -> Layout:
    """Return ``layout``, rescaled or not, without the bands that the chosen heads lose.

    Raises:
        ValueError: a layer already has an intervention.
    """
    by_layer: dict[int, list[Chosen]] = defaultdict(list)
    for head in selection.heads:
        by_layer[head.layer].append(head)
    if not by_layer:
        return layout
    changed = (
        _changed(encoding, by_layer[index], selection) if index in by_layer else encoding
        for index, encoding in enumerate(layout.layers)
    )
    return replace(layout, layers=tuple(changed))


def _changed(encoding: LayerEncoding, chosen: list[Chosen], selection: Selection) -> LayerEncoding:
    settings, queries = selection.settings, selection.queries
    if settings.variant != "by_gaussian" and settings.removal == "zero":
        return _zeroed(encoding, chosen, selection)
    encoding = encoding.expanded(queries // len(encoding.spectra))
    if settings.variant == "by_gaussian":
        return _noised(encoding, chosen, selection)
    spectra = list(encoding.spectra)
    for head in chosen:
        spectra[head.head] = _standing_still(spectra[head.head], head.bands)
    return replace(encoding, spectra=tuple(spectra))


def _standing_still(spectrum: Spectrum, bands: tuple[int, ...]) -> Spectrum:
    """Set the frequencies of ``bands`` to zero; keep temperature and scale."""

    def still(inv_freq: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(0.0 if m in bands else theta for m, theta in enumerate(inv_freq))

    long = spectrum.long and replace(spectrum.long, inv_freq=still(spectrum.long.inv_freq))
    return replace(spectrum, inv_freq=still(spectrum.inv_freq), long=long)


def _zeroed(encoding: LayerEncoding, chosen: list[Chosen], selection: Selection) -> LayerEncoding:
    """Zero the bands in the queries: they then add nothing to scores, whatever the keys."""
    by_query = {head.head: head for head in chosen}

    def row(head: int) -> tuple[float, ...]:
        if head not in by_query:
            return (1.0,) * selection.head_dim
        pairs = len(spectrum_of(encoding, head, selection.queries).inv_freq)
        lost = {channel for m in by_query[head].bands for channel in (m, m + pairs)}
        whole = selection.settings.variant == "by_all"
        return tuple(float(not whole and c not in lost) for c in range(selection.head_dim))

    rows = tuple(row(head) for head in range(selection.queries))
    return encoding.with_intervention(Intervention(query=rows))


def _noised(encoding: LayerEncoding, chosen: list[Chosen], selection: Selection) -> LayerEncoding:
    """Replace queries and keys by noise (Eq. 36 and 37)."""
    by_query = {head.head: head for head in chosen}
    copies = selection.queries // len(encoding.spectra)

    def rows(places: range, side: int) -> tuple[Factors, tuple[float, ...]]:
        heads = [by_query.get(head) for head in places]
        factors = tuple((float(head is None),) * selection.head_dim for head in heads)
        return factors, tuple(head.noise[side] if head else 0.0 for head in heads)

    query, query_noise = rows(range(selection.queries), 0)
    key, key_noise = rows(range(0, selection.queries, copies), 1)
    # One seed per layer; otherwise all layers would have the same noise.
    seed = selection.settings.seed * 1000 + chosen[0].layer
    intervention = Intervention(query, key, query_noise, key_noise, seed)
    return encoding.with_intervention(intervention)
