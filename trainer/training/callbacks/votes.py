"""What ranks agree on at every step without waiting for a device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainer.runs.ranks import waiting_group


class Vote:
    """Whether any rank wants something: known one step later on all, so that the vote has travelled
    while the step was computed; at once where there is one rank."""

    def __init__(self) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._cast: tuple[torch.Tensor, Any] | None = None

    def agreed(self, mine: bool) -> bool:
        """Cast this step's vote, and count that of the step before; all ranks call it at every
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
