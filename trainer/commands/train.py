"""``python -m trainer +experiment=NAME key=value ...``: train, evaluate, report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.commands.command import Command
from trainer.commands.kinds import OF_A_RUN, kind_problem

if TYPE_CHECKING:
    from trainer.commands.configuration import Composed
    from trainer.runs.config import RunConfig


def read_config(words: Sequence[str]) -> RunConfig:
    """The checked configuration of a command line.

    Raises:
        UserError: with all problems of keys, types and values together.
    """
    from trainer.commands.configuration import compose_words

    return read_run(compose_words(words))


def read_run(composed: Composed, found: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a run; ``found`` are problems already known.

    Raises:
        UserError: with all problems of keys, types and values together.
    """
    from trainer.runs.config import RunConfig
    from trainer.runs.parsing import parse

    values, kind = composed.without_kind("evaluation")
    problems = [*composed.problems, *found]
    if kind not in OF_A_RUN:
        problems.append(kind_problem(composed.choices["evaluation"], kind, OF_A_RUN))
        values = {key: value for key, value in values.items() if key != "evaluation"}
    return parse(RunConfig, values, problems)


def execute(config: RunConfig) -> None:
    """Train, and print the report."""
    from trainer.commands.console import print_report, set_up_console

    set_up_console(quiet=os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0")
    from trainer.workflows.experiment import run_experiment

    if (outcome := run_experiment(config)) is not None:
        report, existing = outcome
        print_report(report, config.run_dir, existing)


HELP = """
unrope: train decoders with any positional encoding, drop it, and see how far they reach.

python -m trainer +experiment=NAME KEY=VALUE ...      train, evaluate, report
python -m trainer evaluate checkpoint=runs/NAME ...   evaluate a checkpoint
python -m trainer analyze checkpoint=runs/NAME +analysis=all   show its attention geometry
python -m trainer generate checkpoint=runs/NAME prompt="..."   continue a text
python -m trainer export checkpoint=runs/NAME to=DIR  write it for transformers
python -m trainer drill +experiment=NAME ...          break a small copy, see if it survives
python -m trainer slurm +experiment=NAME ...          write and submit a SLURM job
python -m trainer COMMAND --help                      more about one of them

Try first:      python -m trainer +experiment=drope_demo
All values:     python -m trainer +experiment=drope_demo --cfg job
"""
COMMAND = Command("config", HELP, read_run, execute, output=lambda config: config.run_dir)
