"""Held-out text of tokens in memory."""

from __future__ import annotations

import numpy as np

from trainer.data.corpus import HeldOutText
from trainer.data.prepared import Tokens


def held_out(*ids, weights=None):
    """Held-out text of parts with these tokens; by default of equal weights."""
    return HeldOutText(
        tuple(
            (weight, Tokens(np.asarray(tokens)))
            for weight, tokens in zip(weights or [1.0] * len(ids), ids, strict=True)
        )
    )
