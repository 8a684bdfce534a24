"""What a run has read, as a sum over ranks and steps that nothing but the tokens decides."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.order import as_text


class Certificate:
    """Sums the hashes of samples on the device, modulo 2^64: those of all steps, and of the last.

    Nothing here waits for the device but :meth:`state`.
    """

    def __init__(self) -> None:
        self._before, self._last = 0, 0
        self._sums: Tensor | None = None

    def add(self, hashes: Tensor, begins_step: bool) -> None:
        """Count a micro-batch's samples ``[B]``, int64."""
        mine = hashes.sum()
        if self._sums is None:
            self._sums = mine.new_zeros(2)
        last = mine if begins_step else self._sums[1] + mine
        self._sums = torch.stack([self._sums[0] + mine, last])

    def state(self) -> dict[str, Any]:
        """Both sums over all ranks, which have to call this together; for a checkpoint."""
        total, last = 0, self._last
        if self._sums is not None:
            sums = self._sums.clone()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(sums)
            total, last = sums.tolist()
        return {"samples": as_text(self._before + total), "last_step": as_text(last)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`; the sum until then is known to every rank, and added once."""
        self._before, self._last = (int(state[key], 16) for key in ("samples", "last_step"))
