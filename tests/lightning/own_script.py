"""A Lightning script of somebody's own with several processes: ``own_script.py STRATEGY``.

It trains 12 steps with a drop after 6, and again with a resume from step 4 and from step 9; rank 0
writes the weights of each, by the name of the model.
"""

from __future__ import annotations

import sys

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.lightning.test_drop import Llama, fit, ours


class ShardedLlama(Llama):
    """As Lightning's users shard a model."""

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for part in (*self.model.model.layers, self.model):
                if not isinstance(part, FSDPModule):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])


def weights(module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Return whole weights by name."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in module.named_parameters()
    }


def main(name: str) -> None:
    """Train both models."""
    torch.set_num_threads(1)
    for make in (ours, ShardedLlama):

        def trained(make=make, **options):
            sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
            strategy = ModelParallelStrategy(**sizes) if name == "fsdp2" else name
            return fit(make(), devices=2, strategy=strategy, **options)

        results = [trained()]
        for at in (4, 9):
            path = f"{make.__name__}-{at}.ckpt"
            trained(steps=at, save=path)
            results.append(trained(begin=path))
        assert isinstance(next(results[0].parameters()), DTensor) == (name == "fsdp2")
        found = [weights(module) for module in results]
        if results[0].global_rank == 0:
            torch.save(found, f"{make.__name__}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
