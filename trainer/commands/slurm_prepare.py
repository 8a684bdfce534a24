"""``python -m trainer slurm prepare +experiment=NAME``: text, prepared by an array of jobs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.commands import slurm
from trainer.commands.command import Command

if TYPE_CHECKING:
    from trainer.commands.configuration import Composed


def read(composed: Composed) -> slurm.Job:
    """The checked job, of one part at least."""
    job = slurm.read(composed, trains=False)
    return replace(job, settings=replace(job.settings, prepare=max(job.settings.prepare, 1)))


def execute(job: slurm.Job) -> None:
    """Write the array, and submit it or say how."""
    script = slurm.write_job(job).with_name("prepare.sbatch")
    command = ["sbatch", "--parsable", str(script)]
    print(f"Job script: {script}")
    if job.submit:
        print(f"Submitted job {slurm.submit(command)}.")
    else:
        print(f"Submit it with: {shlex.join(command)}")


HELP = """
python -m trainer slurm prepare +experiment=NAME slurm.prepare=PARTS [slurm.KEY=VALUE] [--submit]

Writes an array of jobs that prepare the text of a run, each a part of it, on one node's CPUs; the
last one to end finishes the whole. Interrupted ones are started again and go on.
"""
COMMAND = Command(
    "slurm",
    HELP,
    read,
    execute,
    single="text is prepared once, for all runs that read it.",
    flags=(slurm.SUBMIT,),
    described=("slurm",),
)
