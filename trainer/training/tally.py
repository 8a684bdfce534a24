"""Sums over training steps that stay on the device until they are logged or saved: no host sync.

:class:`Tally` sums losses, :class:`StepTimer` times the parts of a step.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runs.metrics_file import BUCKETS, PARTS
from trainer.runs.saved_state import SavedSpikes, SavedTally

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

    def state(self) -> SavedSpikes:
        """Return plain numbers for a checkpoint."""
        last = None if self._last is None else self._last.tolist()
        count = self.count.tolist() if isinstance(self.count, Tensor) else self.count
        return SavedSpikes(self.seen, count, last)

    def load(self, state: SavedSpikes, device: torch.device) -> None:
        """Resume from :meth:`state`."""
        self.seen = state.seen
        self._last = None if state.last is None else torch.tensor(state.last, device=device)
        self.count = torch.tensor(state.count, device=device)


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

    def state(self) -> SavedTally:
        """Return plain numbers for a checkpoint between two logged rows."""
        loss, steps, skipped, in_a_row = _numbers(
            self._loss, self._steps, self._skipped, self._in_a_row
        )
        return SavedTally(
            loss=loss,
            steps=steps,
            skipped=skipped,
            skipped_in_a_row=in_a_row,
            sums=None if self._sums is None else self._sums.tolist(),
            spikes=self.spikes.state(),
        )

    def load(self, state: SavedTally, device: torch.device) -> None:
        """Resume from :meth:`state`."""
        self._loss, self._steps, self._skipped, self._in_a_row = (
            torch.tensor(value, device=device)
            for value in (state.loss, state.steps, state.skipped, state.skipped_in_a_row)
        )
        self._sums = None if state.sums is None else torch.tensor(state.sums, device=device)
        self.spikes.load(state.spikes, device)


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
        numbers = iter(torch.stack([t.double() for t in tensors]).tolist())
        return [next(numbers) if isinstance(v, Tensor) else float(v) for v in values]
    return [float(v) for v in values]


class StepTimer:
    """Timer of seconds spent in each of :data:`PARTS` since the last reading.

    :meth:`enter` ends the previous part and begins the named one. On a GPU it records events in the
    stream, which are read later, since the host runs ahead.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._gpu = False

    def enter(self, part: str) -> None:
        """Begin ``part``."""
        if not self._marks:  # the device is known only now
            self._gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
            return
        self._marks.append((part, time.perf_counter()))
        if len(self._marks) > 1:
            self._add()

    def _add(self) -> None:
        for (part, start), (_, end) in pairwise(self._marks):
            if isinstance(start, float) and isinstance(end, float):
                self._totals[part] += end - start
            elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                self._totals[part] += start.elapsed_time(end) / 1000
        self._marks = self._marks[-1:]

    def read(self) -> dict[str, float]:
        """Return the seconds of each part since the last reading."""
        if self._gpu and self._marks:
            last = self._marks[-1][1]
            assert isinstance(last, torch.cuda.Event)
            last.synchronize()
        self._add()
        totals, self._totals = self._totals, dict.fromkeys(PARTS, 0.0)
        return totals
