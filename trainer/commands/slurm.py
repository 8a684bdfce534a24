"""``python -m trainer slurm +experiment=NAME slurm.nodes=4 ...``: a run as a SLURM job."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.hydra.command import Command
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.sbatch import SlurmConfig, job_script, prepare_scripts, snapshot
from trainer.commands.train import read_run
from trainer.common.errors import Problem, UserError, os_reason, raise_all
from trainer.common.fields import configuration

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.runs.config import RunConfig

SUBMIT = "--submit"
FLAGS = {SUBMIT: "hand the scripts to sbatch"}


@configuration
class Slurm:
    """Keys of this command; the others are a run's."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What the job asks the cluster for."""


@dataclass(frozen=True)
class Job:
    """A checked job."""

    settings: SlurmConfig
    config: RunConfig
    words: tuple[str, ...]
    """The overrides of the run."""
    files: ConfigFiles
    """Configuration files that the run was composed of."""
    submit: bool
    trains: bool
    """Whether it trains the run; otherwise it only prepares the text."""


def read(composed: Composed) -> Job:
    """Return the checked job that trains a run."""
    from trainer.runs.arms import arm_problems, arms_of
    from trainer.runs.directory import plain
    from trainer.workflows.experiment import experiment_problems

    job = read_job(composed, trains=True)
    arms = arms_of(job.config)
    misfits = arm_problems(arms, of_run=[lambda arm: _misfits(plain(arm))])
    raise_all([*misfits, *experiment_problems(arms, *_workers(job.settings))])
    return job


def read_job(composed: Composed, *, trains: bool) -> Job:
    """Return a job with checked settings of its own and of its run."""
    keys, problems, run = composed.split(Slurm)
    settings = keys.slurm
    problems += [problem.under("slurm") for problem in settings.problems()]
    if trains:
        problems += _misfits(run.values)
        workers, _ = _workers(settings)
        if workers > 1 and run.values["strategy"]["name"] == "single":
            problems.append(
                Problem(
                    "strategy",
                    f"'single' uses one worker, and the job starts {workers}; choose "
                    "strategy=ddp, or slurm.nodes=1 slurm.gpus_per_node=1.",
                )
            )
    try:
        config = read_run(run, problems)
    except UserError as error:
        raise UserError(*map(_for_nodes, error.problems)) from error
    words = tuple(word for word in composed.words if not re.match(r"[+~]*slurm[.=]", word))
    words = words or (f"name={config.name}",)  # a job without words trains nothing
    submit = SUBMIT in composed.flags
    return Job(settings.for_run(config), config, words, composed.files, submit, trains)


def _for_nodes(problem: Problem) -> Problem:
    """Add to the problem of missing published weights what the nodes of a job need."""
    from trainer.interchange.hub import MissingWeights

    if not isinstance(problem, MissingWeights) or not problem.is_published:
        return problem
    hint = (
        "The job would stop without them, since few nodes reach the hub: DIR has to be on a file "
        "system that the nodes share with this machine. `python -m trainer plan` needs no weights."
    )
    return replace(problem, hint=hint)


def execute(job: Job) -> None:
    """Write the job and the jobs that prepare its text, print what it needs, and submit them or
    print how to."""
    from trainer.runs.arms import arms_of
    from trainer.workflows.remarks import say_unusual_settings

    directory = write_job(job)
    say_unusual_settings(arms_of(job.config))
    if job.settings.gpus_per_node:
        _say_plan(job)
    submit_all(job, directory)


def _say_plan(job: Job) -> None:
    from trainer.commands.plan import print_sections
    from trainer.workflows.plan import PlanRequest, plan

    gpu = job.settings.gpu
    request = PlanRequest(job.config, *_workers(job.settings), gpu, MFU, timed=(gpu,))
    try:
        print_sections(plan(request))
    except UserError as error:
        print("No plan:", *error.problems)


MFU = 0.4
"""Share of the peak for the printed hours; `trainer plan mfu=` takes others."""

TRAINING = "job.sbatch"
"""The script that trains."""
LAST = "LAST"
"""Placeholder in an option of sbatch for the number of the job submitted before."""


