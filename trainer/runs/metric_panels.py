"""Panels of metrics: the one list behind ``watch`` and the Weights & Biases workspace.

docs/dashboard.md explains every metric.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = "trainer/global_step"
"""Name that Lightning's logger gives the optimizer step."""
LENGTH = "evaluation/length"


@dataclass(frozen=True)
class Panel:
    """Lines of ``metrics``, and of all that match ``pattern``, against ``x``.

    Without ``x``: bars of the last values. ``rows``: height of each line in a terminal; 0: only the
    workspace shows them. ``whole``: whether values lie between 0 and 1, which the axis shows.
    """

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None
    x: str | None = STEP
    rows: int = 0
    whole: bool = False


DROP_LOSSES = "drop/loss_before", "drop/loss_after", "drop/loss_end"
RETRIEVAL, TEXT_LOSS = "length/retrieval_", "length/loss_"
"""Beginnings of the names of what is measured at several lengths while training."""

SECTIONS = {
    "Training": (
        Panel("Loss (nats per token)", ("loss",), rows=4),
        Panel("Learning rate", ("learning_rate",), rows=1),
        Panel("Gradient norm", ("gradient_norm",)),
        Panel("Tokens per second", ("tokens_per_second",)),
        Panel("Model FLOPs utilisation", ("mfu",)),
        Panel("Skipped steps", ("skipped_steps",)),
    ),
    "Drop": (
        Panel("Held-out loss around the drop (nats per token)", DROP_LOSSES, x=None),
        Panel("Phase", ("phase",)),
    ),
    "Length generalisation": (
        Panel(
            "Retrieval by length (fraction of trials)",
            pattern="evaluation/retrieval/.+",
            x=LENGTH,
        ),
        Panel("Loss by length (nats per token)", pattern="evaluation/loss/.+", x=LENGTH),
    ),
    "While training": (
        Panel(
            "Retrieval by length (fraction of trials)",
            pattern=f"{RETRIEVAL}.+",
            rows=2,
            whole=True,
        ),
        Panel("Loss by length (nats per token)", pattern=f"{TEXT_LOSS}.+", rows=1),
        Panel("Attention", pattern="probe/.+"),
    ),
    "System": (
        Panel(
            "Seconds of a step",
            ("time/data", "time/compute", "time/optimizer", "time/checkpoint", "time/monitor"),
        ),
        Panel("Peak memory (GiB)", ("memory",)),
    ),
}
"""Panels by section, in the order in which they are shown."""
