"""The effect of spectra on a cluster of vectors, without weights or text: the model's spectra and
standard ones side by side (RoPE-ID Sec. 4, Fig. 7).

The cluster is one repeated vector, the tightest possible. All curves are in closed form, at any
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from trainer.analysis.arrays import Array, to_json
from trainer.analysis.studies.section import Grid, Picture, Rows, Section, long_rows
from trainer.analysis.studies.study import Study
from trainer.plotting.lines import Frame, Panel, Series, by_length
from trainer.plotting.style import style_numbers
from trainer.positional.encodings import make_spectrum
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
    """Compute the ratio from the Gram matrix of App. A.1, whose sums over positions are geometric
    series.

    Rotating a plane changes no singular value, so the vector is put on the first axis of each
    plane.
    """
    plus = _series(frequency[:, None] + frequency, n)
    minus = _series(frequency[:, None] - frequency, n)
    cos_cos, sin_sin = (minus + plus).real / 2, (minus - plus).real / 2
    sin_cos = (plus + minus).imag / 2
    gram = np.block([[cos_cos, sin_cos.T], [sin_cos, sin_sin]]) * np.outer(
        np.tile(size, 2), np.tile(size, 2)
    )
    return float(np.sqrt(np.linalg.eigvalsh(gram)[-1] / (n * (size @ size))))


def _series(frequency: Array, n: int) -> Array:
    """Sum exp(i j frequency) over j = 0 .. n - 1."""
    half = frequency / 2
    still = np.sin(half) == 0
    quotient = np.sin(n * half) / np.where(still, 1.0, np.sin(half))
    return np.exp(1j * (n - 1) * half) * np.where(still, float(n), quotient)


FURTHEST, OWN_SHOWN, PER_INTERVAL = 16, 2, 24
SETTLED = 0.03
"""Distance to its limit at which a ratio counts as having reached it."""


class SyntheticStudy(Study):
    """The two criteria of RoPE-ID for every spectrum: a lower bound that is not trivial, reached
    within the training length."""

    key: ClassVar[str] = "synthetic"
    title: ClassVar[str] = "Spectra in principle"

    def section(self) -> Section:
        """Write the section; reads neither the weights nor the text."""
        return synthetic_section(self.target.model.layout, self.target.model.config.head_size)


def synthetic_section(layout: Layout, head_dim: int) -> Section:
    """Write the section of a model with this layout and head dimension."""
    C = layout.training_length
    spectra = _model_spectra(layout) | standard_spectra(head_dim, C)
    furthest = FURTHEST * C
    quarters = {round(2 ** (i / 4)) for i in range(int(4 * np.log2(furthest)) + 1)}
    lengths = sorted({*quarters, C, furthest})
    distances, vector = _distances_between(lengths), np.ones(head_dim)
    ratios = {name: fsv_ratios(s, vector, lengths, C) for name, s in spectra.items()}
    decays = {name: decay(s, vector, distances, C) for name, s in spectra.items()}
    within = lengths.index(C)
    return Section(
        key=SyntheticStudy.key,
        title=SyntheticStudy.title,
        text=(
            "The tightest cloud there is: one vector of ones, repeated at every position. The "
            "share of its first singular value that the rotation leaves says how far any tight "
            "cloud of keys is dispersed in a text of that length, whatever the weights. RoPE-ID "
            "asks for two things: a lower bound that is not trivial, so that clusters stay apart, "
            "and that it is reached within the training length, so that a longer text is nothing "
            "new."
        ),
        formula=(
            "FSV ratio(n) = σ₁(R X) / σ₁(X),  X: n copies of v = (1, …, 1)",
            "decay(δ) = ⟨v, R^δ v⟩ / ⟨v, v⟩ = Σ_m ‖v_m‖² cos(δ ω_m) / ‖v‖²",
        ),
        source="RoPE-ID (Frayed RoPE and Long Inputs), Sec. 4, Fig. 7.",
        findings=tuple(
            _finding(name, spectra[name], (ratio[within], ratio[-1]), C, head_dim)
            for name, ratio in ratios.items()
        ),
        pictures=(_picture((lengths, ratios), (distances, decays), C),),
        grids=(_table(lengths, ratios, C),),
        numbers={
            "training_length": C,
            "head_dim": head_dim,
            "spectra": {name: list(s.inv_freq) for name, s in spectra.items()},
            "lengths": lengths,
            "distances": distances,
            "fsv_ratio": {name: to_json(ratio) for name, ratio in ratios.items()},
            "decay": {name: to_json(dots) for name, dots in decays.items()},
        },
    )


def _distances_between(lengths: Sequence[int]) -> list[int]:
    """Return distances between all neighbouring lengths, dense enough that means do not depend on
    phase."""
    inside = [np.linspace(a, b, PER_INTERVAL, endpoint=False) for a, b in pairwise(lengths)]
    return [0, *np.unique(np.concatenate(inside).astype(int)).tolist()]


def standard_spectra(head_dim: int, training_length: int) -> dict[str, Spectrum]:
    """Return the spectra of Fig. 7 that fit a model of this shape; a small model has fewer than
    four."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "RoPE": ("rope", {}),
        "HalfRoPE": ("half_rope", {}),
        "high frequency": ("high_frequency", {}),
        # 32 tokens, or an eighth of a short training length: the slowest pair has half of it.
        "RoPE-ID": ("rope_id", {"fastest_wavelength": min(32.0, max(2.0, training_length / 8))}),
    }
    if head_dim % 4:
        kinds = {name: kind for name, kind in kinds.items() if name in ("RoPE", "high frequency")}
    if training_length <= 8:
        kinds = {name: kind for name, kind in kinds.items() if name in ("RoPE", "HalfRoPE")}
    return {
        name: make_spectrum(kind, head_dim, training_length, arguments)
        for name, (kind, arguments) in kinds.items()
    }


