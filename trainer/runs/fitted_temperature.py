"""Softmax temperature fitted by an evaluation, stored in ``temperature.json`` of a checkpoint.

`generate` and `export` use it; an evaluation fits its own. Logits are multiplied by
1 + ``coefficient`` ln s, with s = max(n, C) / C (DroPE, App. C.2). The file holds ``coefficient``,
C as ``training_length``, ``per`` (whether n is the length of the "sequence" or the number of keys
that a "query" sees), the tempered ``layers`` (null: all), and the ``lengths``, ``text`` and number
of ``tokens`` of the fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomically
from trainer.positional.layout import Layout

FILE = "temperature.json"


def keep_temperature(checkpoint: Path, fitted: dict[str, Any]) -> float | None:
    """Store a fit with a checkpoint, unless the stored one was fitted on more text.

    Returns the coefficient of that better fit, or None if this one was stored.
    """
    path = checkpoint / FILE
    if path.is_file() and (older := json.loads(path.read_bytes()))["tokens"] > fitted["tokens"]:
        return older["coefficient"]
    write_atomically(path, json.dumps(fitted, indent=1) + "\n")
    return None


def with_fitted_temperature(layout: Layout, checkpoint: Path) -> tuple[Layout, str]:
    """Return the layout with the checkpoint's fitted temperature, and its description.

    The layout is returned unchanged without a stored temperature, and if the model was trained with
    logits that depend on the length.
    """
    path = checkpoint / FILE
    fitted: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    if not fitted.get("coefficient") or layout.has_trained_temperature:
        return layout, ""
    C, layers = fitted.get("training_length", layout.training_length), fitted.get("layers")
    changed = layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=fitted["coefficient"],
            exponent=1.0,
            per=fitted["per"],
            reference=None if layout.training_length == C else C,
            steps=False,
        ),
        layers,
    )
    words = f", logits times 1 + {fitted['coefficient']:.3g} ln(n / {C}) beyond"
    if layers is not None:
        words += f" in layers {', '.join(map(str, layers))}"
    return changed, words
