"""``python -m trainer plan +experiment=NAME``: what a run will need, before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainer.commands.hydra.command import Command
from trainer.commands.train import read_run
from trainer.common.errors import Problem, UserError, raise_all
from trainer.common.fields import Positive, configuration

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.workflows.plan import PlanRequest, Section


@configuration
class PlanKeys:
    """Keys of this command; the others are a run's."""

    gpu: Literal["a100_40gb", "a100", "h100", "h200"] = "h100"
    """GPU whose memory the run has to fit: a100_40gb, a100 (80 GB), h100, h200."""
    mfu: Annotated[Positive, Field(le=1)] = 0.4
    """Share of the GPU's dense peak that training reaches."""
    gpus: Annotated[int, Field(ge=1)] = 1
    """GPUs that train together."""
    exact: bool = False
    """Go through all layers for the memory, which takes longer."""


def read(composed: Composed) -> PlanRequest:
    """Return the checked request. Published weights may be missing if the model's shape is
    given."""
    from trainer.interchange.hub import MissingWeights
    from trainer.runs.arms import arms_of
    from trainer.runs.starting_point import FROM_RUN

    keys, problems, composed = composed.split(PlanKeys)
    missing: tuple[Problem, ...] = ()
    try:
        config = read_run(composed, problems)
    except UserError as error:
        weights = tuple(
            problem
            for problem in error.problems
            if isinstance(problem, MissingWeights) or problem.key == FROM_RUN
        )
        if not weights or len(weights) < len(error.problems):
            raise
        config, missing = read_run(composed, problems, weights=False), weights
    # After the run's values are checked: these import torch.
    from trainer.workflows.experiment import experiment_problems
    from trainer.workflows.plan import PlanRequest

    ranks = 1 if config.strategy.name == "single" else keys.gpus
    on_a_node = min(ranks, 8)
    problems += experiment_problems(arms_of(config, weights=not missing), ranks, on_a_node)
    raise_all(problems)
    return PlanRequest(config, ranks, on_a_node, keys.gpu, keys.mfu, keys.exact, missing)


def execute(request: PlanRequest) -> None:
    """Print the sections of the plan as they are known.

    Raises:
        UserError: the vocabulary cannot be known yet.
    """
    from trainer.commands.console import set_up_console
    from trainer.workflows.plan import plan

    set_up_console(quiet=True)
    print_sections(plan(request))


def print_sections(sections: Iterable[Section]) -> None:
    """Print each section as a table, and below it its commands, each on a line of its own."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from trainer.commands.console import WIDTH

    out = Console(width=WIDTH)
    for section in sections:
        table = Table(section.title, "", box=None, width=WIDTH, title_justify="left")
        table.columns[0].min_width = 32
        table.columns[1].ratio = 1
        for row in section.rows:
            table.add_row(*map(Text, row))
        out.print(table, highlight=False)
        out.print()
        for command in section.commands:
            out.print(Text(command), soft_wrap=True)  # cut by no newline that a shell would read
            out.print()


HELP = """
python -m trainer plan +experiment=NAME [gpus=32] [strategy=fsdp2] [gpu=a100] [mfu=0.35]

Checks the configuration of a run and says what it will need, without GPU or network: parameters,
tokens, epochs of its text, operations, memory of a GPU by part for its strategy, hours on several
GPUs, disk, and what is missing on this machine. Where a step does not fit, it names the smallest
change with which it does. Memory is that of the program's own step on pretended ranks, uncompiled.
"""
COMMAND = Command("plan", HELP, read, execute, single="a plan is of one run.")
