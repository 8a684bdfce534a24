"""``python -m trainer plan +experiment=NAME``: what a run will need, before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trainer.commands.hydra.command import Command
from trainer.commands.train import read_run
from trainer.common.errors import UserError
from trainer.common.fields import Count, Positive, configuration

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.workflows.plan import PlanRequest, Section


@configuration
class PlanKeys:
    """Keys of this command; the others are a run's."""

    gpus: Count = 8
    """Number of GPUs, among which the batch is divided."""
    mfu: Annotated[Positive, Field(le=1)] = 0.4
    """Share of a GPU's dense peak that training reaches."""


def read(composed: Composed) -> PlanRequest:
    """Return the checked request; without published weights it is for the configured shape."""
    keys, problems, composed = composed.split(PlanKeys)
    try:
        config = read_run(composed, problems)
    except UserError:
        config = read_run(composed, problems, weights=False)
    from trainer.workflows.plan import PlanRequest

    return PlanRequest(config, 1 if config.strategy.name == "single" else keys.gpus, keys.mfu)


def execute(request: PlanRequest) -> None:
    """Print the sections of the plan."""
    from trainer.workflows.plan import plan

    print_sections(plan(request))


def print_sections(sections: Iterable[Section]) -> None:
    """Print each section as a table."""
    from rich.console import Console
    from rich.table import Table

    from trainer.commands.console import WIDTH

    out = Console(width=WIDTH)
    for section in sections:
        table = Table(section.title, "", box=None, width=WIDTH, title_justify="left")
        table.columns[0].min_width = 32
        table.columns[1].ratio = 1
        for row in section.rows:
            table.add_row(*row)
        out.print(table, highlight=False)
        out.print()


HELP = """
python -m trainer plan +experiment=NAME [gpus=8] [mfu=0.4]

Says what a run will need, without GPU, network or weights: parameters, tokens, operations, about
how much memory each GPU, and hours at a share of the peak of A100, H100 and H200.
"""
COMMAND = Command("plan", HELP, read, execute, single="a plan is of one run.")
