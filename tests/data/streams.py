"""Held-out text of tokens in memory."""

from __future__ import annotations

import numpy as np

from trainer.data.corpus import HeldOutPart, HeldOutText
from trainer.data.prepared import Tokens


def held_out(*ids, weights=None, name="test"):
    """Held-out text of parts a, b, ... with these tokens; by default of equal weights."""
    parts = zip("abcdef", weights or [1.0] * len(ids), ids, strict=False)
    return HeldOutText(
        name, tuple(HeldOutPart(part, w, Tokens(np.asarray(x))) for part, w, x in parts)
    )
