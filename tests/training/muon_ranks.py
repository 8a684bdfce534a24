"""Ranks that orthogonalise matrices: ``torchrun --nproc-per-node=4 muon_ranks.py``."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainer.config import RunConfig, StrategyConfig
from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.training.optimizers import newton_schulz, of_copies, of_shards, ranks_of


def sharded(matrices, mesh, placements):
    """Orthogonalize shards, and return whole matrices."""
    shards = [distribute_tensor(matrix, mesh, placements) for matrix in matrices]
    local = torch.stack([shard.to_local() for shard in shards])
    done = of_shards(local, ranks_of(shards[0]), len(matrices[0]), "cpu")
    assert done.shape == local.shape
    shape, stride = matrices[0].shape, matrices[0].stride()
    return [
        DTensor.from_local(x, mesh, placements, shape=shape, stride=stride).full_tensor()
        for x in done
    ]


ranks = init_distributed(RunConfig(strategy=StrategyConfig("fsdp2")))
mesh = init_device_mesh("cpu", (ranks.world_size,))
nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
torch.manual_seed(0)
for shape in ((7, 5), (2, 4), (9, 3), (8, 8)):  # rows that ranks share unequally, and equally
    for count in (9, 4, 2, 1):  # more matrices than ranks, as many, and fewer
        whole = torch.randn(count, *shape)
        expected = torch.cat([newton_schulz(matrix[None]) for matrix in whole])
        for result in (
            of_copies(whole, ranks_of(whole)),
            torch.stack(sharded(whole, mesh, [Shard(0)])),
            # Each node has all shards, and exchanges them within itself.
            torch.stack(sharded(whole, nodes, [Replicate(), Shard(0)])),
        ):
            print(result.dtype == torch.bfloat16 and torch.equal(result, expected))
shutdown_distributed()
