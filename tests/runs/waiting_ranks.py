"""Two ranks, of which the first is slow: ``torchrun --nproc-per-node=2 waiting_ranks.py``."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.common.errors import UserError
from trainer.runs.config import LoggerConfig, RunConfig, StrategyConfig
from trainer.runs.ranks import (
    check_same_device,
    init_distributed,
    limit_collectives,
    on_rank_zero,
)
from trainer.training import loggers
from trainer.training.devices import set_threads

config = RunConfig(
    strategy=StrategyConfig("ddp"), logger=LoggerConfig(wandb=True, offline=True), run_dir="."
)
ranks = init_distributed(config)
set_threads(config, ranks)
print("threads:", torch.get_num_threads())
limit_collectives(0.2)
print("alone:", on_rank_zero(lambda: time.sleep(1) or "done"))

try:
    on_rank_zero(Path("nowhere").stat)
except UserError as error:
    print("disk:" if error.is_transient else "mistake:", error)

check_same_device("cuda")
try:
    check_same_device("cuda" if ranks.is_rank_zero else "cpu")
except UserError as error:
    print("device:" if error.is_transient else "mistake:", error)

if not ranks.is_rank_zero:
    loggers.wandb_id = None  # nobody else may call it
print("dashboard:", loggers.other_loggers(config)[0].version)
print("file:", Path("wandb_id").absolute(), flush=True)

if ranks.is_rank_zero:
    time.sleep(1)
    print("collective: late", flush=True)
else:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        print("collective: gave up", flush=True)
os._exit(0)  # the group is broken