def submit_all(job: Job, directory: Path) -> None:
    """Submit the scripts one after the other if the user asked for it; otherwise print how to."""
    scripts: dict[str, list[str]] = {}  # names with options of sbatch, in order of submission
    if job.settings.prepare:
        scripts["prepare.sbatch"] = []
        # Even if jobs of the array fail, one job completes the text, or fails.
        scripts["finish.sbatch"] = [f"--dependency=afterany:{LAST}"]
    if job.trains:
        # Training starts when the text is whole, and is cancelled if the preparation fails.
        waiting = [f"--dependency=afterok:{LAST}", "--kill-on-invalid-dep=yes"]
        scripts[TRAINING] = waiting if scripts else []
    last = "NUMBER"  # stands for what sbatch prints
    if len(scripts) > 1 and not job.submit:
        print("Each waits for the NUMBER that sbatch prints for the one before; --submit does all.")
    for name, options in scripts.items():
        path = str(directory / name)
        command = ["sbatch", "--parsable", *(o.replace(LAST, last) for o in options), path]
        print(f"Job script: {path}")
        if job.submit:
            last = submit(command)
            print(f"Submitted job {last}.")
        else:
            print(f"Submit it with: {shlex.join(command)}")


def _workers(settings: SlurmConfig) -> tuple[int, int]:
    """Return the number of workers of the whole job, and of a node."""
    on_a_node = settings.workers_a_node
    return settings.nodes * on_a_node, on_a_node


def _misfits(values: dict[str, Any]) -> list[Problem]:
    """Return problems of a run that only arise when it is a job."""
    problems = []
    if values["overwrite"]:
        message = "true would start again whenever the job is requeued."
        problems.append(Problem("overwrite", message))
    callbacks = values["callbacks"] if isinstance(values["callbacks"], dict) else {}
    for name, callback in callbacks.items():
        target = callback.get("_target_", "") if isinstance(callback, dict) else ""
        module = str(target).partition(".")[0]
        if module and not module.startswith("unrope_plugin_") and not _is_visible_to_jobs(module):
            problems.append(
                Problem(
                    f"callbacks.{name}",
                    f"a job does not look for {module!r} in the directory it was submitted from; "
                    "put that directory on PYTHONPATH and submit again.",
                )
            )
    return problems


def _is_visible_to_jobs(module: str) -> bool:
    """Whether a module is found without the current directory, which a job's Python searches only
    if ``PYTHONPATH`` names it."""
    named = {Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    current = Path.cwd().resolve()
    paths = [p for p in sys.path if p and (Path(p).resolve() != current or current in named)]
    return PathFinder.find_spec(module, paths) is not None


def write_job(job: Job) -> Path:
    """Write the job's scripts with ``code/`` and ``logs/``, and the configuration if it trains.

    A job that only prepares text leaves the others of an earlier job as they are.

    Returns:
        Their directory.

    Raises:
        UserError: the directory cannot be written.
    """
    import yaml

    from trainer.common.files import write_atomically
    from trainer.runs.directory import check_writable, plain

    settings, config = job.settings, job.config
    directory = Path(settings.directory or f"slurm_jobs/{config.name}")
    check_writable(str(directory), "slurm.directory")
    place = directory.resolve()
    code, logs = snapshot(place / "code", job.files.user_directory), place / "logs"
    logs.mkdir(exist_ok=True)  # without it SLURM fails the job
    parts = settings, config.name, job.words, code, logs
    texts = prepare_scripts(*parts) if settings.prepare else {}
    if job.trains:
        texts["config.yaml"] = yaml.safe_dump(plain(config), sort_keys=False)
        texts[TRAINING] = job_script(*parts)
    for name, text in texts.items():
        write_atomically(place / name, text)
    return directory


def submit(command: list[str]) -> str:
    """Submit a job with ``sbatch --parsable`` and return its number.

    Raises:
        UserError: there is no sbatch, or it refuses.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError.at(
            "slurm",
            f"sbatch cannot be run here ({os_reason(error)}); on a login node of the cluster: "
            f"{shlex.join(command)}",
        ) from error
    if result.returncode:
        raise UserError.at("slurm", f"sbatch refused the job: {' '.join(result.stderr.split())}")
    return result.stdout.strip().partition(";")[0]  # "number;cluster" with several clusters


HELP = """
python -m trainer slurm [+experiment=NAME] [KEY=VALUE ...] [slurm.KEY=VALUE ...] [--submit]

Checks the configuration of a run and writes it as a SLURM job into slurm_jobs/NAME: the script, the
configuration, and a copy of the code and of --config-dir, so that later edits do not change a job
that waits. --submit hands it to sbatch. The job writes a checkpoint before its time is up, and is
requeued. With slurm.prepare=16 an array of sixteen jobs prepares the text first, and the run waits
for it; `trainer slurm prepare` writes that array alone. It asks for nodes without GPUs:
'slurm.prepare_options=["--partition=cpu","--cpus-per-task=32"]' chooses them.
"""
COMMAND = Command(
    "slurm",
    HELP,
    read,
    execute,
    single="a job is of one run; --multirun hydra/launcher=submitit_slurm is for `train`.",
    flags=FLAGS,
    described=("slurm",),
)
