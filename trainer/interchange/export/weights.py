"""Weights of a decoder in their exported form, as safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.interchange.export.plan import Plan
from trainer.interchange.pretrained import waits
from trainer.interchange.tensor_files import INDEX, SINGLE
from trainer.model.decoder import Decoder

SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def exported_names(model: Decoder, plan: Plan) -> list[str]:
    """Return the parameters to export.

    Disabled query and key norms are omitted, and so is a learned scale that the query projection
    absorbs.
    """
    return [
        name
        for name, _ in model.named_parameters()
        if not waits(name, model.layout) and not (plan.is_native and name.endswith("softmax_scale"))
    ]


def exported(model: Decoder, name: str, plan: Plan) -> Tensor:
    """Return one parameter in float32, with query and key channels changed as the plan says."""
    value = model.get_parameter(name).detach()
    if not _changes(model, plan) or _kind(name) not in ("q_proj", "k_proj", "q_norm", "k_norm"):
        return value
    order = _order(model, name, plan)
    heads = value.unflatten(0, (-1, len(order)))[:, order]
    factors = _factors(model, name, plan)
    return (heads * factors.view(*factors.shape, *[1] * (value.dim() - 1))).flatten(0, 1)


@torch.no_grad()
def round_weights(model: Decoder, plan: Plan, dtype: torch.dtype) -> None:
    """Round the decoder's own weights in place, consistently with their exported counterparts."""
    for name in exported_names(model, plan):
        value = model.get_parameter(name)
        if _kind(name) not in ("q_proj", "q_norm") or not _changes(model, plan):
            value.copy_(value.to(dtype))
            continue
        order = torch.tensor(_order(model, name, plan))
        factors = _factors(model, name, plan)[:, order.argsort()]
        factors = factors.view(*factors.shape, *[1] * (value.dim() - 1))
        heads = value.unflatten(0, (-1, len(order)))
        value.copy_(((heads * factors).to(dtype) / factors).flatten(0, 1))


def _changes(model: Decoder, plan: Plan) -> bool:
    """Whether the plan changes the weights of queries and keys."""
    return bool(plan.changes) or _folds(model, plan)


def _folds(model: Decoder, plan: Plan) -> bool:
    """Whether the query projection absorbs a learned softmax scale."""
    return plan.is_native and model.config.softmax.learned_scale


def _order(model: Decoder, name: str, plan: Plan) -> list[int]:
    """Return the index of our channel for each exported channel."""
    size = model.config.head_size
    return list(plan.changes[_layer(name)].order if plan.changes else range(size))


def _factors(model: Decoder, name: str, plan: Plan) -> Tensor:
    """Return ``[1 or Hq, head_dim]`` factors on the last weight of the queries: their norm's gain,
    if any."""
    index = _layer(name)
    last = "q_norm" if model.layout.layers[index].qk_norm else "q_proj"
    factors = torch.ones(1, model.config.head_size)
    if _kind(name) != last:
        return factors
    if plan.changes:
        factors = factors * torch.tensor(plan.changes[index].factors)
    if _folds(model, plan):
        scale = model.get_parameter(f"layers.{index}.self_attn.softmax_scale").detach()
        factors = factors * scale[:, None]
    return factors


def _kind(name: str) -> str:
    return name.split(".")[-2]


def _layer(name: str) -> int:
    return int(name.split(".")[1])


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
    for names, file in zip(shards, files, strict=True):
        _write_file(model, plan, names, directory / file, dtype)
    places = {
        published(name): file for names, file in zip(shards, files, strict=True) for name in names
    }
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def published(name: str) -> str:
    """Return a parameter's name in Hugging Face's Llama."""
    return name if name.startswith("lm_head") else f"model.{name}"


def _write_file(model: Decoder, plan: Plan, names: Sequence[str], path: Path, dtype: str) -> None:
    tensors = {
        published(name): exported(model, name, plan).to(DTYPES[dtype]).contiguous()
        for name in names
    }
    # save_file restricts the file to its owner; restore the usual permissions.
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
