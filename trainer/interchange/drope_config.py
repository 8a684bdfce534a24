"""Shape and layout from the ``config.json`` of a checkpoint released by DroPE's authors.

Their classes (SakanaAI/DroPE, ``custom_models``) are Llama and Qwen2 without rotation, and with
norms over the full projections of queries, keys or both. The code beside a checkpoint is never run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from trainer.common.errors import Problem, UserError
from trainer.interchange.hf_config import from_hf_config
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.positional.layout import Layout
from trainer.positional.spectrum import Spectrum, Temperature

BASES = {"DroPELlamaForCausalLM": "LlamaForCausalLM", "DroPEQwen2ForCausalLM": "Qwen2ForCausalLM"}
"""The architectures that such files name, and what they are beside their attention."""
MODEL_TYPES = {"llama_drope": "DroPELlamaForCausalLM", "qwen2_drope": "DroPEQwen2ForCausalLM"}
TARGETS: dict[str, Literal["both", "q", "k"] | None] = {
    "nope": None,
    "qk_norm_nope": "both",
    "q_norm_nope": "q",
    "k_norm_nope": "k",
}
"""Which projections each ``attention_type`` normalises."""
_UNUSED = {"q_norm_nope": "self_attn.k_norm.weight", "k_norm_nope": "self_attn.q_norm.weight"}
_ROTATIONS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def is_drope(values: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` belongs to a checkpoint of DroPE's own classes."""
    return _architecture(values) in BASES


def _architecture(values: Mapping[str, Any]) -> str | None:
    listed = values.get("architectures")
    if isinstance(listed, list) and listed:
        return str(listed[0])
    return MODEL_TYPES.get(str(values.get("model_type")))


def is_unused(values: Mapping[str, Any], tensor: str) -> bool:
    """Whether a checkpoint stores this tensor without using it: the norm of the other side."""
    unused = _UNUSED.get(str(values.get("attention_type")))
    return is_drope(values) and unused is not None and tensor.endswith(unused)


SMALLEST, LARGEST = 1e-6, 1e6
"""Bounds of a factor on attention scores."""


def from_drope_config(values: Mapping[str, Any], name: str) -> tuple[ModelConfig, Layout]:
    """Return shape and layout; C is ``max_position_embeddings``.

    Args:
        values: contents of ``config.json``. ``softmax_scale``, if set, replaces 1 / sqrt(head size)
            as the factor on the scores.
        name: how errors call the file.

    Raises:
        UserError: a key is missing, wrong or not supported; names every problem.
    """
    base = {key: value for key, value in values.items() if key not in _ROTATIONS}
    problems: list[Problem] = []
    attention, scale = values.get("attention_type", "nope"), values.get("softmax_scale")
    if not isinstance(attention, str) or attention not in TARGETS:
        expected = " or ".join(map(repr, TARGETS))
        problems.append(Problem(name, f"attention_type: expected {expected}, got {attention!r}."))
    if scale is not None and (type(scale) not in (int, float) or not SMALLEST < scale < LARGEST):
        problems.append(
            Problem(
                name,
                f"softmax_scale: expected a number from {SMALLEST:g} to {LARGEST:g}, got "
                f"{str(scale)[:40]}.",
            )
        )
    try:
        architecture = BASES[str(_architecture(values))]
        config, layout = from_hf_config(base | {"architectures": [architecture]}, name)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    if problems:
        raise UserError(*problems)
    factor = 1.0 if scale is None else scale * math.sqrt(config.head_size)
    spectrum = Spectrum(temperature=Temperature(scale=factor))
    if (targets := TARGETS[attention]) is not None:
        config = replace(config, qk_norm=QKNormConfig("always", "full", targets))
    layers = (
        replace(layer, groups=((spectrum, config.num_key_value_heads),), qk_norm=bool(targets))
        for layer in layout.layers
    )
    return config, Layout(layout.training_length, tuple(layers))
