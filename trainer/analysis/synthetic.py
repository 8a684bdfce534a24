"""The effect of spectra on a cluster of vectors, without weights or text: the model's spectra and
standard ones side by side (RoPE-ID Sec. 4, Fig. 7).

The cluster is one repeated vector. All curves are in closed form.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pandas as pd

from trainer.analysis.attention import Array
from trainer.analysis.results import Findings, analysis, tidy
from trainer.analysis.target import Target
from trainer.plotting import Grid, Line, Panel, Plot, draw, style_numbers
from trainer.positional.encodings import half_rope, high_frequency, rope, rope_id
from trainer.positional.layout import Layout
from trainer.positional.spectrum import Spectrum


def fsv_ratios(
    spectrum: Spectrum, vector: Array, lengths: Sequence[int], training_length: int
) -> Array:
    """Compute the ratio of the first singular values of n rotated and n unrotated copies of
    ``vector`` ``[head_dim]``, for each length n (Fig. 7).

    Each length uses the frequencies of a sequence of that length, without temperature or gains.
    ``training_length``: C, for encodings whose frequencies follow the length.
    """
    ratios = [_fsv_ratio(*_planes(spectrum.at(n, training_length), vector), n) for n in lengths]
    return np.array(ratios)


def decay(
    spectrum: Spectrum, vector: Array, distances: Sequence[int], training_length: int
) -> Array:
    """Compute the dot product of ``vector`` with itself that many tokens away, divided by its value
    at distance 0; frequencies as in :func:`fsv_ratios`."""
    dots = []
    for distance in distances:
        size, frequency = _planes(spectrum.at(distance + 1, training_length), vector)
        dots.append(float(size**2 @ np.cos(frequency * distance) / (size @ size)))
    return np.array(dots)


def _planes(spectrum: Spectrum, vector: Array) -> tuple[Array, Array]:
    """Return the vector's length in every plane and the plane's frequency; all channels that do not
    rotate share one plane."""
    pairs = len(spectrum.inv_freq)
    size = np.hypot(vector[:pairs], vector[pairs : 2 * pairs])
    still = np.linalg.norm(vector[2 * pairs :])
    return np.append(size, still), np.append(spectrum.inv_freq, 0.0)


def _fsv_ratio(size: Array, frequency: Array, n: int) -> float:
    """Compute the ratio from the Gram matrix of App. A.1, whose sums are geometric series."""
    # Rotating a plane changes no singular value: the vector is on the first axis of each plane.
    plus = _series(frequency[:, None] + frequency, n)
    minus = _series(frequency[:, None] - frequency, n)
    cos_cos, sin_sin = (minus + plus).real / 2, (minus - plus).real / 2
    sin_cos = (plus + minus).imag / 2
    sizes = np.tile(size, 2)
    gram = np.block([[cos_cos, sin_cos.T], [sin_cos, sin_sin]]) * np.outer(sizes, sizes)
    return float(np.sqrt(np.linalg.eigvalsh(gram)[-1] / (n * (size @ size))))


def _series(frequency: Array, n: int) -> Array:
    """Sum exp(i j frequency) over j = 0 .. n - 1; sines near whole turns would lack digits."""
    turns = frequency / (2 * np.pi)
    half = np.pi * (turns - np.round(turns))
    still = half == 0
    quotient = np.sin(n * half) / np.where(still, 1.0, np.sin(half))
    return np.exp(1j * (n - 1) * half) * np.where(still, float(n), quotient)


FURTHEST = 16
"""Longest length in training lengths."""
PER_INTERVAL = 24
"""Number of distances between two neighbouring lengths."""


@analysis("synthetic", "Spectra in principle")
def analyze_synthetic(target: Target) -> Findings:
    """Measure the two criteria of RoPE-ID for every spectrum: a lower bound that is not trivial,
    reached within the training length. Reads neither the weights nor the text."""
    layout = target.model.layout
    head_dim = target.model.config.head_size
    C = layout.training_length
    standard, notes = standard_spectra(head_dim, C)
    spectra = _model_spectra(layout) | standard
    furthest = FURTHEST * C
    quarters = {round(2 ** (i / 4)) for i in range(int(4 * np.log2(furthest)) + 1)}
    lengths = sorted({*quarters, C, furthest})
    inside = [np.linspace(a, b, PER_INTERVAL, endpoint=False) for a, b in pairwise(lengths)]
    distances = [0, *np.unique(np.concatenate(inside).astype(int)).tolist()]
    vector = np.ones(head_dim)
    ratios = {name: fsv_ratios(s, vector, lengths, C) for name, s in spectra.items()}
    decays = {name: decay(s, vector, distances, C) for name, s in spectra.items()}
    tables, of_lengths, of_distances = [], [], []
    for name, spectrum in spectra.items():
        tables += [
            tidy({"fsv_ratio": ratios[name]}, "length", places={"length": lengths}, variant=name),
            tidy({"decay": decays[name]}, "length", places={"length": distances}, variant=name),
            tidy({"fsv_limit": limit(spectrum.at(furthest, C), head_dim)}, variant=name),
        ]
    for name, style in reversed(style_numbers(spectra).items()):
        of_lengths.append(Line(name, style, lengths, ratios[name].tolist()))
        of_distances.append(mean_line(name, style, distances, decays[name], lengths))
    panels = [
        Panel("first singular value", of_lengths, y="after / before the rotation"),
        Panel("dot product with itself", of_distances, y="relative to distance 0"),
    ]
    plot = Plot(
        "synthetic",
        draw(panels, Grid(2, 2.6, x="length; distance (tokens)"), trained=C),
        "One repeated vector of ones under each spectrum: first singular value by the length of "
        "the text, dot product by distance (RoPE-ID, Sec. 4, Fig. 7).",
    )
    return Findings([plot], tables, notes)


def standard_spectra(head_dim: int, training_length: int) -> tuple[dict[str, Spectrum], list[str]]:
    """Return the spectra of Fig. 7 that fit a model of this shape, and a sentence on each that does
    not."""
    # The fastest pair's wavelength is 32 tokens, or C / 8 if C is short; the slowest's is C / 2.
    fastest = min(32.0, max(2.0, training_length / 8))
    kinds = {
        "RoPE": partial(rope, head_dim),
        "HalfRoPE": partial(half_rope, head_dim),
        "high frequency": partial(high_frequency, head_dim, training_length),
        "RoPE-ID": partial(rope_id, head_dim, training_length, fastest_wavelength=fastest),
    }
    spectra = {}
    notes = []
    for name, make in kinds.items():
        try:
            spectra[name] = make()
        except ValueError as error:
            notes.append(f"{name} does not fit this model: {error}")
    return spectra, notes


def _model_spectra(layout: Layout) -> dict[str, Spectrum]:
    """Return the two spectra that most heads of the model have, by name."""
    # Spectra that differ only in temperature or bias give the same curves.
    heads = [*chain.from_iterable(layer.spectra for layer in layout.layers)]
    first = {(spectrum.inv_freq, spectrum.long): spectrum for spectrum in reversed(heads)}
    most = Counter((spectrum.inv_freq, spectrum.long) for spectrum in heads).most_common(2)
    names = ("this model", "this model, 2")
    return {name: first[frequencies] for name, (frequencies, _) in zip(names, most, strict=False)}


def limit(spectrum: Spectrum, head_dim: int) -> float:
    """Return the ratio that fixed frequencies approach in long texts (Lemma 1)."""
    still = 1 - 2 * np.count_nonzero(spectrum.inv_freq) / head_dim
    return float(np.sqrt(max(still, 1 / head_dim)))


def mean_line(
    name: str, style: int, distances: Sequence[int], dots: Array, edges: Sequence[int]
) -> Line:
    """Return a line through means of distances and dot products between neighbouring lengths."""
    buckets = np.searchsorted(edges, distances, side="right")
    means = pd.DataFrame({"x": distances, "y": dots}).groupby(buckets).mean()
    means = means.drop(index=0)  # the logarithmic axis has no 0
    return Line(name, style, means.x.tolist(), means.y.tolist())
