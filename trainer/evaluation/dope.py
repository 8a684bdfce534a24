"""DoPE: the rotary encoding is taken away from the heads of extreme matrix entropy, without any
training (Denoising Rotary Position Embedding, Sec. 4.3).

Heads are chosen on a text, among all layers together (Sec. 5.1), then a layout is changed for them;
any rescaling of the model's own will do. What the paper leaves open is a setting: it sorts both
ways, and by-all multiplies queries and keys by 0 (Eq. 35) where the text removes their encoding
"rather than completely zeroing out the head".
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.analysis.capture import Heads, capture
from trainer.analysis.matrix_entropy import matrix_entropy_of
from trainer.errors import UserError
from trainer.evaluation.interventions import require_rotation, with_intervention
from trainer.evaluation.settings import DopeSettings
from trainer.model.decoder import Decoder
from trainer.positional.intervention import Intervention
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class Chosen:
    """A head that was chosen.

    ``head``: its index among the key-value heads where they lose their rotation, else among the
    heads of the settings' side. ``bands``: the pairs it loses. ``noise``: standard deviation of
    what takes its place.
    """

    layer: int
    head: int
    score: float
    bands: tuple[int, ...]
    noise: float = 0.0


@dataclass(frozen=True)
class Selection:
    """The heads that were chosen, from the first on, and what one is made of: ``count`` heads a
    layer of that kind with ``head_dim`` channels each."""

    settings: DopeSettings
    heads: tuple[Chosen, ...] = ()
    count: int = 0
    head_dim: int = 0


def select(
    model: Decoder, ids: Tensor, settings: DopeSettings, layout: Layout | None = None
) -> Selection:
    """Choose heads on a text.

    Args:
        model: a decoder, with its layout as trained.
        ids: ``[B, T]`` texts, as long as those to come (Table 3).
        settings: which heads.
        layout: the rescaled layout; None: as trained.

    Raises:
        UserError: impossible settings, a model without rotation, or one with fewer heads that
            rotate.
    """
    trained = model.layout
    if problems := settings.problems():
        raise UserError(*problems)
    require_rotation(trained, "evaluation.dope")
    rotating = _rotating(model, settings)
    if settings.heads > len(rotating):
        kind = "key-value" if settings.unrotates else settings.by
        raise UserError(
            f"evaluation.dope.heads: expected at most {len(rotating)}, the {kind} heads that "
            f"rotate, got {settings.heads}."
        )
    if not settings.heads:
        return Selection(settings)
    scores: list[Tensor] = []
    moments: list[Tensor] = []

    def on_layer(heads: Heads) -> None:
        entropies = matrix_entropy_of(heads, settings.by, settings.stage, trained)
        by_rank = settings.entropy == "trunc"
        found = entropies.effective_rank(settings.r) if by_rank else entropies.band_mean
        if settings.unrotates:
            found = found.unflatten(0, (heads.k.shape[1], -1)).mean(dim=-1)
        scores.append(found)
        if settings.variant == "by_gaussian":
            x = heads.rotated_q if settings.by == "query" else heads.rotated_k
            var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
            moments.append(torch.stack([mean, var + mean.square()]).double())

    with model.using(layout or trained):
        capture(model, ids, on_layer)
    table = torch.stack(scores).tolist()
    sign = 1 if settings.order == "ascending" else -1
    ranked = sorted(rotating, key=lambda place: sign * table[place[0]][place[1]])
    chosen = ranked[: settings.heads]
    retained = set(rotating) - set(chosen)
    noise = _noise(torch.stack(moments).cpu(), retained) if moments else [0.0] * len(table)
    count = len(table[0])
    heads = []
    for layer, head in chosen:
        spectrum = _spectrum(trained.layers[layer], head, count)
        bands = _lost_bands(spectrum, trained.training_length, settings)
        heads.append(Chosen(layer, head, table[layer][head], bands, noise[layer]))
    return Selection(settings, tuple(heads), count, model.config.head_size)


def _rotating(model: Decoder, settings: DopeSettings) -> list[tuple[int, int]]:
    """(layer, head) of the heads with a rotation that they can lose."""
    count = model.config.num_key_value_heads
    if settings.by == "query" and not settings.unrotates:
        count = model.config.num_attention_heads
    return [
        (layer, head)
        for layer, encoding in enumerate(model.layout.layers)
        for head in range(count)
        if _spectrum(encoding, head, count).rotates
    ]


def _spectrum(encoding: LayerEncoding, head: int, count: int) -> Spectrum:
    """Of one out of ``count`` query or key heads."""
    return encoding.spectra[head // (count // len(encoding.spectra))]


def _lost_bands(
    spectrum: Spectrum, training_length: int, settings: DopeSettings
) -> tuple[int, ...]:
    """Pairs, by their frequencies as trained: by them a band is new beyond the training length,
    and a rescaling changes nothing about which."""
    slowest = math.inf
    if settings.variant == "by_parts":
        slowest = 2 * math.pi / training_length
    return tuple(m for m, theta in enumerate(spectrum.inv_freq) if 0 < theta < slowest)


def _noise(moments: Tensor, retained: set[tuple[int, int]]) -> list[float]:
    """Standard deviations, a layer each, of the retained heads' components.

    ``moments``: means and mean squares, ``[L, 2, H]``. A layer that retains none has that of the
    model; a model that retains none, that of all its heads.
    """
    kept = torch.zeros(moments.shape[0], moments.shape[2], dtype=torch.bool)
    for place in retained:
        kept[place] = True

    def deviation(mean: Tensor, square: Tensor) -> float:
        return math.sqrt(max(0.0, float(square.mean() - mean.mean() ** 2)))

    mean, square = moments[:, 0], moments[:, 1]
    of_model = deviation(mean[kept], square[kept]) if retained else deviation(mean, square)
    return [
        deviation(m[k], s[k]) if k.any() else of_model
        for m, s, k in zip(mean, square, kept, strict=True)
    ]


def apply(layout: Layout, selection: Selection) -> Layout:
    """``layout``, rescaled or not, without what the chosen heads lose; itself where none is chosen.

    Raises:
        ValueError: a layer has an intervention already.
    """
    by_layer: dict[int, list[Chosen]] = defaultdict(list)
    for head in selection.heads:
        by_layer[head.layer].append(head)
    if not by_layer:
        return layout
    change = _unrotated if selection.settings.unrotates else _intervened
    changed = (
        change(encoding, by_layer[index], selection) if index in by_layer else encoding
        for index, encoding in enumerate(layout.layers)
    )
    return replace(layout, layers=tuple(changed))


def _unrotated(encoding: LayerEncoding, chosen: list[Chosen], _: Selection) -> LayerEncoding:
    spectra = list(encoding.spectra)
    for head in chosen:
        spectra[head.head] = _standing_still(spectra[head.head], head.bands)
    return replace(encoding, groups=tuple((spectrum, 1) for spectrum in spectra))


def _standing_still(spectrum: Spectrum, bands: tuple[int, ...]) -> Spectrum:
    """With the temperature and the scale of the pairs as they were."""

    def still(inv_freq: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(0.0 if m in bands else theta for m, theta in enumerate(inv_freq))

    long = spectrum.long
    if long is not None:
        long = replace(long, inv_freq=still(long.inv_freq))
    return replace(spectrum, inv_freq=still(spectrum.inv_freq), long=long)


def _intervened(
    encoding: LayerEncoding, chosen: list[Chosen], selection: Selection
) -> LayerEncoding:
    settings, channels = selection.settings, range(selection.head_dim)
    rows = [(1.0,) * len(channels)] * selection.count
    noise = [0.0] * selection.count
    for head in chosen:
        lost = set(channels)
        if settings.variant == "by_parts":
            pairs = len(_spectrum(encoding, head.head, selection.count).inv_freq)
            lost = {channel for m in head.bands for channel in (m, m + pairs)}
        rows[head.head] = tuple(0.0 if channel in lost else 1.0 for channel in channels)
        noise[head.head] = head.noise
    factors = tuple(rows)
    deviations = tuple(noise) if settings.variant == "by_gaussian" else ()
    # A seed for every layer, or all would have one noise.
    seed = settings.seed * 1000 + chosen[0].layer
    if settings.by == "query":
        intervention = Intervention(query=factors, query_noise=deviations, seed=seed)
    else:
        intervention = Intervention(key=factors, key_noise=deviations, seed=seed)
    return with_intervention(encoding, intervention)
