"""Shape and layout from a ``config.json``: of published architectures that this decoder computes
exactly, of models exported with custom code, and of checkpoints released by DroPE's authors.

An export's file contains our layout unchanged. The classes of DroPE's authors (SakanaAI/DroPE,
``custom_models``) are Llama and Qwen2 without rotation, and with norms over the full projections of
queries, keys or both. The code beside either is for transformers and never run here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainer.common.errors import Problem, UserError, collecting, raise_all
from trainer.common.fields import validated
from trainer.interchange.hf_rope import spectrum_from_rope_parameters
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature
from trainer.positional.stored_layout import read_layout


@dataclass(frozen=True)
class Architecture:
    """Implicit properties of a published architecture.

    ``nope_layers``: whether some layers do not rotate (``no_rope_layers``). ``windows``: whether
    ``sliding_window`` applies to no layer, every layer, or some (``layer_types``). ``defaults``:
    values of absent keys.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    nope_layers: bool = False
    windows: Literal["none", "every", "some"] = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(windows="every", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, windows="some", defaults={"sliding_window": 4096, "max_window_layers": 28}
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True,
        windows="some",
        defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    "SmolLM3ForCausalLM": Architecture(
        nope_layers=True,
        windows="some",
        defaults={
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
}

_REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings"),
)
_OPTIONAL = (
    *("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers"),
    "no_rope_layer_interval",
)
_NEVER_NULL = ("max_window_layers", "no_rope_layer_interval")
"""Keys whose null stands for the default."""
_PLAIN = (
    ("rms_norm_eps", (int, float), "a number"),
    ("tie_word_embeddings", (bool,), "true or false"),
    ("use_sliding_window", (bool,), "true or false"),
)
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys that change the computation, with the values supported here; null always is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "quantization_config": (),
}


