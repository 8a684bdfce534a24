"""What went wrong while an arm trained, in words: a diverged run prints a loss like any other."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.report.results import Arm


def troubles(arms: Sequence[Arm]) -> list[str]:
    """A sentence for every thing that a reader of the numbers has to know; empty for sound runs."""
    return [f"{arm.name}: {trouble}" for arm in arms for trouble in _of(arm)]


def _of(arm: Arm) -> list[str]:
    found = []
    if arm.skipped:
        found.append(
            f"{arm.skipped:,} of {arm.steps:,} updates were left out, because their loss or "
            "gradient was not finite."
        )
    if arm.rewinds:
        times = "once" if arm.rewinds == 1 else f"{arm.rewinds} times"
        found.append(
            f"it diverged and went back to a checkpoint {times}, leaving out the samples since."
        )
    if not arm.finite:
        found.append(
            "the norm of its weights is not a finite number: it diverged, and its figures say "
            "nothing."
        )
    if arm.curve and arm.curve[-1][0] < arm.steps:
        found.append(
            f"its metrics.csv ends at step {arm.curve[-1][0]:,} of {arm.steps:,}, and with it its "
            "curve of the loss."
        )
    return found
