"""Architecture of transformers for a model, and its weights in that form, as safetensors files.

Prefers a native architecture, which every tool loads; otherwise the code in ``custom/``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.common.progress import Progress
from trainer.interchange.hf_config import ARCHITECTURES, CODE_VERSION, OWN, Architecture
from trainer.interchange.hf_rope import Parameters, rope_parameters, spectrum_from_rope_parameters
from trainer.interchange.pretrained import published_name, waits
from trainer.interchange.tensor_files import INDEX, SINGLE, write_tensors
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature

SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    return () if set(changes) == {_unchanged(config.head_size)} else changes


def _unchanged(head_dim: int) -> HeadChange:
    return HeadChange(tuple(range(head_dim)), (1.0,) * head_dim)


def _change(layer: LayerEncoding, read_back: Spectrum, head_dim: int) -> HeadChange:
    """Move pair m, here channels m and m + M, to channels m and m + head_dim / 2.

    Scales of rotated channels apply to both queries and keys; the queries absorb both.
    """
    spectrum, half = layer.spectra[0], head_dim // 2
    pairs = len(spectrum.inv_freq) if spectrum.rotates else half
    still = list(range(2 * pairs, head_dim))
    middle = len(still) // 2
    order = [*range(pairs), *still[:middle], *range(pairs, 2 * pairs), *still[middle:]]
    theirs = read_back.rotary_scale if spectrum.rotates else 1.0

    def factor(channel: int) -> float:
        ours = spectrum.rotary_scale if channel < spectrum.rotary_dim else 1.0
        scale = spectrum.temperature.scale * (ours / theirs) ** 2
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-9) else scale

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
    # transformers 4 and engines built on it read these two keys. Without them they rotate with base
    # 10,000; a type that they do not know is an error there.
    values["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        values["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
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


def exported_names(model: Decoder, plan: Plan) -> list[str]:
    """Return the parameters to export.

    Disabled query and key norms are omitted, and so is a learned scale that the query projection
    absorbs.
    """
    return [name for name, _ in model.named_parameters() if not waits(name, model.layout)]


def exported(model: Decoder, name: str, plan: Plan) -> Tensor:
    """Return one parameter in float32, with query and key channels changed as the plan says."""
    value = model.get_parameter(name).detach()
    if (change := _head_change(model, name, plan)) is None:
        return value
    order, factors = change
    heads = value.unflatten(0, (-1, len(order)))[:, order]
    return (heads * _align(factors, value)).flatten(0, 1)


@torch.no_grad()
def round_weights(model: Decoder, plan: Plan, dtype: torch.dtype) -> None:
    """Round the decoder's own weights in place, consistently with their exported counterparts."""
    for name in exported_names(model, plan):
        value = model.get_parameter(name)
        if (change := _head_change(model, name, plan)) is None:
            value.copy_(value.to(dtype))
            continue
        order, factors = change
        factors = _align(factors[:, torch.tensor(order).argsort()], value)
        heads = value.unflatten(0, (-1, len(order)))
        value.copy_(((heads * factors).to(dtype) / factors).flatten(0, 1))


def _head_change(model: Decoder, name: str, plan: Plan) -> tuple[list[int], Tensor] | None:
    """Return the order of a parameter's channels and their factors ``[1 or Hq, head_dim]``.

    The factors go to the last weight of the queries, which is the gain of their norm, if any. They
    include a learned softmax scale, for which a native architecture has no parameter. Returns None
    if the parameter is exported unchanged.
    """
    kind, size = name.split(".")[-2], model.config.head_size
    if kind not in ("q_proj", "k_proj", "q_norm", "k_norm") or not plan.changes:
        return None
    index = int(name.split(".")[1])
    change = plan.changes[index]
    if kind != ("q_norm" if model.layout.layers[index].qk_norm else "q_proj"):
        return list(change.order), torch.ones(1, size)
    return list(change.order), torch.tensor([change.factors])


def _align(factors: Tensor, value: Tensor) -> Tensor:
    """Append axes to ``[heads, head_dim]`` until it multiplies the heads of a weight or bias."""
    return factors.view(*factors.shape, *[1] * (value.dim() - 1))


def write_weights(
    model: Decoder, plan: Plan, directory: Path, dtype: str, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write ``model.safetensors``, or shards of at most ``shard_bytes`` with an index."""
    shards: list[list[str]] = [[]]
    total = size = 0
    for name in exported_names(model, plan):
        nbytes = model.get_parameter(name).numel() * DTYPES[dtype].itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
        total += nbytes
    if len(shards) == 1:
        _write_file(model, plan, shards[0], directory / SINGLE, dtype)
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with Progress("Writing", len(files), total / len(files) / 1e6, after=5.0, unit="MB") as bar:
        for number, (names, file) in enumerate(zip(shards, files, strict=True)):
            bar.advance_to(number)
            _write_file(model, plan, names, directory / file, dtype)
    places = {
        published_name(name): file
        for names, file in zip(shards, files, strict=True)
        for name in names
    }
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(model: Decoder, plan: Plan, names: Sequence[str], path: Path, dtype: str) -> None:
    tensors = {
        published_name(name): exported(model, name, plan).to(DTYPES[dtype]).contiguous()
        for name in names
    }
    write_tensors(tensors, path)
