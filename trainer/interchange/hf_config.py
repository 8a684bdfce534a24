"""Shape and layout from a ``config.json``: of published architectures that this decoder computes
exactly, of models exported with custom code, and of checkpoints released by DroPE's authors.

An export's file contains our layout unchanged. The classes of DroPE's authors (SakanaAI/DroPE,
``custom_models``) are Llama and Qwen2 without rotation, and with norms over the full projections of
queries, keys or both. The code beside either is for transformers and never run here.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.interchange.hf_rope import spectrum_from_rope_parameters
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature


@dataclass(frozen=True)
class Architecture:
    """Implicit properties of a published architecture.

    ``nope_layers``: whether some layers do not rotate (``no_rope_layers``). ``windows``: whether
    ``sliding_window`` applies to no layer, every layer, or some (``layer_types``).
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    nope_layers: bool = False
    windows: Literal["none", "every", "some"] = "none"


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(windows="every"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, windows="some"),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, windows="some"),
    "SmolLM3ForCausalLM": Architecture(nope_layers=True, windows="some"),
}
# Keys that change the computation, with the values supported here; null always is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
}


def shape_and_layout(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout from the contents of any supported ``config.json``.

    Raises:
        UserError: the architecture or a key that changes its computation is not supported.
        KeyError: a key is missing.
    """
    name = architecture_of(values)
    if name == OWN:
        return from_own_config(values)
    return from_drope_config(values) if name in DROPE else from_hf_config(values)


def architecture_of(values: Mapping[str, Any]) -> str:
    """Return the architecture by its name, or by the type where a file gives nothing else."""
    kind = str(values.get("model_type"))
    types = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}
    types |= {"llama_drope": "DroPELlamaForCausalLM", "qwen2_drope": "DroPEQwen2ForCausalLM"}
    return (values.get("architectures") or [types.get(kind, kind)])[0]


def from_hf_config(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout of a published model; see :func:`trained_and_reach` for its C.

    ``values``: contents of ``config.json``, in the style of transformers 4 (``rope_theta``,
    ``rope_scaling``) or 5 (``rope_parameters``).
    """
    name = architecture_of(values)
    if name not in ARCHITECTURES:
        raise UserError(
            f"architectures: expected one of {', '.join(ARCHITECTURES)}, got {name!r}; hf: before "
            "its directory lets transformers compute it"
        )
    architecture = ARCHITECTURES[name]
    for key, allowed in _NEUTRAL.items():
        if values.get(key) is not None and values[key] not in allowed:
            expected = " or ".join(map(repr, allowed)) or "null"
            raise UserError(f"{key}: expected {expected}, got {values[key]!r}")
    values = _completed(values, name)
    norm = QKNormConfig("always") if architecture.qk_norm else QKNormConfig()
    config = _model_config(values, qkv_bias=architecture.qkv_bias, qk_norm=norm)
    length = values["max_position_embeddings"]
    rope = values["rope_parameters"]
    if rope.get("partial_rotary_factor") not in (None, 1) and rope["rope_type"] != "proportional":
        raise UserError(
            "partial_rotary_factor: expected 1, since transformers rotates whole heads of these "
            f"architectures all the same, got {rope['partial_rotary_factor']}"
        )
    spectrum = spectrum_from_rope_parameters(rope, config.head_size, length)
    trained, reach = trained_and_reach(rope, length) if spectrum.rotates else (length, 0)
    depth = config.num_hidden_layers
    rotates = values["no_rope_layers"][:depth] if architecture.nope_layers else [True] * depth
    slides = [architecture.windows == "every"] * depth
    if architecture.windows == "some" and values["use_sliding_window"]:
        slides = [kind == "sliding_attention" for kind in values["layer_types"]]
    layers = []
    for turns, sliding in zip(rotates, slides, strict=True):
        spectra = (spectrum if turns else Spectrum(),) * config.num_key_value_heads
        window = values.get("sliding_window") if sliding else None
        layers.append(LayerEncoding(spectra, window, architecture.qk_norm))
    return config, Layout(trained, tuple(layers), reach)


def _completed(values: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return a file's values as transformers reads them: with defaults, and ``rope_parameters``.

    transformers warns of factors and lengths that contradict each other.
    """
    from transformers import CONFIG_MAPPING

    settings: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    # Defaults of these would be warned of if they are beyond the vocabulary.
    settings |= {k: v for k, v in values.items() if k not in ("architectures", "model_type")}
    kind = architecture.removesuffix("ForCausalLM").lower()
    config = CONFIG_MAPPING[kind](**deepcopy(settings))  # which changes nested values
    config.standardize_rope_params()  # takes original_max_position_embeddings from beside them
    return config.to_dict()


def trained_and_reach(rope: Mapping[str, Any], longest: int) -> tuple[int, int]:
    """Return C in tokens, and the length up to which a file's own rescaling reaches (0: only C).

    ``rope``: its parameters. ``longest``: its ``max_position_embeddings``. C is the length before
    the rescaling. YaRN's reach is ``factor`` times C, as transformers computes it, whatever the
    ratio of the lengths; Llama 3's and LongRoPE's is ``longest``.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ("yarn", "longrope", "llama3"):
        return longest, 0
    trained = rope.get("original_max_position_embeddings") or longest
    reach = round(rope["factor"] * trained) if kind == "yarn" else longest
    return trained, reach if reach > trained else 0


SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "rms_norm_eps", "tie_word_embeddings"),
)
"""Keys that a ``config.json`` and a decoder's configuration share."""


