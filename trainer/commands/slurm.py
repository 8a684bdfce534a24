"""``python -m trainer slurm +experiment=NAME slurm.nodes=4 ...``: a run as a SLURM job."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
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


def read(composed: Composed) -> Job:
    """Return the checked job that trains a run."""
    from trainer.runs.arms import arm_problems, arms_of
    from trainer.runs.directory import plain
    from trainer.workflows.experiment import experiment_problems

    job = read_job(composed, lambda keys, run: [*_misfits(run), *_idle_workers(keys, run)])
    arms = arms_of(job.config)
    misfits = arm_problems(arms, of_run=[lambda arm: _misfits(plain(arm))])
    raise_all([*misfits, *experiment_problems(arms, *_workers(job.settings))])
    return job


Check = Callable[[SlurmConfig, dict[str, Any]], list[Problem]]
"""Takes a job's settings and the values of its run."""


def read_job(composed: Composed, check: Check = lambda keys, run: []) -> Job:
    """Return a job with checked settings of its own and of its run.

    ``check``: returns more problems to report with those.
    """
    keys, problems, run = composed.split(Slurm)
    problems += [problem.under("slurm") for problem in keys.slurm.problems()]
    try:
        config = read_run(run, [*problems, *check(keys.slurm, run.values)])
    except UserError as error:
        raise UserError(*map(_for_nodes, error.problems)) from error
    words = tuple(word for word in composed.words if not _is_setting(word))
    words = words or (f"name={config.name}",)  # a job without words trains nothing
    settings = keys.slurm.for_run(config)
    return Job(settings, config, words, composed.files, SUBMIT in composed.flags)


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
    before = PREPARING if job.settings.prepare else {}
    # Training starts when the text is whole, and is cancelled if the preparation fails.
    options = [f"--dependency=afterok:{LAST}", "--kill-on-invalid-dep=yes"] if before else []
    submit_all(job, directory, {**before, TRAINING: options})


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
PREPARING = {
    "prepare.sbatch": [],
    # Even if jobs of the array fail, one job completes the text, or fails.
    "finish.sbatch": [f"--dependency=afterany:{LAST}"],
}
"""Scripts that prepare text, in order of submission, with options of sbatch."""


def submit_all(job: Job, directory: Path, scripts: dict[str, list[str]]) -> None:
    """Submit scripts one after the other if the user asked for it; otherwise print how to."""
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


def _is_setting(word: str) -> bool:
    """Whether the word is for the job rather than for the run in it."""
    return re.match(r"[+~]*slurm[.=]", word) is not None


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


def _idle_workers(settings: SlurmConfig, values: dict[str, Any]) -> list[Problem]:
    """Return the problem of a job with several workers for a run on one device."""
    workers, _ = _workers(settings)
    if workers == 1 or values["strategy"]["name"] != "single":
        return []
    return [
        Problem(
            "strategy",
            f"'single' uses one worker, and the job starts {workers}; choose strategy=ddp, or "
            "slurm.nodes=1 slurm.gpus_per_node=1.",
        )
    ]


def _is_visible_to_jobs(module: str) -> bool:
    """Whether a module is found without the current directory, which a job's Python searches only
    if ``PYTHONPATH`` names it."""
    named = {Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    current = Path.cwd().resolve()
    paths = [p for p in sys.path if p and (Path(p).resolve() != current or current in named)]
    return PathFinder.find_spec(module, paths) is not None


def write_job(job: Job) -> Path:
    """Write the script that trains, those that prepare its text, and the configuration.

    Returns:
        Their directory.

    Raises:
        UserError: the directory cannot be written.
    """
    import yaml

    from trainer.runs.directory import plain

    def scripts(*parts: Any) -> dict[str, str]:
        prepare = prepare_scripts(*parts) if job.settings.prepare else {}
        config = yaml.safe_dump(plain(job.config), sort_keys=False)
        return {**prepare, "config.yaml": config, TRAINING: job_script(*parts)}

    return _write(job, scripts)


def write_array(job: Job) -> Path:
    """Write the scripts that prepare text; an earlier job in their directory stays as it is.

    Returns:
        Their directory.

    Raises:
        UserError: the directory cannot be written.
    """
    return _write(job, prepare_scripts)


Scripts = Callable[[SlurmConfig, str, Sequence[str], Path, Path], dict[str, str]]
"""Takes settings, name, words, code and logs; returns the texts of files by their names."""


def _write(job: Job, scripts: Scripts) -> Path:
    """Write the files of ``scripts``, with ``code/`` and ``logs/``; return their directory."""
    from trainer.common.files import write_atomically
    from trainer.runs.directory import check_writable

    settings, config = job.settings, job.config
    directory = Path(settings.directory or f"slurm_jobs/{config.name}")
    check_writable(str(directory), "slurm.directory")
    place = directory.resolve()
    code = snapshot(place / "code", job.files.user_directory)
    (place / "logs").mkdir(exist_ok=True)  # without it SLURM fails the job
    texts = scripts(settings, config.name, job.words, code, place / "logs")
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
