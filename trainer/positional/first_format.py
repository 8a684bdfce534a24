"""Layouts as the first version of this program stored them, in today's form.

There C stood in every spectrum, a layer named a spectrum for every head, and frequencies that
follow the length were stored as the name of a method.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainer.positional.rescaling import RESCALINGS


def from_first_format(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` themselves where they are of today's form."""
    if "training_length" in values:
        return values
    return {
        "training_length": values["spectra"][0]["training_length"],
        "spectra": [_spectrum(spectrum) for spectrum in values["spectra"]],
        "layers": [
            {**layer, "groups": [[index, 1] for index in layer["heads"]]}
            for layer in values["layers"]
        ],
    }


def _spectrum(values: dict[str, Any]) -> dict[str, Any]:
    length, long = values["training_length"], values.get("beyond")
    others = {
        key: value for key, value in values.items() if key not in ("training_length", "beyond")
    }
    if long is None:
        return others | {"long": None}
    changed = {"length": long["length"], "inv_freq": long["inv_freq"]}
    if long.get("growth"):
        method = RESCALINGS[long.get("rescaling", "ntk")]
        stretch = asdict(method(tuple(long["inv_freq"]), length))
        changed |= {"stretch": stretch, "growth": long["growth"], "reference": length}
    else:
        changed |= {"stretch": None, "growth": 1.0}
    return others | {"long": changed}
