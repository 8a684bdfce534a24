"""The effect of a spectrum on a cluster of vectors, without a model (RoPE-ID Fig. 7).

The cluster is one repeated vector, the tightest possible; all is in closed form, at any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.analysis.averages import Array
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class SyntheticDecay:
    """``fsv_ratio``: first singular value of n rotated copies of a vector over that of n copies, by
    ``lengths`` n. ``dot``: dot product of the vector with itself so many tokens away over that at
    distance 0, by ``distances``."""

    lengths: list[int]
    fsv_ratio: Array
    distances: list[int]
    dot: Array


def synthetic_decay(
    spectrum: Spectrum,
    head_dim: int,
    lengths: Sequence[int],
    distances: Sequence[int],
    *,
    training_length: int,
    vector: Array | None = None,
) -> SyntheticDecay:
    """Both curves of Fig. 7 for one spectrum.

    Args:
        spectrum: the encoding; for every length or distance as it is in a sequence so long, without
            a factor on the rotated channels.
        head_dim: channels of the vector.
        lengths: n, at least 1.
        distances: in tokens, at least 0.
        training_length: C, for encodings that follow the length.
        vector: ``[head_dim]``; the paper's is all ones.
    """
    v = np.ones(head_dim) if vector is None else np.asarray(vector, dtype=np.float64)
    ratios = [_fsv_ratio(*_planes(spectrum.at(n, training_length), v), n) for n in lengths]
    dots = []
    for distance in distances:
        size, frequency = _planes(spectrum.at(distance + 1, training_length), v)
        dots.append(float(size**2 @ np.cos(frequency * distance) / (size @ size)))
    return SyntheticDecay(list(lengths), np.array(ratios), list(distances), np.array(dots))


def _planes(spectrum: Spectrum, vector: Array) -> tuple[Array, Array]:
    """Length of the vector in every plane and its frequency; all that stands still is one plane."""
    pairs = len(spectrum.inv_freq)
    size = np.hypot(vector[:pairs], vector[pairs : 2 * pairs])
    rest = np.linalg.norm(vector[2 * pairs :])
    return np.append(size, rest), np.append(spectrum.inv_freq, 0.0)


def _fsv_ratio(size: Array, frequency: Array, n: int) -> float:
    """From the Gram matrix of App. A.1, whose sums over positions are geometric series.

    Turning a plane changes no singular value, so the vector lies on the first axis of each.
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
    """Sum of exp(i j frequency) over j = 0 .. n - 1."""
    half = frequency / 2
    still = np.sin(half) == 0
    quotient = np.sin(n * half) / np.where(still, 1.0, np.sin(half))
    return np.exp(1j * (n - 1) * half) * np.where(still, float(n), quotient)
