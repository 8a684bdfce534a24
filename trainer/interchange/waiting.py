"""Query and key norms that a decoder has and does not use, since they wait for a drop."""

from __future__ import annotations

from trainer.positional.layout import Layout


def waits(name: str, layout: Layout) -> bool:
    """Whether a parameter is a query or key norm of a layer where these are off."""
    parts = name.split(".")
    return parts[-2] in ("q_norm", "k_norm") and not layout.layers[int(parts[1])].qk_norm
