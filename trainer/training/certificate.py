"""Certificate of the tokens read by a run, as a sum over ranks and steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.order import as_text


class Certificate:
    """Sums of sample hashes on the device, modulo 2^64: over all steps, and over the last one.

    Only :meth:`state` causes a host sync.
    """

    def __init__(self) -> None:
        self._before, self._last = 0, 0
        self._sums: Tensor | None = None

    def add(self, hashes: Tensor, begins_step: bool) -> None:
        """Add a micro-batch's sample hashes ``[B]``, int64."""
        mine = hashes.sum()
        if self._sums is None:
            self._sums = mine.new_zeros(2)
        last = mine if begins_step else self._sums[1] + mine
        self._sums = torch.stack([self._sums[0] + mine, last])

    def state(self) -> dict[str, Any]:
        """Return both sums over all ranks, for a checkpoint; all ranks call this together."""
        total, last = 0, self._last
        if self._sums is not None:
            sums = self._sums.clone()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(sums)
            total, last = sums.tolist()
        return {"samples": as_text(self._before + total), "last_step": as_text(last)}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state`; the stored sum is known to every rank and added once."""
        self._before, self._last = (int(state[key], 16) for key in ("samples", "last_step"))
