"""Architecture of transformers for a model, and the changes of its weights.

Prefers a native architecture, which every tool loads; otherwise the code in ``custom/``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.interchange.hf_config import ARCHITECTURES, Architecture
from trainer.interchange.hf_rope import spectrum_from_rope_parameters
from trainer.interchange.hf_rope_inverse import Parameters, rope_parameters
from trainer.interchange.own_config import CODE_VERSION, OWN
from trainer.model.config import ModelConfig
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature


@dataclass(frozen=True)
class HeadChange:
    """Change of one layer's query and key channels for another layout of pairs and scale of the
    logits.

    ``order``: index of our channel for each exported channel. ``factors``: on the exported query
    channels, ``[head_dim]``.
    """

    order: tuple[int, ...]
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """Form of an exported model.

    ``values``: of ``config.json``, except tokens and dtypes. ``changes``: for each layer's queries
    and keys; empty if they stay unchanged. ``refusals``: why each rejected native architecture
    cannot represent the model.
    """

    architecture: str
    values: dict[str, Any]
    changes: tuple[HeadChange, ...]
    refusals: dict[str, str]

    @property
    def is_native(self) -> bool:
        """Whether transformers loads the model without code from the directory."""
        return self.architecture != OWN


def make_plan(config: ModelConfig, layout: Layout) -> Plan:
    """Return the first architecture that represents a decoder of this shape and layout."""
    refusals: dict[str, str] = {}
    rope = _rope_parameters(config, layout)
    for name, architecture in ARCHITECTURES.items():
        reason = _refusal(config, layout, name, rope)
        if reason is None and rope is not None:
            values = _native_values(config, layout, architecture, rope)
            return Plan(name, values, _changes(config, layout, rope), refusals)
        refusals[name] = str(reason)
    return Plan(OWN, _custom_values(config, layout), (), refusals)


def _refusal(config: ModelConfig, layout: Layout, name: str, rope: Parameters | None) -> str | None:
    """Return what an architecture cannot represent, or None."""
    architecture, layers = ARCHITECTURES[name], layout.layers
    norms = [layer.qk_norm for layer in layers]
    turns = [layer.spectra[0].rotates for layer in layers]
    windows = [layer.window for layer in layers]
    per_head = (config.qk_norm.kind, config.qk_norm.targets) == ("per_head", "both")
    reasons = {
        "ALiBi": any(s.alibi for s in layout.spectra),
        "a softmax temperature that changes with the length": any(
            not s.temperature.is_constant for s in layout.spectra
        ),
        "heads of one layer with different encodings": any(len(x.groups) > 1 for x in layers),
        "layers that rotate differently": len(_rotations(layout)) > 1,
        "frequencies that no rope_type has": rope is None,
        "QK-norm over the full projection or on one side": any(norms) and not per_head,
        "attention sinks": config.softmax.sinks,
        "soft-caps": (config.softmax.softcap, config.softmax.final_softcap) != (None, None),
        "a learned scale of the softmax beside QK-norm": config.softmax.learned_scale
        and any(norms),
        "QK-norm in some layers only": any(norms) and not all(norms),
        "QK-norm": all(norms) and not architecture.qk_norm,
        "no QK-norm": not any(norms) and architecture.qk_norm,
        "biases on queries, keys and values": config.qkv_bias and not architecture.qkv_bias,
        "no biases": not config.qkv_bias and architecture.qkv_bias,
        "layers without rotation": not all(turns) and any(turns) and not architecture.nope_layers,
        "several sizes of sliding windows": len({*windows} - {None}) > 1,
        "sliding windows": any(windows) and architecture.windows == "none",
        "layers without a sliding window": any(windows)
        and not all(windows)
        and architecture.windows == "every",
        "a width that the heads do not divide": name == "LlamaForCausalLM"
        and config.hidden_size % config.num_attention_heads != 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _rotations(layout: Layout) -> list[Spectrum]:
    """Return the distinct rotations, without scales and temperatures, which the weights absorb."""
    plain = (replace(s, rotary_scale=1.0, temperature=Temperature()) for s in layout.spectra)
    return list(dict.fromkeys(s for s in plain if s.rotates))


def _rope_parameters(config: ModelConfig, layout: Layout) -> Parameters | None:
    turning = [s for s in layout.spectra if s.rotates] or [Spectrum()]
    return rope_parameters(turning[0], config.head_size, layout.training_length)


def _changes(config: ModelConfig, layout: Layout, rope: Parameters) -> tuple[HeadChange, ...]:
    read_back = spectrum_from_rope_parameters(rope, config.head_size, layout.training_length)
    changes = tuple(_change(layer, read_back, config.head_size) for layer in layout.layers)
    identity = HeadChange(tuple(range(config.head_size)), (1.0,) * config.head_size)
    return () if all(change == identity for change in changes) else changes


def _change(layer: LayerEncoding, read_back: Spectrum, head_dim: int) -> HeadChange:
    """Move pair m, here channels m and m + M, to channels m and m + head_dim / 2.

    Scales of rotated channels apply to both queries and keys; the queries absorb both.
    """
    spectrum, half = layer.spectra[0], head_dim // 2
    pairs = len(spectrum.inv_freq) if spectrum.rotates else half
    rest = list(range(2 * pairs, head_dim))
    middle = len(rest) // 2
    order = [*range(pairs), *rest[:middle], *range(pairs, 2 * pairs), *rest[middle:]]
    there = read_back.rotary_scale if spectrum.rotates else 1.0

    def factor(channel: int) -> float:
        here = spectrum.rotary_scale if channel < spectrum.rotary_dim else 1.0
        found = spectrum.temperature.scale * (here / there) ** 2
        return 1.0 if math.isclose(found, 1.0, rel_tol=1e-9) else found

    return HeadChange(tuple(order), tuple(factor(channel) for channel in order))


def _shape(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": layout.training_length,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _native_values(
    config: ModelConfig, layout: Layout, architecture: Architecture, rope: Parameters
) -> dict[str, Any]:
    values = _shape(config, layout) | {"hidden_act": "silu", "rope_parameters": rope}
    if rope["rope_type"] == "llama3":  # llama.cpp's converter looks for it here
        key = "original_max_position_embeddings"
        values[key] = rope[key]
    if architecture.nope_layers:
        values["no_rope_layers"] = [int(x.spectra[0].rotates) for x in layout.layers]
    windows = [layer.window for layer in layout.layers]
    window = next((w for w in windows if w is not None), None)
    if architecture.windows == "every":
        values["sliding_window"] = window
    if architecture.windows == "some":
        values |= {"use_sliding_window": window is not None} | _window_values(windows)
    return values


def _window_values(windows: list[int | None]) -> dict[str, Any]:
    return {
        "sliding_window": next((w for w in windows if w is not None), None),
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }


def _custom_values(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    biased = any(spectrum.alibi for spectrum in layout.spectra)
    windows = [layer.window for layer in layout.layers]
    sizes = {*windows} - {None}
    return _shape(config, layout) | {
        "qkv_bias": config.qkv_bias,
        "qk_norm_kind": config.qk_norm.kind,
        "qk_norm_targets": config.qk_norm.targets,
        "softmax": asdict(config.softmax),
        "layout": layout.to_dict(),
        "alibi_slopes": list(alibi_slopes(config.num_attention_heads)) if biased else None,
        **_window_values(windows if len(sizes) == 1 else [None] * len(windows)),
        "code_version": CODE_VERSION,
        "auto_map": {
            "AutoConfig": "configuration_unrope.UnropeConfig",
            "AutoModel": "modeling_unrope.UnropeModel",
            "AutoModelForCausalLM": f"modeling_unrope.{OWN}",
        },
    }
