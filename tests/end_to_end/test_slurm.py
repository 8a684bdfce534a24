"""The batch scripts: what they start, and the requeue that a stopped run asks for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trainer.commands.exit_codes import exit_codes
from trainer.common.errors import REQUEUE_EXIT_CODE, PreemptedError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Put programs that note their words in ``tmp_path/NAME`` in place of the cluster's."""
    for name in ("srun", "scontrol"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/{name}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def test_a_task_of_an_array_is_a_run_of_its_own(cluster):
    variables = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "seeds", "SLURM_CPUS_PER_TASK": "8"}
    command = ["bash", "slurm/array.sbatch", "label='a b'"]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True)
    words = (cluster / "srun").read_text().splitlines()
    assert words == [
        *("--cpus-per-task=8", "python", "-m", "trainer"),
        *("name=seeds_3", "label='a b'", "seed=3"),
    ]


@pytest.mark.parametrize(
    ("array", "requeues", "words"),
    [
        ({}, True, "requeue\n7\n"),
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, True, "requeue\n5_3\n"),
        ({}, False, None),
        ({"RANK": "1"}, True, None),
    ],
)
def test_a_stopped_run_requeues_its_own_job_once(cluster, monkeypatch, array, requeues, words):
    for name, value in array.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end, exit_codes():
        raise PreemptedError("Stopped.", requeues=requeues)
    assert end.value.code == REQUEUE_EXIT_CODE
    asked = cluster / "scontrol"
    assert (asked.read_text() if asked.exists() else None) == words
