"""Check that a server's own attention can compute an Unrope model."""

from __future__ import annotations

from typing import Any


def follows_length(spectra: list[dict[str, Any]]) -> bool:
    """Return whether any encoding depends on the length of the sequence."""
    return any(
        spectrum["long"] is not None
        or (spectrum["temperature"]["coefficient"] and spectrum["temperature"]["per"] != "query")
        for spectrum in spectra
    )


def serving_problem(values: dict[str, Any]) -> str | None:
    """Return why a server with an attention of its own (vLLM, SGLang) cannot compute the model.

    Such a server joins sequences of several users in one, masks by itself and has its own head, so
    that only what happens to a query, a key or a hidden state alone reaches the model's code.

    Args:
        values: the keys of ``config.json``.

    Returns:
        One clause, or None if it can.
    """
    layout, softmax = values["layout"], values.get("softmax") or {}
    windows = [layer["window"] for layer in layout["layers"]]
    spectra = layout["spectra"]
    reasons = {
        "it has no ALiBi": any(spectrum["alibi"] for spectrum in spectra),
        "it has no learned attention sinks": softmax.get("sinks"),
        "it has no soft-caps": softmax.get("softcap") or softmax.get("final_softcap"),
        "it does not tell the model how long each sequence is": follows_length(spectra),
        "it has one size of sliding windows": len({*windows} - {None}) > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
