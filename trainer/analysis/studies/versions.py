"""Which versions of queries and keys are worth showing: both, or one where nothing rotates."""

from __future__ import annotations

from trainer.analysis.studies.study import Target

Versions = dict[str, tuple[str, int]]
"""Field of a result: its label and its style in figures."""


def before(found: Versions) -> str:
    """Which queries and keys those are that no encoding has touched."""
    return "before the encoding" if "plain" in found else "as projected"


def versions(target: Target, *, scores: bool = False) -> Versions:
    """``plain`` and ``rotated``, or ``rotated`` alone where both are the same but for a factor.

    ``scores``: of what depends on a bias on the scores too.
    """
    if target.rotates:
        return {"plain": ("before rotation", 2), "rotated": ("after rotation", 4)}
    if scores and any(spectrum.alibi for spectrum in target.model.layout.spectra):
        return {"plain": ("without the bias", 2), "rotated": ("with ALiBi's bias", 4)}
    return {"rotated": ("as projected, no rotation", 1)}
