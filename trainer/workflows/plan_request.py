"""What ``plan`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.common.errors import Problem
from trainer.runs.config import RunConfig


@dataclass(frozen=True)
class PlanRequest:
    """A run on ``ranks`` GPUs, ``on_a_node`` of them on each node.

    ``gpu``: a key of :data:`trainer.workflows.plan.GPUS`. ``mfu``: share of the dense peak.
    ``exact``: memory from all layers. ``missing``: what was found to be missing already.
    """

    config: RunConfig
    ranks: int
    on_a_node: int
    gpu: str
    mfu: float
    exact: bool = False
    missing: tuple[Problem, ...] = ()
