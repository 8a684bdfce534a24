"""Effective length: up to which evaluated length a model keeps its score at the training length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.evaluation.statistics import Estimate

KEPT = 0.85
"""Share of the score at the training length that counts as kept (NoLiMa, Modarressi et al. 2025,
arXiv 2502.05167, which takes short texts for the training length)."""


@dataclass(frozen=True)
class EffectiveLength:
    """Longest evaluated length, in tokens, before the first one at which the score is not kept.

    ``length``: 0 if the score at the training length is at chance. ``is_limit``: whether a longer
    length was measured; otherwise the score is kept at every length, and the effective length may
    be longer.
    """

    length: int
    is_limit: bool = True

    @property
    def text(self) -> str:
        """``1024``; ``≥4096`` if it may be longer; ``none`` for chance."""
        return f"{'' if self.is_limit else '≥'}{self.length}" if self.length else "none"


def effective_length(
    scores: Mapping[int, Estimate | None], training_length: int, chance: float = 0.0
) -> EffectiveLength | None:
    """Return the longest n with S(m) >= 0.85 S(C) at all evaluated lengths m from C to n.

    As in RULER (Hsieh et al. 2024, arXiv 2404.06654, Sec. 4), the first length below the threshold
    ends the search, even if the score recovers later. Lengths below C do not count.

    Args:
        scores: estimate of S at every evaluated length, None if it was not measured there. The
            first such length beyond C ends the search too.
        training_length: C.
        chance: score of a guess. S(C) is at chance if its 95% interval reaches it.

    Returns:
        None if nothing can be said: S(C) was not measured, or no longer length was.
    """
    first = scores.get(training_length)
    longer = sorted(n for n in scores if n > training_length)
    if first is None or not longer or scores[longer[0]] is None:
        return None
    if first.low <= chance:
        return EffectiveLength(0)
    reached = training_length
    for length in longer:
        own = scores[length]
        if own is None:
            break
        # Scores are sums of rounded fractions: 0.85 * 1.0 and 0.85 itself may differ by 1e-16.
        if own.mean < KEPT * first.mean - 1e-12:
            return EffectiveLength(reached)
        reached = length
    return EffectiveLength(reached, is_limit=False)
