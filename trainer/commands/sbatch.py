"""A SLURM job: its settings, the script for sbatch, and a copy of the code, so that later edits do
not change a waiting job."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainer.commands.hydra.files import config_directory
from trainer.common.errors import Problem
from trainer.common.fields import (
    Count,
    Integer,
    Natural,
    OptionalText,
    configuration,
)

if TYPE_CHECKING:
    from trainer.runs.config import RunConfig

CORES_A_WORKER = 8
"""Cores of each worker by default: one computes, the others read and write."""


@configuration
class SlurmConfig:
    """Resources that a job asks the cluster for; null leaves a choice to the cluster."""

    nodes: Count = 1
    """Number of nodes."""
    gpus_per_node: Annotated[Natural, Field(le=1024)] | None = None
    """GPUs and workers of a node; null: as many of 8 as fit the batch; 0: one worker on the CPU."""
    gpu: Literal["a100_40gb", "a100", "h100", "h200"] = "h100"
    """GPU that the printed plan is for: a100_40gb, a100 (80 GB), h100, h200."""
    cpus_per_task: Count | None = None
    """Cores of a node; null: 8 for each worker."""
    time: Integer | str = "24:00:00"
    """Limit in minutes, or as "24:00:00" or 2-12:00:00."""
    partition: OptionalText = None
    """Partition of sbatch."""
    account: OptionalText = None
    """Account of sbatch."""
    qos: OptionalText = None
    """Quality of service of sbatch."""
    constraint: OptionalText = None
    """Features that the nodes must have."""
    exclude: OptionalText = None
    """Nodes not to use."""
    mem: Integer | OptionalText = None
    """Memory of a node in MB, or with a unit."""
    job_name: OptionalText = None
    """Name of the job; null: the run's name."""
    signal_seconds: Annotated[Count, Field(le=65535)] = 120
    """Seconds before the limit at which the job is asked for a checkpoint."""
    max_retries: Natural = 3
    """Restarts after failures in a row without a newer checkpoint; 0: none."""
    setup: list[str] = field(default_factory=list)
    """Shell lines to run first, which then choose the Python: '["module load cuda","source
    venv/bin/activate"]'."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch: '["--reservation=name"]'."""
    directory: OptionalText = None
    """Directory of the job's files; null: slurm_jobs/NAME."""
    prepare: Natural = 0
    """Jobs of an array that prepares the text before; 0: it is prepared already."""
    prepare_options: list[str] = field(default_factory=list)
    """Options of sbatch for those jobs instead: '["--partition=cpu","--mem=64G"]'."""

    @property
    def workers_a_node(self) -> int:
        """Processes of a node, once ``gpus_per_node`` is known."""
        return max(self.gpus_per_node or 0, 1)

    def for_run(self, config: RunConfig) -> SlurmConfig:
        """Return the settings with as many GPUs as fit the run, if their number is not set."""
        if self.gpus_per_node is not None:
            return self
        from trainer.runs.arms import gpus_that_fit

        return replace(self, gpus_per_node=gpus_that_fit(config, self.nodes))

    def problems(self) -> list[Problem]:
        """Return the problems between keys."""
        problems = []
        if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", str(self.time)):
            problems.append(
                Problem("time", f"expected minutes, 24:00:00 or 2-12:00:00, got {self.time!r}.")
            )
        mem = str(self.mem or 0)
        if mem.isprintable() and not re.fullmatch(r"\d+[KMGTkmgt]?", mem):
            problems.append(
                Problem("mem", f"expected MB, or a number with a unit as in 64G, got {self.mem!r}.")
            )
        problems += [
            Problem(key, f"expected one line, got {value!r}.")
            for key, setting in asdict(self).items()
            if key != "setup"
            for value in (setting if isinstance(setting, list) else [setting])
            if isinstance(value, str) and not value.isprintable()
        ]
        problems += [
            Problem(key, f"expected options such as --reservation=name, got {option!r}.")
            for key, options in (("extra", self.extra), ("prepare_options", self.prepare_options))
            for option in options
            if not option.startswith("-")
        ]
        return problems

    def header(self, name: str, output: Path, signal: str | None = None) -> list[str]:
        """Return the ``#SBATCH`` lines of a run called ``name``.

        ``output``: its log. ``signal``: replaces the signal to the steps of a run.
        """
        options = {
            "job-name": self.job_name or name,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_task or CORES_A_WORKER * self.workers_a_node,
            "mem": self.mem,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "exclude": self.exclude,
            "chdir": Path.cwd(),
            "signal": signal or f"USR1@{self.signal_seconds}",
            "open-mode": "append",
            "output": output,
        }
        words = [shlex.quote(f"--{key}={v}") for key, v in options.items() if v is not None]
        return [f"#SBATCH {option}" for option in (*words, "--requeue", *self.extra)]


