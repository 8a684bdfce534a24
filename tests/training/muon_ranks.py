"""Ranks that orthogonalise matrices: ``torchrun --nproc-per-node=4 muon_ranks.py``."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainer.runs.config import RunConfig, StrategyConfig
from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.training.optimizers import newton_schulz, orthogonal, ranks_of

ranks = init_distributed(RunConfig(strategy=StrategyConfig("fsdp2")))
mesh = init_device_mesh("cpu", (ranks.world_size,))
nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
torch.manual_seed(0)
whole = [torch.randn(shape) for shape in ((7, 5), (2, 4), (9, 3), (3, 3))]
for count in (4, 2, 1):  # as many as ranks, and fewer
    shards = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in whole[:count]]
    for matrix, update in zip(whole, orthogonal(shards, ranks_of(shards[0])), strict=False):
        print(torch.equal(update.full_tensor(), newton_schulz(matrix)))
    for matrix, update in zip(whole, orthogonal(whole[:count], ranks_of(whole[0])), strict=False):
        print(torch.equal(update, newton_schulz(matrix)))
for count in (2, 1):  # each node has all shards, and exchanges them within itself
    shards = [distribute_tensor(m, nodes, [Replicate(), Shard(0)]) for m in whole[:count]]
    for matrix, update in zip(whole, orthogonal(shards, ranks_of(shards[0])), strict=False):
        print(torch.equal(update.full_tensor(), newton_schulz(matrix)))
shutdown_distributed()
