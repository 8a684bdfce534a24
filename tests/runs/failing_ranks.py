"""Two ranks, of which the second fails alone: ``torchrun --nproc-per-node=2 failing_ranks.py``."""

import os

import torch.distributed as dist

from trainer.commands.exit_codes import exit_codes, leaving_ranks
from trainer.runs.config import RunConfig, StrategyConfig
from trainer.runs.ranks import process_group


def destroy():
    """In the place of NCCL's, which waits for peers that sit in a collective."""
    print("waits", flush=True)
    os._exit(9)


dist.destroy_process_group = destroy
with (
    leaving_ranks(),
    exit_codes(),
    process_group(RunConfig(strategy=StrategyConfig("ddp"))) as ranks,
):
    if not ranks.is_rank_zero:
        raise RuntimeError("CUDA out of memory")
    dist.barrier()
