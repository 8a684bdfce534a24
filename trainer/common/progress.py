"""Progress of long work: a live bar on a terminal, lines of text elsewhere.

A line is printed at every tenth of the work. Between tenths, one is printed after half a minute
and then less and less often, but at least every ten minutes, and before a quarter of the time that
the last one announced has passed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

console = Console(stderr=True)
"""Console shared by progress and log, so that a log line does not break the bar."""

FIRST_LINE, LONGEST_SILENCE = 30.0, 600.0
"""Seconds to the first line, and the longest time between lines, without a terminal."""


class Progress:
    """Progress of ``total`` steps of ``tokens_per_step`` tokens; use as a context manager.

    ``silent`` shows nothing, for all ranks but the first. ``after``: seconds of work before
    anything is shown. ``unit``: what is counted in place of tokens.
    """

    def __init__(
        self,
        title: str,
        total: float,
        tokens_per_step: float = 1.0,
        silent: bool = False,
        after: float = 0.0,
        unit: str = "tokens",
    ) -> None:
        self.title, self.total, self.tokens_per_step = title, total, tokens_per_step
        self.silent, self.after, self.unit = silent, after, unit
        self.bar: RichProgress | None = None
        self.start_step: float | None = None
        self.start_time = 0.0
        self.last_tenth = 0
        self.next_line = FIRST_LINE
        self.done = 0.0

    def __enter__(self) -> Progress:
        if not self.after:
            self._start_bar()
        return self

    def _start_bar(self) -> None:
        if self.bar is None and console.is_terminal and not self.silent:
            self.bar = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:3.0f}%  {task.fields[details]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self.bar.start()
            self.bar.add_task(self.title, total=self.total, details="")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, steps: float) -> None:
        """Show that ``steps`` more are done than after the last call."""
        self.done += steps
        self.advance_to(self.done)

    def advance_to(
        self, step: float, loss: float | None = None, tokens: float | None = None
    ) -> None:
        """Show that ``step`` of ``total`` is reached; the first call sets the starting step.

        ``tokens``: number read since the first call, if steps differ in length.
        """
        step = min(step, self.total)  # an estimate of the total may be too low
        now = time.perf_counter()
        if self.start_step is None:
            self.start_step, self.start_time = step, now
            self.last_tenth = int(10 * step / self.total)
        elapsed, done = now - self.start_time, step - self.start_step
        read = done * self.tokens_per_step if tokens is None else tokens
        rate = read / elapsed if elapsed > 0 else 0.0
        details = f"{rate:,.0f} {self.unit}/s" if done else ""
        if loss is not None:
            details = f"loss {loss:.3f}  {details}"
        if elapsed < self.after:
            return
        self._start_bar()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, details=details)
        elif done and not self.silent:
            remaining = elapsed / done * (self.total - step)
            if not self._is_time(step, elapsed, remaining):
                return
            line = (
                f"{self.title}  {int(100 * step / self.total)}%  {details}  {remaining:.0f} s left"
            )
            with suppress(OSError):  # a full disk must not stop the work
                console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _is_time(self, step: float, elapsed: float, remaining: float) -> bool:
        """Whether a line is due after ``elapsed`` seconds, with ``remaining`` seconds to go."""
        tenth = int(10 * step / self.total)
        if tenth == self.last_tenth and elapsed < self.next_line:
            return False
        self.last_tenth = tenth
        silence = min(max(elapsed, FIRST_LINE), max(remaining / 4, FIRST_LINE), LONGEST_SILENCE)
        self.next_line = elapsed + silence
        return True
