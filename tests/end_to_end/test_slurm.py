"""The SLURM scripts from submission to completion, on a cluster of small shell programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Runs the script again for as long as it is requeued, and keeps its exit codes.
SBATCH = """\
[[ $1 == --parsable ]] && shift
setting() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
script=$1
export SLURM_JOB_NAME=$(setting job-name) SLURM_NNODES=$(setting nodes) SLURM_JOB_NODELIST=some
{
  while
    export SLURM_RESTART_COUNT=$((${SLURM_RESTART_COUNT:--1} + 1))
    rm -f "$CLUSTER/again"
    bash "$@"
    echo $? >> "$CLUSTER/codes"
    [[ -e $CLUSTER/again ]]
  do :; done
  touch "$CLUSTER/ended"
} > "$CLUSTER/output" 2>&1 &
echo "$SLURM_JOB_ID"
"""
SCONTROL = """\
case $1 in
  show) printf '%s\\n' localhost 127.0.0.1 | head -n "$SLURM_NNODES" ;;
  requeue) echo "$2" >> "$CLUSTER/requeued"; touch "$CLUSTER/again" ;;
esac
"""
# Every node is this machine, by two names, of which SLURM's first is torchrun's second. The tasks
# are noted, since it is they whom SLURM signals.
SRUN = """\
names=(localhost 127.0.0.1)
while [[ $1 == -* ]]; do
  [[ $1 == --output=* ]] && output=${1#*=}
  shift
done
output=${output//%x/$SLURM_JOB_NAME}
output=${output//%j/$SLURM_JOB_ID}
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node SLURMD_NODENAME=${names[node]} "$@" >> "${output//%n/$node}" 2>&1 &
  tasks+=($!)
done
echo "${tasks[@]}" > "$CLUSTER/tasks"
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""

# Stands for the trainer: all workers stop at the same step once one of them got USR1.
STUB = """\
import os, signal, sys, time
from pathlib import Path

signalled = []
signal.signal(signal.SIGUSR1, lambda *_: signalled.append(True))
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, checkpoint = dist.get_rank(), Path("checkpoint")
start = int(checkpoint.read_text()) if checkpoint.exists() else 0
print("words", sys.argv[1:], "worker", rank, "of", dist.get_world_size(), "from", start, flush=True)
for step in range(start, 10**6 if start == 0 else start + 3):
    stop = torch.tensor(len(signalled))
    dist.all_reduce(stop)
    if stop:
        if rank == 0:
            checkpoint.write_text(str(step))
            Path(os.environ["UNROPE_REQUEUE_FILE"]).touch()
        dist.barrier()
        break
    time.sleep(0.1)
dist.destroy_process_group()
sys.exit(85 if stop else 0)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A directory with the programs of a cluster first on PATH; what they note lies in it."""
    for name, body in {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{body}")
        program.chmod(0o755)
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("CLUSTER", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", str(os.getpid()))  # its port is free for it alone
    monkeypatch.setenv("UNROPE_MODULE", "stub")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def submit(*words):
    command = [sys.executable, "-m", "trainer", "slurm", *words, "slurm.gpus_per_node=0"]
    result = subprocess.run([*command, "--submit"], capture_output=True, text=True, check=False)
    assert f"Submitted job {os.getpid()}." in result.stdout, result.stderr


def wait_for(condition, cluster):
    end = time.monotonic() + 90
    while not condition():
        logs = [path.read_text() for path in (cluster / "slurm_jobs").rglob("*.log")]
        assert time.monotonic() < end, "\n".join([(cluster / "output").read_text(), *logs])
        time.sleep(0.1)


def test_two_nodes_stop_at_the_signal_and_go_on_after_the_requeue(cluster):
    submit("strategy=ddp", "label='a b'", "slurm.nodes=2")
    name = f"slurm_jobs/run/logs/run-{os.getpid()}"
    logs = [cluster / f"{name}-node{node}.log" for node in (0, 1)]
    wait_for(lambda: all(log.exists() and "words" in log.read_text() for log in logs), cluster)
    for task in (cluster / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    wait_for((cluster / "ended").exists, cluster)
    assert (cluster / "codes").read_text().split() == ["85", "0"]
    assert (cluster / "requeued").read_text().split() == [str(os.getpid())]
    stopped_at = (cluster / "checkpoint").read_text()
    text = "".join(log.read_text() for log in logs)
    for start in ("0", stopped_at):
        for worker in (0, 1):
            words = "['strategy=ddp', \"label='a b'\"]"
            assert f"words {words} worker {worker} of 2 from {start}\n" in text
    assert not (cluster / f"{name}.requeue").exists()


def codes_by_hand(cluster, program, **environment):
    """The exit codes of a job by hand, until it is not requeued, whose node runs a shell program
    that knows in ``$n`` its how-manieth attempt this is, from 0."""
    (cluster / "slurm").symlink_to(ROOT / "slurm")
    (cluster / "logs").mkdir()
    path = cluster / "program"
    path.write_text(f"#!/usr/bin/env bash\nn=$SLURM_RESTART_COUNT\n{program}")
    path.chmod(0o755)
    environment |= {"UNROPE_PYTHON": str(path)}
    subprocess.run(["sbatch", "slurm/train.sbatch"], env=os.environ | environment, check=True)
    wait_for((cluster / "ended").exists, cluster)
    return [int(code) for code in (cluster / "codes").read_text().split()]


RUN = """
mkdir -p run; echo "$PWD/run" > "$UNROPE_RUN_FILE"
checkpoint() { mkdir -p "run/checkpoints/$1"; touch "run/checkpoints/$1/manifest.json"; }
"""


def test_failures_are_noted_and_retried_so_often_without_progress(cluster):
    """The second attempt writes a checkpoint, and the count begins anew."""
    program = f"""{RUN}
    case $n in
      0) echo 'NCCL error in: ncclNet.cc, remote process exited' ;;
      1) checkpoint step-000400; echo 'Timeout (0:30:00)!'; echo '  in step' ;;
      2) echo 'torch.distributed.elastic.multiprocessing.errors.ChildFailedError: '
         echo '  traceback : Signal 9 (SIGKILL) received by PID 4711' ;;
    esac
    exit 1
    """
    assert codes_by_hand(cluster, program, UNROPE_MAX_RETRIES="2") == [1, 1, 1, 1]
    number = str(os.getpid())
    assert (cluster / "requeued").read_text().split() == [number] * 3
    lines = (cluster / "run/failures.txt").read_text().splitlines()
    log = f"logs/unrope-{number}-node*.log"
    assert [line.partition(f" job {number}, after ")[2] for line in lines] == [
        "the start: NCCL error in: ncclNet.cc, remote process exited",
        "checkpoints/step-000400: Timeout (0:30:00)!",
        "checkpoints/step-000400: Signal 9 (SIGKILL) received by PID 4711",
        f"checkpoints/step-000400: exit code 1, see {log}",
    ]


@pytest.mark.parametrize(
    ("gpus", "workers"),
    [
        ({}, 1),
        ({"SLURM_GPUS_ON_NODE": "3"}, 3),
        ({"SLURM_GPUS_PER_NODE": "h100:8", "SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:4,l40s:2"}, 6),
    ],
)
def test_every_gpu_of_a_node_has_a_worker_whatever_its_kind(cluster, gpus, workers):
    program = 'echo "$@" > "$CLUSTER/torchrun"'
    assert codes_by_hand(cluster, program, SLURM_CPUS_PER_TASK="8", **gpus) == [0]
    assert f"--nproc-per-node={workers} " in (cluster / "torchrun").read_text()


def test_a_failure_that_is_got_over_leaves_the_job_to_end_well(cluster):
    program = f"{RUN} checkpoint step-000400; exit $((n == 0))"
    assert codes_by_hand(cluster, program) == [1, 0]


def test_failures_before_the_run_is_known_are_counted_too(cluster):
    assert codes_by_hand(cluster, "exit 1", UNROPE_MAX_RETRIES="1") == [1, 1]
    noted = cluster / f"logs/unrope-{os.getpid()}.failures"
    assert noted.read_text().count(", after the start: ") == 2


def test_a_mistake_of_the_users_is_not_tried_again(cluster):
    """As the program itself says it, from a word that it does not know."""
    words = f"{sys.executable} -m trainer trainer.max_step=3"
    assert codes_by_hand(cluster, f"{words}; exit 1") == [2]
    assert not (cluster / "requeued").exists()
    assert not (cluster / f"logs/unrope-{os.getpid()}.failures").exists()


def test_a_job_is_requeued_before_its_time_is_up_though_an_upload_goes_on(cluster):
    program = """
    touch "$UNROPE_REQUEUE_FILE"
    until [[ -e $CLUSTER/requeued ]]; do sleep 0.1; done
    ((n)) && rm "$UNROPE_REQUEUE_FILE"
    exit $((n == 0))
    """
    assert codes_by_hand(cluster, program, UNROPE_CLOSING_SECONDS="0") == [85, 0]
    assert (cluster / "requeued").read_text().split() == [str(os.getpid())]


def test_a_job_that_hangs_until_its_time_is_up_is_requeued_just_before(cluster):
    program = """
    ((n)) && exit 0
    until [[ -e $CLUSTER/requeued ]]; do sleep 0.1; done
    exit 1
    """
    end = str(int(time.time()) + 22)
    assert codes_by_hand(cluster, program, SLURM_JOB_END_TIME=end) == [1, 0]
    assert (cluster / "requeued").read_text().split() == [str(os.getpid())]
    (line,) = (cluster / f"logs/unrope-{os.getpid()}.failures").read_text().splitlines()
    assert line.endswith(": the time was up before a checkpoint was written")


STOPPED = """
mkdir -p run; echo "$PWD/run" > "$UNROPE_RUN_FILE"
stored() { mkdir -p "$(dirname "run/$1")"; touch "run/$1"; }
stop() { touch "$UNROPE_REQUEUE_FILE"; exit 1; }
"""


def test_stops_that_leave_nothing_new_are_failures(cluster):
    """As in an evaluation whose next cell takes longer than the job. The third attempt stores a
    part of it, so that the count begins anew; the claims of processes are no progress."""
    program = f"""{STOPPED}
    case $n in
      0) stored checkpoints/step-000400/manifest.json ;;
      2) stored evaluation/cells/part-a.json ;;
      *) stored "evaluation/cells/claims-$n/x" ;;
    esac
    stop
    """
    codes = codes_by_hand(cluster, program, UNROPE_MAX_RETRIES="2")
    # Attempts 1, and then 3, 4 and 5 stopped where they had started.
    assert codes == [85, 85, 85, 85, 85, 1]
    assert (cluster / "requeued").read_text().split() == [str(os.getpid())] * 5
    lines = (cluster / "run/failures.txt").read_text().splitlines()
    assert [line.partition(", after ")[2] for line in lines] == [
        "checkpoints/step-000400: stopped with nothing new stored",
        *["evaluation/cells/part-a.json: stopped with nothing new stored"] * 3,
    ]


def test_stops_with_progress_are_requeued_however_many_there_are(cluster):
    program = f"""{STOPPED}
    ((n == 5)) && exit 0
    stored "evaluation/cells/part-$n.json"
    stop
    """
    assert codes_by_hand(cluster, program, UNROPE_MAX_RETRIES="1") == [85] * 5 + [0]
    assert not (cluster / "run/failures.txt").exists()


def array_task(task):
    """Return the variables of the last task of an array: SLURM gives it the array's own number."""
    return {
        "SLURM_ARRAY_JOB_ID": str(os.getpid()),
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_JOB_NAME": "sweep",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "some",
    }


def test_a_task_of_an_array_requeues_itself_alone(cluster):
    program = 'touch "$UNROPE_REQUEUE_FILE"; exit 1'
    (cluster / "slurm").symlink_to(ROOT / "slurm")
    (cluster / "logs").mkdir()
    (cluster / "stop").write_text(f"#!/usr/bin/env bash\n{program}\n")
    (cluster / "stop").chmod(0o755)
    variables = {**array_task(3), "UNROPE_PYTHON": "./stop"}
    script = ["bash", "slurm/array.sbatch"]
    result = subprocess.run(
        script, env={**os.environ, **variables}, capture_output=True, check=False
    )
    assert result.returncode == 85, result.stderr
    assert (cluster / "requeued").read_text().split() == [f"{os.getpid()}_3"]


@pytest.mark.parametrize(
    ("words", "task", "expected"),
    [
        (["data=files"], 3, ["name=sweep_3", "data=files", "seed=3"]),
        (["sweep.txt", "seed=5"], 1, ["name=sweep_1", "seed=5", "label='a b'", "name=x"]),
    ],
)
def test_tasks_of_an_array_differ_in_seed_or_by_a_line_of_a_file(cluster, words, task, expected):
    (cluster / "slurm").symlink_to(ROOT / "slurm")
    (cluster / "logs").mkdir()
    (cluster / "sweep.txt").write_text("seed=1\n\"label='a b'\" name=x\n")
    (cluster / "show").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (cluster / "show").chmod(0o755)
    variables = {**array_task(task), "UNROPE_PYTHON": "./show"}
    script = ["bash", "slurm/array.sbatch", *words]
    result = subprocess.run(
        script, env={**os.environ, **variables}, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = (cluster / f"logs/sweep-{os.getpid()}-node0.log").read_text().splitlines()
    assert lines[lines.index("stub") + 1 :] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed=1\n", "sweep.txt has no line for task 1"),
        ("seed=1\nseed=2 name='x\n", "sweep.txt: line 2 cannot be read; quote its words"),
    ],
)
def test_task_without_a_line_that_can_be_read_says_so(cluster, text, message):
    (cluster / "sweep.txt").write_text(text)
    result = subprocess.run(
        ["bash", str(ROOT / "slurm/array.sbatch"), "sweep.txt"],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert message in result.stderr