def _model_config(values: Mapping[str, Any], **properties: Any) -> ModelConfig:
    """Return the shape; ``properties`` are derived from other keys."""
    shape = {name: values[name] for name in SHAPE} | {"head_dim": values.get("head_dim")}
    return adapter(ModelConfig).validate_python(shape | properties)


OWN = "UnropeForCausalLM"
"""The architecture of models exported with custom code."""


def from_own_config(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout; the inverse of what an export writes."""
    norm = {"kind": values["qk_norm_kind"], "targets": values["qk_norm_targets"]}
    config = _model_config(values, qkv_bias=values["qkv_bias"], qk_norm=norm)
    layout = Layout.from_dict(values["layout"])
    norms = {layer.qk_norm for layer in layout.layers}
    # Norms in some layers only: the other layers get theirs at a later drop.
    when: Literal["never", "always", "after_drop"] = "after_drop"
    if len(norms) == 1:
        when = "always" if norms == {True} else "never"
    return replace(config, qk_norm=replace(config.qk_norm, when=when)), layout


DROPE = {"DroPELlamaForCausalLM": "LlamaForCausalLM", "DroPEQwen2ForCausalLM": "Qwen2ForCausalLM"}
"""The architectures of DroPE's authors, and what they are beside their attention."""
TARGETS: dict[str, Literal["both", "q", "k"] | None] = {
    "nope": None,
    "qk_norm_nope": "both",
    "q_norm_nope": "q",
    "k_norm_nope": "k",
}
"""Which projections each ``attention_type`` normalises."""
_ROTATIONS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def is_unused(values: Mapping[str, Any], tensor: str) -> bool:
    """Whether a checkpoint of DroPE's authors stores this norm without using it."""
    targets = TARGETS.get(str(values.get("attention_type")))
    return targets in ("q", "k") and "_norm." in tensor and f"{targets}_norm." not in tensor


def from_drope_config(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout; C is ``max_position_embeddings``.

    A ``softmax_scale`` replaces 1 / sqrt(head size) as the factor on the scores.
    """
    base = {key: value for key, value in values.items() if key not in _ROTATIONS}
    architecture = DROPE[architecture_of(values)]
    config, layout = from_hf_config(base | {"architectures": [architecture]})
    kind = values.get("attention_type", "nope")
    if kind not in TARGETS:
        raise UserError(f"attention_type: expected one of {', '.join(TARGETS)}, got {kind!r}")
    targets = TARGETS[kind]
    spectrum = Spectrum()
    if values.get("softmax_scale") is not None:
        factor = values["softmax_scale"] * math.sqrt(config.head_size)
        spectrum = Spectrum(temperature=Temperature(scale=factor))
    if targets is not None:
        config = replace(config, qk_norm=QKNormConfig("always", "full", targets))
    layers = (
        replace(layer, spectra=(spectrum,) * config.num_key_value_heads, qk_norm=bool(targets))
        for layer in layout.layers
    )
    return config, Layout(layout.training_length, tuple(layers))