def _model_spectra(layout: Layout) -> dict[str, Spectrum]:
    """Return the spectra that most heads of the model have, by name."""
    heads = [spectrum for layer in layout.layers for spectrum in layer.spectra]
    # Spectra that differ only in temperature or bias give the same curves.
    ordered = sorted(layout.spectra, key=lambda spectrum: -heads.count(spectrum))
    distinct = list({spectrum.inv_freq: spectrum for spectrum in reversed(ordered)}.values())[::-1]
    names = ["this model", *(f"this model, {i}" for i in range(2, OWN_SHOWN + 1))]
    return dict(zip(names, distinct, strict=False))


def limit(spectrum: Spectrum, head_dim: int) -> float:
    """Return the ratio in the limit of long texts (Lemma 1).

    Channels that do not rotate keep their share; of the others, which rotate at different speeds,
    no direction holds more than half a pair.
    """
    still = 1 - 2 * np.count_nonzero(spectrum.inv_freq) / head_dim
    return float(np.sqrt(max(still, 1 / head_dim)))


def _finding(
    name: str,
    spectrum: Spectrum,
    ratios: tuple[float, float],
    training_length: int,
    head_dim: int,
) -> str:
    """Describe the ratios at the training length and at the longest length."""
    if not spectrum.rotates:
        return f"{name}: nothing rotates, and nothing is dispersed at any length."
    within, furthest = ratios
    bound = limit(spectrum, head_dim)
    still = 2 * np.count_nonzero(spectrum.inv_freq) < head_dim
    attained = within <= bound + SETTLED
    return (
        f"{name}: {within:.2f} of the first singular value is left at {training_length:,} tokens "
        f"and {furthest:.2f} at {FURTHEST * training_length:,}. "
        + ("Channels that stand still keep" if still else "Every channel rotates, which leaves")
        + f" {bound:.2f} in the limit, "
        + ("reached within" if attained else "not reached within")
        + " the training length."
    )


Curves = tuple[Sequence[int], dict[str, Array]]
"""Lengths or distances, and the values of each spectrum there."""


def _picture(of_lengths: Curves, of_distances: Curves, trained: int) -> Picture:
    (lengths, fsv), (distances, dots) = of_lengths, of_distances
    styles = style_numbers(fsv)
    names = list(reversed(fsv))
    ratios = [
        Series(name, styles[name], lengths, fsv[name].tolist(), marked=False) for name in names
    ]
    products = [
        Series(name, styles[name], *_means(distances, dots[name], lengths), marked=False)
        for name in names
    ]
    panels = [
        Panel("first singular value", ratios, Frame("", "after / before the rotation")),
        Panel("dot product with itself", products, Frame("", "relative to distance 0")),
    ]
    rows: Rows = []
    for name in fsv:
        rows += long_rows({(name, "fsv_ratio"): fsv[name]}, places=lengths)
        rows += long_rows({(name, "decay"): dots[name]}, places=distances)
    return Picture(
        name="synthetic",
        figure=by_length(
            panels, x_label="length; distance (tokens)", trained=trained, columns=2, height=2.6
        ),
        caption=(
            "Left: first singular value of a repeated vector after the rotation over that before "
            "it, by the length of the text. Right: the vector's dot product with itself, by the "
            "distance in tokens, means over quarters of an octave. A curve that is flat to the "
            "right of the training length brings nothing new there; one that is high there keeps "
            "clusters apart."
        ),
        header=("spectrum", "measure", "tokens", "value"),
        rows=rows,
    )


def _means(
    distances: Sequence[int], dots: Array, edges: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Average distances and dot products between neighbouring lengths."""
    places = np.array(distances)
    bucket = np.searchsorted(edges, places, side="right")
    # The logarithmic axis has no 0.
    used = [i for i in np.unique(bucket) if i > 0]
    x, y = ([float(v[bucket == i].mean()) for i in used] for v in (places, dots))
    return x, y


def _table(lengths: Sequence[int], ratios: Mapping[str, Array], trained: int) -> Grid:
    places = [lengths.index(trained * f) for f in (1, 4, FURTHEST) if trained * f in lengths]
    return Grid(
        caption="Share of the first singular value that the rotation leaves.",
        header=("spectrum", *(f"{lengths[i]:,} tokens" for i in places)),
        rows=[(name, *(f"{r[i]:.3f}" for i in places)) for name, r in ratios.items()],
    )
