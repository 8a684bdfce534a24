"""Shape and layout from the ``config.json`` of a model exported with custom code.

The file contains our layout unchanged. The code beside it is for transformers and never run here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from trainer.errors import UserError
from trainer.formats import adapter
from trainer.interchange.hf_config import malformed
from trainer.model.config import ModelConfig, QKNormConfig, SoftmaxConfig
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import Layout
from trainer.positional.stored_layout import read_layout

OWN = "UnropeForCausalLM"
"""The architecture that such files name."""
CODE_VERSION = 2
"""Version of the code in ``export/custom``.

2: knows the key-value cache by both names (``past_key_values``, and ``cache`` from transformers
5.24 on) and refuses unknown arguments. The first version, which files do not name, ignores them.
"""
_KINDS, _TARGETS = ("per_head", "full"), ("both", "q", "k")


def is_own(values: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` belongs to a model exported with custom code."""
    return values.get("architectures") == [OWN]


def code_remark(values: Mapping[str, Any], given: str) -> str | None:
    """Return a remark about an export whose code is older than this program's, or None.

    Args:
        values: contents of its ``config.json``.
        given: its directory, as the user named it.
    """
    version = values.get("code_version", 1)
    if not is_own(values) or version == CODE_VERSION:
        return None
    if type(version) is not int or version > CODE_VERSION:
        return (
            f"{given}: config.json: code_version is {version!r}, and this program writes "
            f"{CODE_VERSION}; the code in that directory may compute something else than this "
            "program does with its weights."
        )
    return (
        f"The code in {given!r} is of an earlier version, which generates wrong text under "
        "transformers 5.24 or newer without an error. Export it again: "
        f"python -m trainer export checkpoint={given} to=DIRECTORY"
    )


def from_own_config(values: Mapping[str, Any], name: str) -> tuple[ModelConfig, Layout]:
    """Return shape and layout; the inverse of what an export writes.

    Args:
        values: contents of ``config.json``.
        name: how errors call the file.

    Raises:
        UserError: keys are missing, wrong, or contradict each other.
    """
    problems = malformed(values)
    problems += [
        f"{key}: expected {' or '.join(map(repr, allowed))}, got {values.get(key)!r}."
        for key, allowed in (
            ("qkv_bias", (True, False)),
            ("qk_norm_kind", _KINDS),
            ("qk_norm_targets", _TARGETS),
        )
        if values.get(key) not in allowed
    ]
    if problems:
        raise UserError(*(f"{name}: {problem}" for problem in problems))
    config = ModelConfig(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_dim=values.get("head_dim"),
        vocab_size=values["vocab_size"],
        rms_norm_eps=1e-5 if (eps := values.get("rms_norm_eps")) is None else eps,
        tie_word_embeddings=values.get("tie_word_embeddings") or False,
        qkv_bias=values["qkv_bias"],
        softmax=_softmax(values.get("softmax"), name),
        qk_norm=QKNormConfig("never", values["qk_norm_kind"], values["qk_norm_targets"]),
    )
    if problems := config.problems():
        raise UserError(*(f"{name}: {p.removeprefix('model.')}" for p in problems))
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_size
    try:
        layout = read_layout(values.get("layout"), *shape)
    except ValueError as error:
        raise UserError(f"{name}: {error}.") from None
    _check_slopes(values.get("alibi_slopes"), config, layout, name)
    norms = {layer.qk_norm for layer in layout.layers}
    # Norms in some layers only: the other layers get theirs at a later drop.
    when: Literal["never", "always", "after_drop"]
    when = "never" if norms == {False} else "always" if norms == {True} else "after_drop"
    return replace(config, qk_norm=replace(config.qk_norm, when=when)), layout


def _softmax(given: Any, name: str) -> SoftmaxConfig:
    """Read the softmax settings; files of earlier versions have none."""
    known = [field.name for field in fields(SoftmaxConfig)]
    try:
        if isinstance(given, dict) and given.keys() - set(known):
            raise ValueError
        return adapter(SoftmaxConfig).validate_python(given or {})
    except ValueError:
        raise UserError(f"{name}: softmax: expected {', '.join(known)}, got {given!r}.") from None


def _check_slopes(given: Any, config: ModelConfig, layout: Layout, name: str) -> None:
    ours = alibi_slopes(config.num_attention_heads)
    fits = (
        isinstance(given, list)
        and len(given) == len(ours)
        and all(
            isinstance(x, float) and math.isclose(x, y) for x, y in zip(given, ours, strict=True)
        )
    )
    if any(spectrum.alibi for spectrum in layout.spectra) and not fits:
        raise UserError(
            f"{name}: alibi_slopes: expected those of ALiBi for {len(ours)} heads, got {given!r}."
        )
