"""Running statistics of training steps, kept on the device until they are logged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runs.metrics_file import BUCKETS

WINDOW = 128
"""Previous steps whose mean and standard deviation define a spike."""
DEVIATIONS = 6.0
"""Standard deviations above the mean from which a value is a spike."""


class Spikes:
    """Counter of values far above the last :data:`WINDOW` ones.

    NaN and infinity are no spikes (their step is skipped) and are not remembered.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.count: Tensor | float = 0.0
        self._last: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Compare ``values`` ``[kinds]`` of a step with those of earlier steps."""
        if self._last is None:
            self._last = values.new_zeros(WINDOW, len(values))
        self._last = self._last.to(values.device)
        mean = self._last.mean(dim=0)
        finite = values.isfinite()
        if self.seen >= WINDOW:
            far = values > mean + DEVIATIONS * self._last.std(dim=0)
            self.count = self.count + (far & finite).float()
        self._last[self.seen % WINDOW] = torch.where(finite, values, mean)
        self.seen += 1

    def state(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint."""
        last = None if self._last is None else self._last.tolist()
        count = self.count.tolist() if isinstance(self.count, Tensor) else self.count
        return {"seen": self.seen, "count": count, "last": last}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Resume from :meth:`state`."""
        self.seen = state["seen"]
        self._last = None if state["last"] is None else torch.tensor(state["last"], device=device)
        self.count = torch.tensor(state["count"], device=device)


class Tally:
    """Losses, weights, skipped updates and spikes.

    Only :meth:`read`, :meth:`skipped_in_a_row` and :meth:`state` cause a host sync.
    """

    def __init__(self) -> None:
        self.spikes = Spikes()
        self._micro: list[Tensor] = []
        self._sums: Tensor | None = None  # loss and weight, in total and per bucket
        self._loss: Tensor | float = 0.0
        self._steps: Tensor | float = 0.0
        self._skipped: Tensor | float = 0.0
        self._in_a_row: Tensor | float = 0.0
        self._gradient_norm: Tensor | float = float("nan")

    def add(self, losses: Tensor, weights: Tensor) -> None:
        """Add a micro-batch: losses of its tokens and their weights, both ``[B, T]`` float32."""
        weighted = torch.stack([losses * weights, weights]).mean(dim=1)
        parts = [part.mean(dim=1) for part in weighted.tensor_split(BUCKETS, dim=1)]
        self._micro.append(torch.stack([weighted.mean(dim=1), *parts]))

    def end_step(self) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the step and the mean weight of its tokens, over all ranks."""
        sums = mean_over_ranks(torch.stack(self._micro).mean(dim=0))
        self._micro = []
        loss, weight = sums[0, 0] / sums[0, 1], sums[0, 1]
        finite = loss.isfinite()
        self._loss = self._loss + torch.where(finite, loss, 0.0)
        self._steps = self._steps + finite.float()
        sums = torch.where(finite, sums, 0.0)
        self._sums = sums if self._sums is None else self._sums + sums
        return loss, weight

    def end_update(self, loss: Tensor, gradient_norm: Tensor, skipped: Tensor) -> None:
        """Add the update of a step."""
        self.spikes.add(torch.stack([loss, gradient_norm]))
        self._gradient_norm = gradient_norm
        self._skipped = self._skipped + skipped.float()
        self._in_a_row = torch.where(skipped, self._in_a_row + 1.0, 0.0)

    def read(self) -> dict[str, float]:
        """Return the values to log; reset losses and spikes.

        These are the mean loss in total and by position in the sequence (NaN if no step was
        finite), the last gradient norm, the updates skipped since the start, and the share of steps
        whose loss or gradient norm was a spike.
        """
        loss, steps, norm, skipped = _numbers(
            self._loss, self._steps, self._gradient_norm, self._skipped
        )
        spikes = torch.as_tensor(self.spikes.count).expand(2).tolist()
        buckets = {}
        if self._sums is not None:
            values = (self._sums[1:, 0] / self._sums[1:, 1]).tolist()
            buckets = {f"loss/quarter_{i}": value for i, value in enumerate(values, 1)}
        mean = loss / steps if steps else float("nan")
        self._loss = self._steps = self.spikes.count = 0.0
        self._sums = None
        return {
            "loss": mean,
            **buckets,
            "gradient_norm": norm,
            "skipped_steps": int(skipped),
            "loss_spikes": spikes[0] / max(steps, 1),
            "gradient_spikes": spikes[1] / max(steps, 1),
        }

    def skipped_in_a_row(self) -> int:
        """Return the number of consecutive skipped updates, up to the last one."""
        return int(self._in_a_row)

    def state(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint between two logged rows."""
        keys = ("_loss", "_steps", "_skipped", "_in_a_row")
        values = _numbers(*(getattr(self, key) for key in keys))
        sums = None if self._sums is None else self._sums.tolist()
        return {
            **dict(zip(keys, values, strict=True)),
            "_sums": sums,
            "spikes": self.spikes.state(),
        }

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Resume from :meth:`state`."""
        for key, value in state.items():
            if key == "spikes":
                self.spikes.load(value, device)
            else:
                setattr(self, key, None if value is None else torch.tensor(value, device=device))


def mean_over_ranks(x: Tensor) -> Tensor:
    """Average in place, without the barrier of Lightning's version, which causes a host sync."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def _numbers(*values: Tensor | float) -> list[float]:
    """Return all values in one transfer from the device."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if tensors:
        found = iter(torch.stack([t.double() for t in tensors]).tolist())
        return [next(found) if isinstance(v, Tensor) else float(v) for v in values]
    return [float(v) for v in values]
