"""How stable the angles of rotary pairs are, as a picture and in words."""

from __future__ import annotations

import numpy as np

from trainer.analysis.angle_stability import COLUMNS, Stability
from trainer.analysis.studies.offset_figures import radius_and_variance
from trainer.analysis.studies.section import Picture

LONG = 0.9
"""Quantile of the radii from which on a mean is called long."""


def stable_angles(found: Stability) -> Picture:
    """Circular variance by radius, of queries and of keys (Rotary Offset Features, Fig. 2)."""
    return Picture(
        "offset_angle_stability",
        radius_and_variance(found.radius, found.variance, found.of_keys),
        "How much the angle of a rotary pair varies over all positions, before the rotation, by "
        "the radius of its mean: 0 where it never does, 1 where angles cancel. Pairs with long "
        "means should lie below.",
        COLUMNS,
        list(zip(*(getattr(found, name).tolist() for name in COLUMNS), strict=True)),
    )


def steadier(found: Stability) -> list[str]:
    """The angles of the tenth of the pairs with the longest means beside the others'."""
    text = []
    for name, of in (("queries", ~found.of_keys), ("keys", found.of_keys)):
        radius, variance = found.radius[of], found.variance[of]
        long = radius > np.quantile(radius, LONG)
        if long.any():
            a, b = np.median(variance[long]), np.median(variance[~long])
            text.append(
                f"The tenth of the pairs of {name} with the longest means has a median circular "
                f"variance of {a:.2f}, the others {b:.2f}."
            )
    return text
