"""``python -m trainer watch runs/NAME``: how is a run getting on?"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command, reading

if TYPE_CHECKING:
    from trainer.workflows.requests import WatchRequest


def execute(request: WatchRequest) -> None:
    """Show the runs; on a terminal until all are finished or stopped, or Ctrl-C."""
    from rich.live import Live

    from trainer.commands.console import report_console
    from trainer.workflows.watch import watch
    from trainer.workflows.watch_view import view

    out = report_console()
    runs = watch(request.runs)
    if request.once or not out.is_terminal:
        out.print(view(runs, out.width))
        return
    with suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            began = time.perf_counter()
            live.update(view(runs, out.width), refresh=True)
            if not any(run.is_running or run.state == "not started" for run in runs):
                break
            # Long files take long to read: do not compete with the run for the processor.
            time.sleep(max(request.every, 10 * (time.perf_counter() - began)))
            runs = watch(request.runs)


HELP = """
python -m trainer watch RUN [RUN ...] [once=true]

Shows how a run is getting on: loss, learning rate and retrieval by length as curves over its steps,
the share of the drop's rise in loss that is won back, step, phase, tokens per second, time left,
and whether the process that trains it seems dead. RUN is a run directory, that of a control, that
of a sweep (multirun/NAME), or a directory of runs (runs). It reads files and writes none, so it may
run beside the training, on any machine that sees the directory. On a terminal it refreshes until
all runs are finished or stopped, or Ctrl-C.
"""
COMMAND = Command(
    "watch",
    HELP,
    reading("WatchRequest", "runs"),
    execute,
    single="name all runs in one command.",
    bare=True,
)
