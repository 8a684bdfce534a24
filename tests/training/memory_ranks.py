"""What a rank's second update allocates: ``torchrun --nproc-per-node=2 memory_ranks.py KIND``."""

import sys

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.training.test_rehearsal import SHAPE, configured
from trainer.model import linear
from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.training.rehearsal import rank_of, update

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
    with record_function("second"):
        update(module, optimizer, SHAPE)
shutdown_distributed()
events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
(begin,) = (event.start_ns() for event in events if event.name() == "second")
now = peak = 0
for event in events:
    if event.name() == "[memory]":
        now += event.nbytes()
        peak = max(peak, now) if event.start_ns() >= begin else peak
print("peak", peak)
