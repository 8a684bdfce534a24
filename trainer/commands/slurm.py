"""``python -m trainer slurm +experiment=NAME slurm.nodes=4 ...``: a run as a SLURM job."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from trainer.commands.configuration import compose_values
from trainer.commands.sbatch import SlurmConfig, job_script
from trainer.commands.snapshot import snapshot
from trainer.errors import UserError, did_you_mean
from trainer.report.atomic import write_atomically
from trainer.runs.config import RunConfig
from trainer.runs.directory import plain, writable_problem
from trainer.runs.parsing import parse_config, validated

PREFIX = "slurm."
OPTIONS = ("--submit", "--help", "-h")


def run(words: list[str]) -> None:
    """Write the job's script, configuration and code, and submit it where ``--submit`` asks."""
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    options = [word for word in words if word.startswith("-")]
    rest = [word for word in words if not word.startswith(("-", PREFIX))]
    settings, problems = read_settings([word for word in words if word.startswith(PREFIX)])
    for option in options:
        if option not in OPTIONS:
            problems.append(f"slurm: unknown option {option!r}.{did_you_mean(option, OPTIONS)}")
    values, found = compose_values(rest)
    config = parse_config(values, [*found, *problems, *_misfits(settings, values)])
    script = write_job(settings, config, rest)
    command = ["sbatch", "--parsable", str(script)]
    print(f"Job script: {script}")
    if "--submit" in options:
        print(f"Submitted job {submit(command)}.")
    else:
        print(f"Submit it with: {shlex.join(command)}")


def read_settings(words: list[str]) -> tuple[SlurmConfig, list[str]]:
    """The settings in words such as ``slurm.nodes=4``, and a sentence for each that is wrong."""
    values: dict[str, Any] = {}
    problems = []
    parser = OverridesParser.create()
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            problems.append(f'{word!r}: expected slurm.nodes=2, or slurm.extra=["--a=b","--c=d"].')
        else:
            values[override.key_or_group.removeprefix(PREFIX)] = override.value()
    settings, found = validated(SlurmConfig, values)
    return settings, problems + [f"{PREFIX}{p}" for p in (*found, *settings.problems())]


def _misfits(settings: SlurmConfig, values: dict[str, Any]) -> list[str]:
    """What a run may do by itself, but not as this job."""
    found = []
    if values["overwrite"]:
        found.append("overwrite: true would start again whenever the job is requeued.")
    workers = settings.nodes * max(settings.gpus_per_node, 1)
    if workers > 1 and values["strategy"]["name"] == "single":
        found.append(
            f"strategy: 'single' uses one worker, and the job starts {workers}; choose "
            "strategy=ddp, or slurm.nodes=1 slurm.gpus_per_node=1."
        )
    return found


def write_job(settings: SlurmConfig, config: RunConfig, words: list[str]) -> Path:
    """Write ``job.sbatch``, ``config.yaml``, ``code/`` and ``logs/``; returns the script's path.

    Raises:
        UserError: the directory cannot be written.
    """
    directory = Path(settings.directory or f"slurm_jobs/{config.name}")
    if problem := writable_problem(str(directory), "slurm.directory"):
        raise UserError(problem)
    place = directory.resolve()
    code = snapshot(place / "code")
    (place / "logs").mkdir(exist_ok=True)  # SLURM does not make it, and the job would fail
    text = yaml.safe_dump(plain(config), sort_keys=False)
    write_atomically(place / "config.yaml", text)
    script = job_script(settings, config.name, words, code, place / "logs")
    write_atomically(place / "job.sbatch", script)
    return directory / "job.sbatch"


def submit(command: list[str]) -> str:
    """The number of the job that ``sbatch --parsable`` starts.

    Raises:
        UserError: there is no sbatch, or it refuses.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(
            f"slurm: sbatch cannot be run here ({error.strerror}); on a login node of the cluster: "
            f"{shlex.join(command)}"
        ) from error
    if result.returncode:
        raise UserError(f"slurm: sbatch refused the job: {' '.join(result.stderr.split())}")
    return result.stdout.strip().partition(";")[0]  # "number;cluster" where there are several


HELP = """\
python -m trainer slurm [+experiment=NAME] [KEY=VALUE ...] [slurm.KEY=VALUE ...] [--submit]

Checks the configuration of a run and writes it as a SLURM job into slurm_jobs/NAME: the script, the
configuration, and a copy of the code, so that later edits do not change a job that waits. --submit
hands it to sbatch. The job writes a checkpoint before its time is up, and is requeued.

  slurm.nodes=           nodes; default: 1
  slurm.gpus_per_node=   GPUs, and workers, a node; default: 8; 0: one worker on the CPU
  slurm.cpus_per_task=   cores a node
  slurm.time=            limit; default: 24:00:00
  slurm.signal_seconds=  how long before the limit the checkpoint is asked for; default: 120
  slurm.setup=           shell lines to run first: '["module load cuda","source venv/bin/activate"]'
  slurm.extra=           further options: '["--reservation=name"]'
  slurm.directory=       where the job's files go; default: slurm_jobs/NAME
  slurm.                 partition, account, qos, constraint, exclude, mem, job_name: as in sbatch
"""
