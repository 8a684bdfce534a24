"""Whether a run fits the processes that are to do it."""

from __future__ import annotations

from trainer.common.errors import Problem
from trainer.runs.arms import arms_of, phase_configs
from trainer.runs.config import RunConfig
from trainer.runs.training_config import StrategyConfig


def spread_problems(config: RunConfig, processes: int, on_a_node: int) -> list[Problem]:
    """What is impossible with that many processes, one sentence each."""
    run, found = config.trainer, []
    share = processes * (run.micro_batch_size or 1)
    if run.batch_size % share:
        near = max(run.batch_size // share, 1) * share
        found.append(
            Problem(
                "trainer.batch_size",
                f"{run.batch_size} sequences do not divide into micro-batches of "
                f"{run.micro_batch_size or 1} on {processes} ranks; the nearest that does is "
                f"{near}.",
            )
        )
    size = shard_size(config.strategy, processes, on_a_node)
    if config.strategy.name == "hsdp" and processes % size:
        found.append(
            Problem(
                "strategy.shard_size",
                f"{size} does not divide the {processes} ranks; by default it is the number of "
                "ranks on a node.",
            )
        )
    return found


def gpus_that_fit(config: RunConfig, nodes: int) -> int:
    """GPUs of a node of eight that the batches of every phase, of the controls too, can be dealt
    out to, over ``nodes`` nodes: one for the strategy ``single``."""
    arms = arms_of(config, weights=False)
    if any(arm.strategy.name == "single" for arm in arms.values()):
        return 1
    configs = [one for _, one in phase_configs(arms)]

    def fits(gpus: int) -> bool:
        return not any(spread_problems(one, nodes * gpus, gpus) for one in configs)

    return next(filter(fits, (8, 4, 2)), 1)


def shard_size(config: StrategyConfig, processes: int, on_a_node: int) -> int:
    """Ranks that share one copy of the parameters."""
    if config.name == "hsdp":
        return config.shard_size or on_a_node
    return processes
