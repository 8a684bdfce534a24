"""Progress of long work: a live bar on a terminal, a line at every tenth of the work elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

console = Console(stderr=True)
"""Console shared by progress and log, so that a log line does not break the bar."""

LONGEST_SILENCE = 300.0
"""Seconds after which a line is printed before the next tenth."""


class Progress:
    """Progress of ``total`` steps of ``tokens_per_step`` tokens; use as a context manager.

    ``silent`` shows nothing, for all ranks but the first.
    """

    def __init__(
        self, title: str, total: float, tokens_per_step: float = 1.0, silent: bool = False
    ) -> None:
        self.title, self.total, self.tokens_per_step = title, total, tokens_per_step
        self.silent = silent
        self.bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f}%  {task.fields[details]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task(title, total=total, details="")
        self.start_step: float | None = None
        self.start_time = self.last_line = 0.0
        self.last_tenth = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def advance_to(
        self, step: float, loss: float | None = None, tokens: float | None = None
    ) -> None:
        """Show that ``step`` of ``total`` is reached; the first call sets the starting step.

        ``tokens``: number read since the first call, if steps differ in length.
        """
        step = min(step, self.total)  # an estimate of the total may be too low
        now, tenth = time.perf_counter(), int(10 * step / self.total)
        if self.start_step is None:
            self.start_step, self.start_time, self.last_tenth = step, now, tenth
            self.last_line = now
        if self.silent:
            return
        elapsed, done = now - self.start_time, step - self.start_step
        read = done * self.tokens_per_step if tokens is None else tokens
        details = f"{read / elapsed:,.0f} tokens/s" if done and elapsed > 0 else ""
        if loss is not None:
            details = f"loss {loss:.3f}  {details}"
        if console.is_terminal:
            self.bar.start()
            self.bar.update(self.task, completed=step, details=details)
        elif done and (tenth > self.last_tenth or now - self.last_line > LONGEST_SILENCE):
            self.last_tenth, self.last_line = tenth, now
            left = elapsed / done * (self.total - step)
            line = f"{self.title}  {int(100 * step / self.total)}%  {details}  {left:.0f} s left"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
