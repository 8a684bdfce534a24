"""Agreement of ranks at every step without a host sync."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainer.runs.ranks import waiting_group


class Vote:
    """Vote on whether any rank wants something.

    The result is known one step later on all ranks, so that communication overlaps with
    computation; immediately with a single rank.
    """

    def __init__(self) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._cast: tuple[torch.Tensor, Any] | None = None

    def agreed(self, mine: bool) -> bool:
        """Cast this step's vote and return the previous step's result; all ranks call this every
        step."""
        if self._alone:
            return mine
        agreed = False
        if self._cast is not None:
            votes, work = self._cast
            work.wait()
            agreed = bool(votes.item())
        votes = torch.tensor([float(mine)])
        self._cast = votes, dist.all_reduce(votes, group=waiting_group(), async_op=True)
        return agreed
