"""Two ranks whose clocks differ: ``torchrun --nproc-per-node=2 timed_ranks.py``."""

from tests.training.test_timed_checkpoints import steps_saved
from trainer.runs.config import RunConfig, StrategyConfig
from trainer.runs.ranks import init_distributed, shutdown_distributed

ranks = init_distributed(RunConfig(strategy=StrategyConfig("ddp")))
print(steps_saved(5, 12, ranks, clock=1.0 if ranks.is_rank_zero else 9.0))
shutdown_distributed()
