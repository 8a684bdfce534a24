"""Arrays over layers: stacking, means over heads, and conversion to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trainer.analysis.averages import Array
from trainer.analysis.pairs import of_pairs


def stacked(layers: Sequence[Tensor]) -> Array:
    """``[layers, H, n]`` of ``[H, n]`` each; NaN where a layer has fewer than another."""
    return of_pairs([layer.T for layer in layers]).mT.cpu().numpy()


def known(values: Array) -> Array:
    """The finite values, flattened."""
    return values[np.isfinite(values)]


def mean_over_heads(values: Array) -> Array:
    """``[layers, n]`` of ``[layers, H, n]``; NaN where no head has a number."""
    return np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)


def plain(values: Array) -> list[Any]:
    """Nested lists, of floats with six decimals and None for NaN."""
    found = (values.round(6) if values.dtype.kind == "f" else values).astype(object)
    found[~np.isfinite(values)] = None
    return found.tolist()