def prepare_scripts(
    config: SlurmConfig, name: str, words: Sequence[str], code: Path, logs: Path
) -> dict[str, str]:
    """Return two scripts for CPUs: ``prepare.sbatch``, an array whose jobs each prepare a part of a
    run's text, and ``finish.sbatch``, which completes it."""
    # Options for a node with GPUs do not fit nodes without.
    alone = replace(
        config,
        nodes=1,
        gpus_per_node=0,
        mem=None,
        partition=None,
        qos=None,
        constraint=None,
        exclude=None,
        extra=config.prepare_options,
    )

    def script(called: str, output: str, array: Sequence[str], more: str) -> str:
        named = replace(alone, job_name=f"{config.job_name or name}-{called}")
        header = named.header(name, logs / output, signal=f"B:USR1@{config.signal_seconds}")
        work = f'"${{UNROPE_PYTHON:-python}}" -m trainer prepare {shlex.join(words)}{more}'
        lines = ["#!/usr/bin/env bash", *header, *array, "", *_environment(config, code)]
        return "\n".join([*lines, PREPARE_BODY.replace("WORK", work)])

    array = [f"#SBATCH --array=1-{config.prepare}"]
    part = f' prepare.part="$SLURM_ARRAY_TASK_ID/{config.prepare}"'
    return {
        "prepare.sbatch": script("prepare", "%x-%A_%a.log", array, part),
        "finish.sbatch": script("finish", "%x-%j.log", [], ""),
    }


PREPARE_BODY = """
# The time limit is not the end: the job is started again, and goes on behind the last whole shard.
# The last task of an array has the array's own number as its SLURM_JOB_ID: that names all tasks.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
trap 'scontrol requeue "$job"' USR1
WORK &
work=$!
while kill -0 "$work" 2>/dev/null; do wait "$work" || true; done # a trapped signal ends `wait`
wait "$work"
"""


def _environment(config: SlurmConfig, code: Path) -> list[str]:
    """Return lines that choose the Python of a job, and the snapshot of the code."""
    cache = os.environ.get("UNROPE_CACHE")
    known = [f"export UNROPE_CACHE={shlex.quote(str(Path(cache).absolute()))}"] if cache else []
    python = [] if config.setup else [f"export UNROPE_PYTHON={shlex.quote(sys.executable)}"]
    return [
        *config.setup,
        *python,
        *known,
        f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1 # a checkout in the working directory does not hide the snapshot",
    ]


def job_script(config: SlurmConfig, name: str, words: Sequence[str], code: Path, logs: Path) -> str:
    """Return the script of a job that trains with ``words`` from the snapshot ``code``.

    The body of ``slurm/train.sbatch`` follows a header and settings.
    """
    train = (slurm_directory() / "train.sbatch").read_text(encoding="utf-8")
    body = train.rpartition("#SBATCH")[2].partition("\n")[2]
    lines = [
        "#!/usr/bin/env bash",
        *config.header(name, logs / "%x-%j.log"),
        "",
        *_environment(config, code),
        f"export UNROPE_LOGS={shlex.quote(str(logs))} UNROPE_MAX_RETRIES={config.max_retries}",
        shlex.join(["set", "--", *words]),
    ]
    return "\n".join([*lines, body])


PACKAGE = Path(__file__).resolve().parent.parent


def slurm_directory() -> Path:
    """Return ``slurm/``: inside the installed package, or beside it in a checkout."""
    inside = PACKAGE / "slurm"
    return inside if inside.is_dir() else PACKAGE.parent / "slurm"


def snapshot(directory: Path, user_directory: Path | None = None) -> Path:
    """Copy the package, with ``conf/`` and ``slurm/`` inside it, to ``directory/<digest>``.

    The copy is named by its content and never changes: a waiting job keeps its code, and jobs with
    the same code share one copy. ``user_directory``: configurations to add to ``conf/``.

    Returns:
        The path of the copy, for ``PYTHONPATH``.
    """
    files = dict(sorted(_files(user_directory).items()))
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    place = directory / digest.hexdigest()[:12]
    if not place.is_dir():
        # Renamed when complete, so that an interrupted copy is never taken for the code.
        partial = directory / f".{place.name}.{os.getpid()}.partial"
        for name, content in files.items():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        partial.rename(place)
    return place


def _files(user_directory: Path | None) -> dict[str, bytes]:
    """Return every file of the package by its path in the snapshot."""
    roots = [
        ("trainer", PACKAGE, "*"),
        ("trainer/conf", config_directory(), "*"),
        ("trainer/slurm", slurm_directory(), "*"),
    ]
    if user_directory is not None:
        roots.append(("trainer/conf", user_directory, "*/*.yaml"))
    return {
        f"{place}/{path.relative_to(root).as_posix()}": path.read_bytes()
        for place, root, pattern in roots
        for path in root.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }
