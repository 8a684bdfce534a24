"""Shape and layout from the ``config.json`` of a model exported with custom code.

The file contains our layout unchanged. The code beside it is for transformers and never run here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from trainer.common.errors import Problem, UserError
from trainer.common.validation import validated
from trainer.interchange.hf_config import malformed
from trainer.model.config import ModelConfig
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
        Problem(key, f"expected {' or '.join(map(repr, allowed))}, got {values.get(key)!r}.")
        for key, allowed in (
            ("qkv_bias", (True, False)),
            ("qk_norm_kind", _KINDS),
            ("qk_norm_targets", _TARGETS),
        )
        if values.get(key) not in allowed
    ]
    if problems:
        raise UserError(*(problem.in_file(name) for problem in problems))
    shape = {
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": values["num_attention_heads"],
        "num_key_value_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
        "head_dim": values.get("head_dim"),
        "vocab_size": values["vocab_size"],
        "rms_norm_eps": 1e-5 if (eps := values.get("rms_norm_eps")) is None else eps,
        "tie_word_embeddings": values.get("tie_word_embeddings") or False,
        "qkv_bias": values["qkv_bias"],
        "softmax": values.get("softmax") or {},
        "qk_norm": {"kind": values["qk_norm_kind"], "targets": values["qk_norm_targets"]},
    }
    config, problems = validated(ModelConfig, shape)
    if problems := problems or config.problems():
        keys = {f"model.{key}": key for key in vars(config)}
        raise UserError(*(problem.renamed(keys).in_file(name) for problem in problems))
    sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_size
    try:
        layout = read_layout(values.get("layout"), *sizes)
    except ValueError as error:
        raise UserError.at(name, f"{error}.") from None
    _check_slopes(values.get("alibi_slopes"), config, layout, name)
    norms = {layer.qk_norm for layer in layout.layers}
    # Norms in some layers only: the other layers get theirs at a later drop.
    when: Literal["never", "always", "after_drop"]
    when = "never" if norms == {False} else "always" if norms == {True} else "after_drop"
    return replace(config, qk_norm=replace(config.qk_norm, when=when)), layout


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
        raise UserError.at(
            name, f"alibi_slopes: expected those of ALiBi for {len(ours)} heads, got {given!r}."
        )
