"""Two processes on the CPU: replicated and sharded runs resume bitwise, and change their size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.test_run import assert_same_state, checkpoint_of, rows_of, tensors_in
from trainer.training.checkpoints import read_state
from trainer.training.parsing import merged, parse_config

SCRIPT = Path(__file__).with_name("distributed_runs.py")


@pytest.fixture
def launch(base, tmp_path):
    """Do runs one after the other on ``ranks`` processes: {name: (changes, checkpoint or None)}.

    ``stop``: the name of a run that is told to stop during an update, and which one.
    """

    def go(ranks, runs, stop=(None, None)):
        values = {
            name: merged({**base, "run_dir": str(tmp_path / name)}, changes)
            for name, (changes, _) in runs.items()
        }
        jobs = [
            [values[name], begin and str(begin), stop[1] if name == stop[0] else None]
            for name, (_, begin) in runs.items()
        ]
        path = tmp_path / "jobs.json"
        path.write_text(json.dumps(jobs))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*command, f"--nproc-per-node={ranks}", str(SCRIPT), str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[:8000]  # what failed first; torchrun's own last
        return {name: parse_config(v) for name, v in values.items()}

    return go


def variant(name, precision="fp32", **more):
    changes = {
        "strategy": {"name": name},
        "trainer": {"checkpoint_every": 4, "precision": precision, "log_every": 1},
    }
    return merged(changes, more)


@pytest.mark.parametrize(
    "changes",
    [
        variant("ddp"),
        variant("ddp", "bf16", optimizer={"name": "muon"}),
        variant("fsdp2"),
        variant("fsdp2", "bf16", trainer={"micro_batch_size": 1}),
        variant("fsdp2", model={"tie_word_embeddings": False}, optimizer={"name": "muon"}),
        variant("hsdp", strategy={"shard_size": 1, "activation_checkpointing": "selective"}),
    ],
    ids=["ddp", "ddp bf16 muon", "fsdp2", "fsdp2 bf16 accumulation", "fsdp2 muon", "hsdp"],
)
def test_resumed_runs_are_bitwise_the_uninterrupted_one(launch, tmp_path, changes):
    """The drop is at 6 of 12; from 4 it is still to come, from 8 it has been."""
    checkpoints = tmp_path / "whole" / "checkpoints"
    runs = launch(
        2,
        {
            "whole": (changes, None),
            "from4": (changes, checkpoints / "step-000004"),
            "from8": (changes, checkpoints / "step-000008"),
            "stopped": (merged(changes, {"trainer": {"checkpoint_every": 100}}), None),
        },
        stop=("stopped", 6),
    )
    # One rank was told during step 7; both knew it, and stopped, after step 8.
    for rank in (0, 1):
        text = (tmp_path / "stopped" / f"stopped-{rank}").read_text()
        assert "after step 8" in text
    for name in ("from4", "from8", "stopped"):
        assert_same_state(checkpoint_of(runs[name]), checkpoint_of(runs["whole"]))
        assert rows_of(runs[name]) == rows_of(runs["whole"])
    layout = read_state(checkpoint_of(runs["whole"]))["layout"]
    assert not any(spectrum["inv_freq"] for spectrum in layout["spectra"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_may_go_on_with_another_number_of_processes(launch, run, tmp_path, strategy):
    """The same samples in the same order: losses agree with one process to rounding."""
    alone, _ = run("alone", trainer={"checkpoint_every": 4, "log_every": 1})
    both = variant(strategy)
    grown = launch(
        2,
        {"whole": (both, None), "grown": (both, checkpoint_of(alone, 4))},
    )
    shrunk = launch(
        1,
        {"shrunk": (variant("fsdp2"), tmp_path / "whole" / "checkpoints" / "step-000008")},
    )
    expected = rows_of(alone)
    for config in (*grown.values(), *shrunk.values()):
        for row, other in zip(rows_of(config), expected, strict=True):
            for key in ("loss", "gradient_norm", "drop/loss_after", "learning_rate"):
                if key in other:
                    assert row[key] == pytest.approx(other[key], rel=1e-4), (row["step"], key)
    weights = [tensors_in(checkpoint_of(c)) for c in (alone, *grown.values(), *shrunk.values())]
    for other in weights[1:]:
        for name, value in weights[0].items():
            if name.startswith("model."):
                torch.testing.assert_close(other[name], value, rtol=1e-3, atol=2e-4)


def test_what_processes_and_strategy_do_not_fit_is_said_once(base, tmp_path):
    """Two processes on one device, then a batch that two ranks cannot share."""
    words = [
        "+experiment=drope_demo",
        "trainer.max_steps=4",
        f"run_dir={tmp_path}/run",
        f"data.cache_dir={tmp_path}/cache",
    ]
    cases = {
        "strategy=single": "2 processes were started, but strategy=single uses one",
        "strategy=ddp trainer.batch_size=5": "5 sequences do not divide .*nearest that does is 4",
    }
    for case, expected in cases.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*command, "--nproc-per-node=2", "-m", "trainer", *words, *case.split()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=SCRIPT.parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 1
        # torchrun's own traceback comes after what the program says.
        assert re.search(expected, done.stderr.split("Traceback")[0]), done.stderr
        assert not (tmp_path / "run").exists()
