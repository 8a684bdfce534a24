"""How a run spreads over devices: everything is applied to the decoder here, from outside.

The order matters: activation checkpointing, then compilation of each block, then sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
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

from trainer.interchange.pretrained import Pretrained
from trainer.model.decoder import Decoder
from trainer.model.initialization import initial_value
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks, device_of, limit_collectives
from trainer.runs.spread import shard_size
from trainer.runs.training_config import StrategyConfig
from trainer.training.lightning_internals import join_process_group

SHARDED = ("fsdp2", "hsdp")


class Uncopied(Strategy):
    """In the end weights and the optimizer's state stay where they are, for the hooks that follow:
    Lightning would copy them to the host, of all ranks of a node at once."""

    def teardown(self) -> None:
        """As Lightning's, without the copies; see :func:`releasing`."""
        self.model = self.lightning_module
        for part in (
            getattr(self, "cluster_environment", None),  # of several processes
            self.precision_plugin,
            self.accelerator,
            self.checkpoint_io,
        ):
            if part is not None:
                part.teardown()


class Single(Uncopied, SingleDeviceStrategy):
    """One process on one device."""


class Replicated(Uncopied, DDPStrategy):
    """DDP."""


class Sharded(Uncopied, ModelParallelStrategy):
    """FSDP2; the model has been put where it belongs when Lightning sees it."""

    def setup_environment(self) -> None:
        """Join the process group without Lightning's mesh, whose groups nothing destroys."""
        join_process_group(self)

    def model_to_device(self) -> None:
        """With offloading the parameters stay on the CPU."""


@contextmanager
def releasing(module: nn.Module, strategy: Strategy) -> Iterator[None]:
    """Afterwards what training has held is given up, which its checkpoint has: the trainer and all
    it refers to are a circle, and else hold it until the next collection."""
    try:
        yield
    finally:
        for optimizer in strategy.optimizers:
            optimizer.state.clear()
        module.to("meta")


def lightning_strategy(config: RunConfig, ranks: Ranks) -> Strategy:
    """Lightning's side of the configured strategy."""
    if config.strategy.name == "single":
        return Single(device_of(config, ranks))
    if config.strategy.name == "ddp":
        return Replicated(gradient_as_bucket_view=True, broadcast_buffers=False)
    return Sharded(data_parallel_size=ranks.world_size, tensor_parallel_size=1)


def parallelize(
    model: Decoder,
    config: RunConfig,
    ranks: Ranks,
    device: torch.device,
    pretrained: Pretrained | None = None,
    draw: bool = True,
) -> None:
    """Prepare a decoder made on the meta device, and put its weights where they belong: those of
    ``pretrained``, or freshly drawn ones; without ``draw`` none yet, but the place for them."""
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
        limit_collectives(config.strategy.timeouts.start)  # new groups have torch's limit
        shard(model, config, mesh)
        home = torch.device("cpu") if config.strategy.cpu_offload else device
    model.to_empty(device=home)
    half = config.trainer.precision == "bf16"
    model.choose_products(device.type, torch.bfloat16 if half else None)
    if draw:
        draw_weights(model, config.seed, pretrained)


def device_mesh(config: StrategyConfig, ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Ranks as ``[replicate, shard]``, or ``[shard]`` alone."""
    size = shard_size(config, ranks.world_size, ranks.local_size)
    if config.name == "hsdp":
        shape: tuple[int, ...] = (ranks.world_size // size, size)
        return _mesh(dist.group.WORLD, device.type, shape, ("replicate", "shard"))
    return _mesh(dist.group.WORLD, device.type, (size,), ("shard",))


@lru_cache(maxsize=1)
def _mesh(
    world: object, device_type: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    """Kept for all stretches and controls of a job: each mesh makes groups of its own, with the
    memory of their communicators. ``world``: the ranks, for another job in the same process."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def shard(model: Decoder, config: RunConfig, mesh: DeviceMesh) -> None:
    """FSDP2 on every block and on what is left; gathers weights in bf16 where the run computes in
    it, and keeps weights, reductions and optimizer in float32."""
    half = config.trainer.precision == "bf16"
    options: dict[str, Any] = {
        "mesh": mesh,
        # Inputs keep their types: token weights are float32, embeddings come in bf16 by themselves.
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
        # Backward begins with the last one: given back, it would be gathered again at once.
        fully_shard(block, reshard_after_forward=block is not model.layers[-1], **options)
    fully_shard(model, **options)
    for method in ("loss", "token_losses"):
        register_fsdp_forward_method(model, method)


@torch.no_grad()
def draw_weights(model: Decoder, seed: int, pretrained: Pretrained | None = None) -> None:
    """Fill every parameter with the values it has on a single device, or with its shard of them.

    What ``pretrained`` lacks, query and key norms that wait for the drop, is drawn.
    """
    for name, parameter in model.named_parameters():
        if pretrained is not None and name in pretrained.tensors:
            value = torch.empty(parameter.shape)
            pretrained.tensors[name].read_into(value)
        else:
            value = initial_value(model.config, name, parameter.shape, seed)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # Every rank has the same values, so none has to be sent.
            value = distribute_tensor(
                value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
            ).to(parameter.to_local().device)
        parameter.copy_(value)


def reduces_once_a_step(model: nn.Module, kind: str, memory: int | None) -> bool:
    """Whether whole gradients of a sharded model, float32, stay on every rank until a step ends.

    Args:
        model: its parameters.
        kind: ``strategy.reduce_gradients``.
        memory: bytes of the device; None: of a CPU, which has enough.
    """
    if kind != "auto":
        return kind == "step"
    return memory is None or 4 * sum(p.numel() for p in model.parameters()) <= memory / 10


def synchronize_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward of a sharded model reduces gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


def reshard(model: nn.Module) -> None:
    """Give the whole parameters of a sharded model back after a forward pass without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(model: Decoder) -> Iterator[None]:
    """Within it every rank has the whole parameters of a sharded model, in the type it computes in,
    so that ranks may do other forward passes than each other. All ranks enter and leave it."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        yield
        return
    begin = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.token_losses(begin, begin)  # before a first pass of the whole its parts know no root
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


def checkpoint_activations(block: nn.Module, kind: str) -> None:
    """Recompute a block's activations in backward: all, or all but its expensive products."""
    if kind == "none":
        return
    more: dict[str, Any] = {}
    if kind == "selective":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    once = block.forward

    # A method and not a partial, of which torch.compile captures nothing, without a word.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(once, *args, use_reentrant=False, **more, **kwargs)

    block.forward = MethodType(forward, block)


EXPENSIVE = ("aten.mm", "aten.addmm", "onednn_product", "attention", "flash_attn", "varlen_attn")
"""Parts of the names of operators whose results are not computed again."""


def _keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Results of matrix products and attention are kept; norms, rotations and SwiGLU are not."""
    name = str(operator)
    kept = any(part in name for part in EXPENSIVE)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
