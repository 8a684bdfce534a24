"""``python -m trainer slurm prepare +experiment=NAME``: text, prepared by an array of jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.commands import slurm
from trainer.commands.hydra.command import Command

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed


def read(composed: Composed) -> slurm.Job:
    """Return the checked job, with one part or more."""
    job = slurm.read_job(composed, trains=False)
    return replace(job, settings=replace(job.settings, prepare=max(job.settings.prepare, 1)))


def execute(job: slurm.Job) -> None:
    """Write the array and the job that completes its work, and submit them or say how."""
    slurm.submit_all(job, slurm.write_job(job))


HELP = """
python -m trainer slurm prepare +experiment=NAME [slurm.prepare=PARTS] [KEY=VALUE ...] [--submit]

Writes an array of jobs, each of which prepares a part of a run's text on the CPUs of one node, and
a last job. The last job waits until the array has ended, and prepares any part that failed. A job
that reaches its time limit, or whose node fails, is started again and resumes. The run's own choice
of nodes, memory and queue is for GPUs, and not used;
'slurm.prepare_options=["--partition=cpu","--cpus-per-task=32"]' chooses the nodes.
"""
COMMAND = Command(
    "slurm",
    HELP,
    read,
    execute,
    single="text is prepared once, for all runs that read it.",
    flags=slurm.FLAGS,
    described=("slurm",),
)
