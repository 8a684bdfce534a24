"""Distribution of a decoder over devices, applied from outside.

Order: activation checkpointing, compilation of each block, sharding.
"""

from functools import lru_cache, partial
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.model.decoder import Decoder

StrategyName = Literal["single", "ddp", "fsdp2", "hsdp"]
SHARDED = "fsdp2", "hsdp"
"""Strategies with which a rank has only a part of the weights."""


def parallelize(
    model: Decoder,
    device: torch.device,
    strategy: StrategyName = "single",
    *,
    half: bool = False,
    shard_size: int | None = None,
    activation_checkpointing: Literal["none", "selective", "full"] = "none",
    compile: bool = False,
) -> None:
    """Distribute a decoder from the meta device and allocate its weights.

    Args:
        model: decoder on the meta device.
        device: device of this process.
        strategy: ``fsdp2`` shards over all ranks, ``hsdp`` within groups of ``shard_size`` ranks.
        half: compute in bfloat16; weights, reductions and optimizer state are float32.
        shard_size: ranks that share one copy of the parameters, for ``hsdp``; None: all ranks.
        activation_checkpointing: what backward recomputes: nothing, all but products, whole blocks.
        compile: compile every block; ``ddp`` sets ``torch._dynamo.config.optimize_ddp`` to False.
    """
    for block in model.layers:
        checkpoint_activations(block, activation_checkpointing)
        if compile:
            block.compile()
    if compile and strategy == "ddp":
        # torch would cut blocks where DDP's buckets end; reductions overlap between blocks anyway.
        torch._dynamo.config.optimize_ddp = False
    if strategy in SHARDED:
        group = shard_size if strategy == "hsdp" else None
        shard(model, mesh_of_ranks(device, group), half)
    model.to_empty(device=device)
    model.compute_dtype = torch.bfloat16 if half else None


def mesh_of_ranks(device: torch.device, shard_size: int | None = None) -> DeviceMesh:
    """Return the mesh of all ranks ``[shard]``, or of groups of them ``[replicate, shard]``."""
    ranks = dist.get_world_size()
    shape = (ranks,) if shard_size is None else (ranks // shard_size, shard_size)
    return _mesh(dist.group.WORLD, device.type, shape)


@lru_cache(maxsize=1)
def _mesh(world: object, device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Create a mesh once for all runs of a job.

    The communicators of its groups take memory. ``world`` distinguishes jobs in one process.
    """
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def shard(model: Decoder, mesh: DeviceMesh, half: bool) -> None:
    """Apply FSDP2 to every block, then to the model; ``half``: weights are gathered in bf16."""
    dtypes: dict[str, Any] = {}
    if half:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    # Inputs keep their dtypes: token weights are float32, and embeddings output bf16.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False, **dtypes)
    for block in model.layers:
        # Keep the last one unsharded: backward needs it first.
        is_last = block is model.layers[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_last)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for method in ("loss", "token_losses"):
        register_fsdp_forward_method(model, method)


def shard_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return a value that is on the CPU and the same on every rank, sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    whole = whole.to(mesh.device_type)
    # No rank needs to send its value.
    return distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)


def whole_model(model: Decoder) -> Decoder:
    """Return a copy of a sharded decoder with whole parameters, or another decoder as it is.

    Ranks may then do different forward passes. All ranks call this together.
    """
    if not isinstance(model, FSDPModule):
        return model
    with torch.device("meta"):
        copy = Decoder(model.config, model.layout).to(dtype=model.compute_dtype)
    copy.to_empty(device=model.device)
    copy.compute_dtype = model.compute_dtype
    shards: dict[str, Any] = dict(model.named_parameters())
    copy.fill(lambda name, _: shards[name].full_tensor())
    return copy


def checkpoint_activations(block: nn.Module, kind: str) -> None:
    """Recompute a block's activations in backward: all, or all but its expensive products."""
    if kind == "none":
        return
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    plain_forward = block.forward

    # Bind a method: torch.compile silently captures nothing of a partial.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain_forward, *args, use_reentrant=False, **options, **kwargs)

    block.forward = MethodType(forward, block)


EXPENSIVE = ("aten.mm", "aten.addmm", "attention", "flash_attn")
"""Parts of the names of operators whose results are not computed again."""


def _keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keep the results of matrix products and attention; recompute norms, rotations and SwiGLU."""
    is_expensive = any(part in str(operator) for part in EXPENSIVE)
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE
