"""Whether a run fits its number of processes."""

from __future__ import annotations

from trainer.runs.arms import arms_of, phase_configs
from trainer.runs.config import RunConfig
from trainer.runs.training_config import StrategyConfig


def spread_problems(config: RunConfig, processes: int, on_a_node: int) -> list[str]:
    """Check a run for this number of processes; return one sentence per problem."""
    run, found = config.trainer, []
    share = processes * (run.micro_batch_size or 1)
    if run.batch_size % share:
        near = max(run.batch_size // share, 1) * share
        found.append(
            f"trainer.batch_size: {run.batch_size} sequences do not divide into micro-batches of "
            f"{run.micro_batch_size or 1} on {processes} ranks; the nearest that does is {near}."
        )
    size = shard_size(config.strategy, processes, on_a_node)
    if config.strategy.name == "hsdp" and processes % size:
        found.append(
            f"strategy.shard_size: {size} does not divide the {processes} ranks; by default it is "
            "the number of ranks on a node."
        )
    return found


def gpus_that_fit(config: RunConfig, nodes: int) -> int:
    """Return how many GPUs per node (at most eight) can share the batches of all phases and
    controls.

    ``nodes``: number of nodes. 1 for the strategy ``single``.
    """
    arms = arms_of(config, weights=False)
    if any(arm.strategy.name == "single" for arm in arms.values()):
        return 1
    configs = [one for _, one in phase_configs(arms)]

    def fits(gpus: int) -> bool:
        return not any(spread_problems(one, nodes * gpus, gpus) for one in configs)

    return next(filter(fits, (8, 4, 2)), 1)


def shard_size(config: StrategyConfig, processes: int, on_a_node: int) -> int:
    """Return the number of ranks that share one copy of the parameters."""
    if config.name == "hsdp":
        return config.shard_size or on_a_node
    return processes
