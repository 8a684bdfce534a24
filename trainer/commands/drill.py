"""``python -m trainer drill +experiment=NAME ...``: fault injection into a small copy of a run."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command
from trainer.commands.train import read_run

if TYPE_CHECKING:
    from trainer.runs.config import RunConfig


def execute(config: RunConfig) -> None:
    """Inject every fault, and print the table; exit with 1 if a run ended differently."""
    from rich.console import Console
    from rich.table import Table

    from trainer.commands.console import WIDTH, set_up_console
    from trainer.workflows.drill import FAULTS, drill

    set_up_console(quiet=True)
    logging.getLogger("trainer").setLevel(logging.CRITICAL)
    out, began, failed = Console(width=WIDTH), time.perf_counter(), 0
    out.print(f"{len(FAULTS)} faults to a small copy of {config.name!r}, a few seconds each")
    table = Table(width=WIDTH)
    for column in ("fault", "after step", "run against an unbroken one", "seconds"):
        table.add_column(column, justify="left" if " " in column or column == "fault" else "right")
    with tempfile.TemporaryDirectory(prefix="unrope-drill-") as directory:
        for number, outcome in enumerate(drill(config, Path(directory)), 1):
            failed += bool(outcome.difference)
            same = "identical" if outcome.fault.ranks is None else "equal to rounding"
            result = outcome.difference or same
            line = f"{number:2} of {len(FAULTS)}  {outcome.fault.name}: {result}"
            out.print(line, highlight=False)
            table.add_row(
                outcome.fault.name,
                str(outcome.fault.step),
                f"[{'red' if outcome.difference else 'green'}]{result}[/]",
                f"{outcome.seconds:.1f}",
            )
    out.print(table)
    survived = len(FAULTS) - failed
    out.print(f"{survived} of {len(FAULTS)} survived, {time.perf_counter() - began:.0f} s in all")
    if failed:
        sys.exit(1)


HELP = """\
python -m trainer drill +experiment=NAME KEY=VALUE ...

Takes the configuration of any run, shrinks it to a tiny model on the CPU, and breaks it: kill -9
and SIGTERM before, at and after the drop and while a checkpoint is written, damaged checkpoints,
another number of processes. Each time the same configuration is started again, and must end with
the same metrics and weights as a run that was never broken. Exit code 0 if all do, else 1.

Run it before a long run: what it shows for the small copy holds for the code and the configuration,
not for the cluster's file system or network.
"""
COMMAND = Command(
    "config",
    HELP,
    read_run,
    execute,
    single="a drill is of one configuration; run it for each.",
    alone=True,
)
