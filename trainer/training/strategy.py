"""Distribution of a run over devices, applied to the decoder from outside.

Order: float8 products, activation checkpointing, compilation of each block, sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.config import RunConfig, StrategyConfig
from trainer.interchange.pretrained import Pretrained
from trainer.model.decoder import Decoder, initial_value
from trainer.runs.arms import shard_size
from trainer.runs.ranks import Ranks, all_gather

SHARDED = ("fsdp2", "hsdp")


def parallelize(
    model: Decoder,
    config: RunConfig,
    ranks: Ranks,
    device: torch.device,
    pretrained: Pretrained | None = None,
    draw: bool = True,
) -> None:
    """Distribute a decoder from the meta device and initialize its weights.

    Weights come from ``pretrained`` or are drawn; without ``draw`` they are only allocated.
    """
    if config.trainer.fp8:
        multiply_in_float8(model)
    for block in model.layers:
        checkpoint_activations(block, config.strategy.activation_checkpointing)
        if config.trainer.compile:
            block.compile()
    if config.trainer.compile:
        # torch would cut blocks where DDP's buckets end; reductions overlap between blocks anyway.
        torch._dynamo.config.optimize_ddp = False
    home = device
    if config.strategy.name in SHARDED:
        mesh = device_mesh(config.strategy, ranks, device)
        shard(model, config, mesh)
        home = torch.device("cpu") if config.strategy.cpu_offload else device
    model.to_empty(device=home)
    half = config.trainer.precision == "bf16"
    model.compute_dtype = torch.bfloat16 if half else None
    if draw:
        draw_weights(model, config.seed, pretrained)


def device_mesh(config: StrategyConfig, ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the mesh of ranks: ``[replicate, shard]``, or ``[shard]`` alone."""
    size = shard_size(config, ranks.world_size, ranks.local_size)
    if config.name == "hsdp":
        shape: tuple[int, ...] = (ranks.world_size // size, size)
        return _mesh(dist.group.WORLD, device.type, shape, ("replicate", "shard"))
    return _mesh(dist.group.WORLD, device.type, (size,), ("shard",))


@lru_cache(maxsize=1)
def _mesh(
    world: object, device_type: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    """Create a mesh once for all stretches and controls of a job.

    Each mesh creates process groups with communicators that take memory. ``world`` distinguishes
    several jobs in one process.
    """
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def shard(model: Decoder, config: RunConfig, mesh: DeviceMesh) -> None:
    """Apply FSDP2 to every block, then to the whole model.

    Weights are gathered in bf16 if the run computes in bf16; weights, reductions and optimizer
    state are float32.
    """
    half = config.trainer.precision == "bf16"
    options: dict[str, Any] = {
        "mesh": mesh,
        # Inputs keep their dtypes: token weights are float32, and embeddings output bf16.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if config.strategy.cpu_offload
        else OffloadPolicy(),
    }
    for block in model.layers:
        # Keep it unsharded: backward needs it first.
        fully_shard(block, reshard_after_forward=block is not model.layers[-1], **options)
    fully_shard(model, **options)
    for method in ("loss", "token_losses"):
        register_fsdp_forward_method(model, method)


@torch.no_grad()
def draw_weights(model: Decoder, seed: int, pretrained: Pretrained | None = None) -> None:
    """Fill every parameter, or its shard, with the values it has on a single device.

    Parameters missing from ``pretrained``, the query and key norms that wait for a drop, are drawn.
    """
    for name, parameter in model.named_parameters():
        if pretrained is not None and name in pretrained.tensors:
            value = torch.empty(parameter.shape)
            pretrained.tensors[name].read_into(value)
        else:
            value = initial_value(model.config, name, parameter.shape, seed)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # Every rank has the same values, so none need to be sent.
            value = distribute_tensor(
                value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
            ).to(parameter.to_local().device)
        parameter.copy_(value)


def least_memory(device: torch.device) -> int | None:
    """Return the bytes of the smallest GPU of all ranks, or None on a CPU; all call this together.

    GPUs may differ. If each rank decided by its own memory, ranks would wait in different
    collectives.
    """
    if device.type != "cuda":
        return None
    return min(all_gather(torch.cuda.get_device_properties(device).total_memory))


def reduces_once_a_step(model: nn.Module, kind: str, memory: int | None) -> bool:
    """Whether unsharded float32 gradients stay on every rank until a step ends.

    ``kind``: value of ``strategy.reduce_gradients``. ``memory``: bytes of the smallest device; None
    for a CPU, which has enough.
    """
    if kind != "auto":
        return kind == "step"
    return memory is None or 4 * sum(p.numel() for p in model.parameters()) <= memory / 10


def synchronize_gradients(model: nn.Module, scatter: bool, last: bool) -> None:
    """Set whether the next backward pass of a sharded model reduces gradients to shards.

    ``last``: whether it is the last one of the step, after which ``hsdp`` adds up shards of all
    groups.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(scatter)
        model.set_requires_all_reduce(last)


def reshard(model: nn.Module) -> None:
    """Reshard parameters after a forward pass without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(model: Decoder) -> Iterator[None]:
    """Keep the parameters of a sharded model gathered within the block, in the compute dtype.

    Ranks may then do different forward passes. All ranks enter and leave the block together.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        yield
        return
    begin = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.token_losses(begin, begin)  # a first pass through the model registers the root
    try:
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for block in model.layers:
            if isinstance(block, FSDPModule):
                block.set_reshard_after_forward(block is not model.layers[-1], recurse=False)
        reshard(model)


def multiply_in_float8(model: Decoder) -> None:
    """Replace the linear layers of all blocks by torchao's; parameters and their names stay.

    Forward and backward passes then multiply in float8. Every row of an operand has its own scale.
    With one scale for all, the loss of a token would depend on the rest of its batch.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model.layers, config=recipe)


def checkpoint_activations(block: nn.Module, kind: str) -> None:
    """Recompute a block's activations in backward: all, or all but its expensive products."""
    if kind == "none":
        return
    more: dict[str, Any] = {}
    if kind == "selective":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    once = block.forward

    # Bind a method: torch.compile silently captures nothing of a partial.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(once, *args, use_reentrant=False, **more, **kwargs)

    block.forward = MethodType(forward, block)


EXPENSIVE = ("aten.mm", "aten.addmm", "onednn_product", "attention", "flash_attn", "varlen_attn")
"""Parts of the names of operators whose results are not computed again."""


def _keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keep the results of matrix products and attention; recompute norms, rotations and SwiGLU."""
    is_expensive = any(part in str(operator) for part in EXPENSIVE)
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE
