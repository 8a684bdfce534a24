"""The program's log, and the progress of long work in it."""

from __future__ import annotations

import logging
import time

from trainer.common.processes import is_first_process

log = logging.getLogger(__name__)

LONGEST_SILENCE = 300.0
"""Seconds after which a line is logged before the next tenth."""


def show_log() -> None:
    """Show the program's log, of processes other than the first errors only, without the logs of
    its libraries."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    logger = logging.getLogger("trainer")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO if is_first_process() else logging.ERROR)
    logger.propagate = False


class Progress:
    """Progress of ``total`` steps of ``tokens_per_step`` tokens: a line at every tenth."""

    def __init__(self, title: str, total: float, tokens_per_step: float = 1.0) -> None:
        self.title, self.total, self.tokens_per_step = title, total, tokens_per_step
        self.start: tuple[float, float] | None = None
        """Step and time of the first call."""
        self.line = 0.0, 0.0
        """Step and time of the last line."""

    def advance_to(self, step: float, loss: float | None = None) -> None:
        """Log that ``step`` of ``total`` is reached; the first call sets the starting step."""
        now, step = time.perf_counter(), min(step, self.total)  # which may be an estimate
        if self.start is None:
            self.start = self.line = step, now
        done, elapsed = step - self.start[0], now - self.start[1]
        is_tenth = step - self.line[0] >= self.total / 10
        if done and elapsed and (is_tenth or now - self.line[1] > LONGEST_SILENCE):
            self.line = step, now
            details = "" if loss is None else f"loss {loss:.3f}  "
            details += f"{done * self.tokens_per_step / elapsed:,.0f} tokens/s"
            left = elapsed / done * (self.total - step)
            log.info(
                "%s  %.0f%%  %s  %.0f s left", self.title, 100 * step / self.total, details, left
            )