def from_hf_config(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout of a published model; C is its ``max_position_embeddings``.

    ``values``: contents of ``config.json``, in the style of transformers 4 (``rope_theta``,
    ``rope_scaling``) or 5 (``rope_parameters``).

    Raises:
        UserError: the architecture or a key that changes its computation is not supported, or keys
            are missing or wrong; names every problem.
    """
    architecture = _architecture(values)
    stated = {k: v for k, v in values.items() if v is not None or k not in _NEVER_NULL}
    values = dict(architecture.defaults) | stated
    malformed = _malformed(values)
    problems = [*malformed, *_unsupported(values)]
    if not malformed:
        with collecting(problems):
            model = _model(values, architecture)
    raise_all(problems)
    return model


def _architecture(values: Mapping[str, Any]) -> Architecture:
    listed = values.get("architectures") or [None]
    if not isinstance(listed, list) or not isinstance(listed[0], str | None):
        raise UserError.at("architectures", f"expected a list of names, got {listed!r}.")
    architecture = listed[0]
    if architecture is None:  # files of older models give only the type
        kinds = {key.removesuffix("ForCausalLM").lower(): key for key in ARCHITECTURES}
        kind = str(values.get("model_type"))
        architecture = kinds.get(kind, kind)
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    if str(architecture).startswith("Olmo2"):
        raise UserError.at(
            "",
            f"{architecture} normalises the outputs of attention and MLP (post-norm), this decoder "
            "their inputs (pre-norm); the same weights would be another model.",
        )
    raise UserError.at(
        "",
        f"the architecture {architecture!r} is not supported; supported are "
        f"{', '.join(ARCHITECTURES)}.",
    )


def _malformed(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key that is missing or of the wrong type."""
    problems = [
        Problem(key, f"expected a positive whole number, got {values.get(key)!r}.")
        for key in (*_REQUIRED, *_OPTIONAL)
        if key in _REQUIRED or values.get(key) is not None
        if not isinstance(values.get(key), int) or values[key] < (key != "max_window_layers")
    ]
    problems += [
        Problem(key, f"expected less than 2^31, got {values[key]}.")
        for key in (*_REQUIRED, *_OPTIONAL)
        if isinstance(values.get(key), int) and values[key] >= 1 << 31
    ]
    problems += [
        Problem(key, f"expected {expected}, got {values[key]!r}.")
        for key, kinds, expected in _PLAIN
        if values.get(key) is not None and type(values[key]) not in kinds
    ]
    for key, allowed in (("no_rope_layers", (0, 1)), ("layer_types", _LAYER_TYPES)):
        entries, depth = values.get(key), values.get("num_hidden_layers")
        if entries is None:
            continue
        if not isinstance(entries, list) or not isinstance(depth, int) or len(entries) < depth:
            problems.append(
                Problem(key, f"expected a list with an entry for each layer, got {entries!r}.")
            )
        elif others := [entry for entry in entries if entry not in allowed]:
            problems.append(
                Problem(key, f"expected {allowed[0]!r} or {allowed[1]!r}, got {others[0]!r}.")
            )
    return problems


def _unsupported(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key that asks for another computation."""
    return [
        Problem(
            "",
            f"{key}={values[key]!r} is not supported"
            + (f", only {' or '.join(map(repr, allowed))}." if allowed else "."),
        )
        for key, allowed in _NEUTRAL.items()
        if values.get(key) is not None and values[key] not in allowed
    ]


def _model(values: Mapping[str, Any], architecture: Architecture) -> tuple[ModelConfig, Layout]:
    config = _model_config(
        values,
        default_eps=1e-6,
        qkv_bias=architecture.qkv_bias,
        qk_norm={"when": "always" if architecture.qk_norm else "never"},
    )
    return config, _layout(values, architecture, config)


def _model_config(
    values: Mapping[str, Any], *, default_eps: float, **properties: Any
) -> ModelConfig:
    """Return the shape of well-formed keys; ``properties`` are derived from other keys."""
    heads, eps = values["num_attention_heads"], values.get("rms_norm_eps")
    shape = {
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim"),
        "vocab_size": values["vocab_size"],
        "rms_norm_eps": default_eps if eps is None else eps,
        "tie_word_embeddings": values.get("tie_word_embeddings") or False,
    }
    config, problems = validated(ModelConfig, shape | properties)
    if problems := problems or config.problems():
        keys = {f"model.{key}": key for key in vars(config)}
        raise UserError(*(problem.renamed(keys) for problem in problems))
    return config


def _layout(values: Mapping[str, Any], architecture: Architecture, config: ModelConfig) -> Layout:
    length = values["max_position_embeddings"]
    spectrum = spectrum_from_rope_parameters(_rope_parameters(values), config.head_size, length)
    rotates = _rotating(values, architecture, config.num_hidden_layers)
    heads = config.num_key_value_heads
    layers = (
        LayerEncoding(((spectrum if turns else Spectrum(), heads),), window, architecture.qk_norm)
        for turns, window in zip(rotates, _windows(values, architecture, rotates), strict=True)
    )
    return Layout(length, tuple(layers))


def _rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope parameters in the new style, including older top-level keys."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise UserError.at("rope_parameters", f"expected keys and values, got {rope!r}.")
    beside = {"rope_theta": values.get("rope_theta") or 10_000.0}
    beside["partial_rotary_factor"] = values.get("partial_rotary_factor")
    merged = beside | {key: value for key, value in rope.items() if value is not None}
    # The one top-level key that takes precedence over the parameters.
    if original := values.get("original_max_position_embeddings"):
        merged["original_max_position_embeddings"] = original
    kind = merged.get("rope_type", merged.get("type", "default"))
    share = merged.get("partial_rotary_factor")  # reported later if malformed
    if isinstance(share, int | float) and share != 1 and kind != "proportional":
        raise UserError.at(
            "partial_rotary_factor",
            f"{share:g} with rope_type {kind!r}; transformers rotates whole heads of these "
            "architectures all the same, or fails. Remove the key where the weights were trained "
            "so; a part of a head rotates with rope_type 'proportional' alone.",
        )
    return merged


def _rotating(values: Mapping[str, Any], architecture: Architecture, depth: int) -> list[bool]:
    """Return whether each layer rotates."""
    if not architecture.nope_layers:
        return [True] * depth
    if (listed := values.get("no_rope_layers")) is not None:
        return [bool(turns) for turns in listed[:depth]]
    return [(index + 1) % values["no_rope_layer_interval"] != 0 for index in range(depth)]


def _windows(
    values: Mapping[str, Any], architecture: Architecture, rotates: list[bool]
) -> list[int | None]:
    """Return the sliding window of each layer, in tokens."""
    window, depth = values.get("sliding_window"), len(rotates)
    if architecture.windows == "every":
        return [window] * depth
    if architecture.windows == "none" or not values.get("use_sliding_window"):
        return [None] * depth
    if (types := values.get("layer_types")) is not None:
        slides = [kind == "sliding_attention" for kind in types[:depth]]
    elif architecture.nope_layers:
        slides = [not turns for turns in rotates]
    else:
        slides = [index >= values["max_window_layers"] for index in range(depth)]
    return [window if sliding else None for sliding in slides]


def named_bos(values: Mapping[str, Any]) -> int | None:
    """Return the configured id of the token that texts begin with, or None if it is not in the
    vocabulary.

    The model's tokenizer may not add this token itself.
    """
    if isinstance(text := values.get("text_config"), Mapping):
        values = text
    token, size = values.get("bos_token_id"), values.get("vocab_size")
    return token if type(token) is type(size) is int and 0 <= token < size else None


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


def code_remark(values: Mapping[str, Any], directory: str) -> str | None:
    """Return a remark about an export whose code has another version than here, or None.

    ``values``: of its ``config.json``. ``directory``: as the user named it.
    """
    version = values.get("code_version", 1)
    if not is_own(values) or version == CODE_VERSION:
        return None
    if type(version) is not int or version > CODE_VERSION:
        return (
            f"{directory}: config.json: code_version is {version!r}, and this program writes "
            f"{CODE_VERSION}; the code in that directory may compute something else than this "
            "program does with its weights."
        )
    return (
        f"The code in {directory!r} is of an earlier version, which generates wrong text under "
        "transformers 5.24 or newer without an error. Export it again: "
        f"python -m trainer export {shlex.quote(directory)} to=DIRECTORY"
    )


def from_own_config(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout; the inverse of what an export writes.

    Raises:
        UserError: keys are missing, wrong, or contradict each other.
    """
    problems = _malformed(values)
    problems += [
        Problem(key, f"expected {' or '.join(map(repr, allowed))}, got {values.get(key)!r}.")
        for key, allowed in (
            ("qkv_bias", (True, False)),
            ("qk_norm_kind", _KINDS),
            ("qk_norm_targets", _TARGETS),
        )
        if values.get(key) not in allowed
    ]
    raise_all(problems)
    config = _model_config(
        values,
        default_eps=1e-5,
        qkv_bias=values["qkv_bias"],
        qk_norm={"kind": values["qk_norm_kind"], "targets": values["qk_norm_targets"]},
    )
    sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_size
    try:
        layout = read_layout(values.get("layout"), *sizes)
    except ValueError as error:
        raise UserError.at("", f"{error}.") from None
    _check_slopes(values.get("alibi_slopes"), config, layout)
    norms = {layer.qk_norm for layer in layout.layers}
    # Norms in some layers only: the other layers get theirs at a later drop.
    when: Literal["never", "always", "after_drop"]
    when = "never" if norms == {False} else "always" if norms == {True} else "after_drop"
    return replace(config, qk_norm=replace(config.qk_norm, when=when)), layout


def _check_slopes(slopes: Any, config: ModelConfig, layout: Layout) -> None:
    ours = alibi_slopes(config.num_attention_heads)
    fits = (
        isinstance(slopes, list)
        and len(slopes) == len(ours)
        and all(
            isinstance(x, float) and math.isclose(x, y) for x, y in zip(slopes, ours, strict=True)
        )
    )
    if any(spectrum.alibi for spectrum in layout.spectra) and not fits:
        raise UserError.at(
            "alibi_slopes", f"expected ALiBi's for {len(ours)} heads, got {slopes!r}."
        )


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
    return _drope_architecture(values) in BASES


def _drope_architecture(values: Mapping[str, Any]) -> str | None:
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


def from_drope_config(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout; C is ``max_position_embeddings``.

    A ``softmax_scale`` replaces 1 / sqrt(head size) as the factor on the scores.

    Raises:
        UserError: a key is missing, wrong or not supported; names every problem.
    """
    base = {key: value for key, value in values.items() if key not in _ROTATIONS}
    problems: list[Problem] = []
    attention, scale = values.get("attention_type", "nope"), values.get("softmax_scale")
    if not isinstance(attention, str) or attention not in TARGETS:
        expected = " or ".join(map(repr, TARGETS))
        problems.append(Problem("attention_type", f"expected {expected}, got {attention!r}."))
    if scale is not None and (type(scale) not in (int, float) or not SMALLEST < scale < LARGEST):
        problems.append(
            Problem(
                "softmax_scale",
                f"expected a number from {SMALLEST:g} to {LARGEST:g}, got {str(scale)[:40]}.",
            )
        )
    with collecting(problems):
        architecture = BASES[str(_drope_architecture(values))]
        config, layout = from_hf_config(base | {"architectures": [architecture]})
    raise_all(problems)
    factor = 1.0 if scale is None else scale * math.sqrt(config.head_size)
    spectrum = Spectrum(temperature=Temperature(scale=factor))
    if (targets := TARGETS[attention]) is not None:
        config = replace(config, qk_norm=QKNormConfig("always", "full", targets))
    layers = (
        replace(layer, groups=((spectrum, config.num_key_value_heads),), qk_norm=bool(targets))
        for layer in layout.layers
    )
    return config, Layout(layout.training_length, tuple(layers))
