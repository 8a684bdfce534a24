"""What a rank's update allocates after the first: ``torchrun --nproc-per-node=2 memory_ranks.py
KIND``. The least of several: where a rank waits for the other, buffers of both steps are there."""

import sys

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.training.test_rehearsal import SHAPE, configured
from trainer.model import linear
from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.training.rehearsal import rank_of, update

UPDATES = 6
linear.MKL_IS_SLOW = False  # as on a GPU: oneDNN copies what it multiplies
config = configured(sys.argv[1])
ranks = init_distributed(config)
torch.set_num_threads(1)
with (
    rank_of(config, ranks) as module,
    profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
):
    module.configure_model()
    optimizer = module.configure_optimizers()
    update(module, optimizer, SHAPE)
    for number in range(UPDATES):
        with record_function(f"update {number}"):
            update(module, optimizer, SHAPE)
shutdown_distributed()
events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
now, peaks = 0, []
for event in events:
    if event.name().startswith("update "):
        peaks.append(now)
    elif event.name() == "[memory]":
        now += event.nbytes()
        if peaks:
            peaks[-1] = max(peaks[-1], now)
print("peak", min(peaks))
