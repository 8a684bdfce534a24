"""Progress of long work: the log, a live bar on a terminal, a line at every tenth elsewhere."""

import logging
import time

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from trainer.common.processes import current_ranks

console = Console(stderr=True)
"""Console shared by progress and log, so that a log line does not break the bar."""

LONGEST_SILENCE = 300.0
"""Seconds after which a line is printed before the next tenth."""


def show_log() -> None:
    """Show the program's log, without those of its libraries; ranks above 0 show only errors."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    logger = logging.getLogger("trainer")
    if not logger.handlers:
        if not console.is_terminal:
            console.width = 100
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        logger.addHandler(handler)
    level = logging.ERROR if current_ranks().rank else logging.INFO
    logger.setLevel(level)
    logger.propagate = False


class Progress:
    """Progress of ``total`` steps of ``tokens_per_step`` tokens; use as a context manager.

    Only the first process shows it.
    """

    def __init__(self, title: str, total: float, tokens_per_step: float = 1.0) -> None:
        self.title = title
        self.total = total
        self.tokens_per_step = tokens_per_step
        self.bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f}%  {task.fields[details]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task(title, total=total, details="")
        self.first: tuple[float, float] | None = None
        """Step and time of the first call."""
        self.last_line = 0.0, 0.0
        """Step and time of the last line."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def advance_to(self, step: float, loss: float | None = None) -> None:
        """Show that ``step`` of ``total`` is reached; the first call sets the starting step."""
        now = time.perf_counter()
        step = min(step, self.total)  # which may be an estimate
        if self.first is None:
            self.first = self.last_line = step, now
        done, elapsed = step - self.first[0], now - self.first[1]
        if current_ranks().rank or not (done and elapsed):
            return
        details = "" if loss is None else f"loss {loss:.3f}  "
        details += f"{done * self.tokens_per_step / elapsed:,.0f} tokens/s"
        if console.is_terminal:
            self.bar.start()
            self.bar.update(self.task, completed=step, details=details)
        elif (
            step - self.last_line[0] >= self.total / 10 or now - self.last_line[1] > LONGEST_SILENCE
        ):
            self.last_line = step, now
            left = elapsed / done * (self.total - step)
            line = f"{self.title}  {step / self.total:.0%}  {details}  {left:.0f} s left"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
