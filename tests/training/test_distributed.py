"""Two processes on the CPU: replicated and sharded runs resume bitwise, and change their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.comparing import assert_same_state, checkpoint_of, contents_of, rows_of
from tests.program import run_ranks
from trainer.checkpoint import read_state
from trainer.data.corpus import prepare_corpus
from trainer.runs.parsing import merged, parse

SCRIPT = Path(__file__).with_name("distributed_runs.py")


def variant(name, precision="fp32", **more):
    changes = {
        "strategy": {"name": name},
        "trainer": {"checkpoint_every": 4, "precision": precision, "log_every": 1},
    }
    return merged(changes, more)


VARIANTS = {
    "ddp": variant("ddp"),
    "ddp bf16 muon": variant("ddp", "bf16", optimizer={"name": "muon"}),
    "fsdp2": variant("fsdp2"),
    "fsdp2 bf16 accumulation": variant("fsdp2", "bf16", trainer={"micro_batch_size": 1}),
    "fsdp2 phases": variant(
        "fsdp2",
        drop={"at": None},
        phases={
            "short": {"steps": 6},
            "long": {"steps": 6, "sequence_length": 64, "drop": {}, "optimizer_state": "reset"},
        },
    ),
    "hsdp": variant(
        "hsdp",
        strategy={
            "shard_size": 1,
            "activation_checkpointing": "selective",
        },
        trainer={"micro_batch_size": 1},
    ),
}


def launch(base, directory, ranks, jobs):
    """Do runs one after the other in one group of ``ranks`` processes.

    ``jobs``: of every name its changes to ``base``, the checkpoint to begin at or None, and the
    update during which it is told to stop or None. A run lies in ``directory`` under its name.
    """
    jobs = {
        name: (merged({**base, "run_dir": str(directory / name)}, changes), begin, stop)
        for name, (changes, begin, stop) in jobs.items()
    }
    config = parse(next(iter(jobs.values()))[0]).config
    prepare_corpus(config.data, config.tokenizer)  # several processes would not
    path = directory / f"jobs-{ranks}.json"
    path.write_text(json.dumps(list(jobs.values()), default=str))
    for rank in run_ranks(ranks, SCRIPT, path, cwd=directory):
        assert rank.returncode == 0, rank.stderr[-8000:]
    return {name: parse(values).config for name, (values, _, _) in jobs.items()}


@pytest.fixture(scope="module")
def resumed(base, tmp_path_factory):
    """The directory, and the configurations of three runs of every variant."""
    directory, jobs = tmp_path_factory.mktemp("resumed"), {}
    for name, changes in VARIANTS.items():
        checkpoints = directory / name / "whole" / "checkpoints"
        never = merged(changes, {"trainer": {"checkpoint_every": 100}})
        jobs |= {
            f"{name}/whole": (changes, None, None),
            f"{name}/resumed": (changes, checkpoints / "step-000008", None),
            f"{name}/stopped": (never, None, 2),
        }
    return directory, launch(base, directory, 2, jobs)


@pytest.mark.parametrize("name", VARIANTS)
def test_resumed_runs_are_bitwise_the_uninterrupted_one(resumed, name):
    """The drop is at 6 of 12: still to come for the stopped run, past for the other."""
    directory, runs = resumed
    # One rank was told during step 3; both stopped after it.
    for rank in (0, 1):
        stopped = directory / name / "stopped"
        assert "after step 3" in (stopped / f"stopped-{rank}").read_text()
    whole = runs[f"{name}/whole"]
    for part in ("resumed", "stopped"):
        config = runs[f"{name}/{part}"]
        assert_same_state(checkpoint_of(config), checkpoint_of(whole))
        assert rows_of(config) == rows_of(whole)
    layout = read_state(checkpoint_of(whole))["layout"]
    assert not any(spectrum["inv_freq"] for spectrum in layout["spectra"])


@pytest.mark.weekly
def test_three_replicas_resume_bitwise(base, tmp_path):
    """A sum of more than two numbers depends on its order, which DDP's buckets set."""
    changes = variant("ddp", trainer={"batch_size": 6, "deterministic": True})
    middle = tmp_path / "whole" / "checkpoints" / "step-000008"
    jobs = {"whole": (changes, None, None), "resumed": (changes, middle, None)}
    runs = launch(base, tmp_path, 3, jobs)
    assert_same_state(checkpoint_of(runs["resumed"]), checkpoint_of(runs["whole"]))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_process(resumed, finished, name):
    """Their tokens have different weights together."""
    _, runs = resumed
    shared, alone = runs[f"{name}/whole"], finished[0]
    rows = {row["step"]: row for row in rows_of(shared)}
    for row in rows_of(alone):
        last = rows[row["step"]]
        loss = (rows[row["step"] - 1]["loss"] + last["loss"]) / 2
        assert loss == pytest.approx(row["loss"], rel=1e-4)
        for key in ("gradient_norm", "parameter_norm", "learning_rate", "tokens", "epochs/text"):
            assert last[key] == pytest.approx(row[key], rel=1e-4), key
    weights = contents_of(checkpoint_of(shared))
    for key, weight in contents_of(checkpoint_of(alone)).items():
        if key.startswith("model."):
            torch.testing.assert_close(weights[key], weight, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_a_run_may_go_on_with_another_number_of_processes(base, run, tmp_path):
    """The same samples in the same order: losses agree with one process to rounding."""
    changes = {
        "callbacks": {"own": {"_target_": "tests.training.counting.Counting"}},
        "drop": {"qk_norm_gain": "matched"},  # which a sharded model must not lose
    }
    alone, _ = run("alone", trainer={"checkpoint_every": 4, "log_every": 1}, **changes)
    strategies = {name: variant(name, **changes) for name in ("ddp", "fsdp2")}
    grown = {
        f"{name}-{part}": (of_strategy, begin, None)
        for name, of_strategy in strategies.items()
        for part, begin in (("whole", None), ("grown", checkpoint_of(alone, 4)))
    }
    shrunk = {
        f"{name}-shrunk": (
            variant("fsdp2", **changes),
            tmp_path / f"{name}-whole" / "checkpoints" / "step-000008",
            None,
        )
        for name in strategies
    }
    others = [
        *launch(base, tmp_path, 2, grown).values(),
        *launch(base, tmp_path, 1, shrunk).values(),
    ]
    expected = rows_of(alone)
    assert "own/norm" in expected[0]
    for config in others:
        for row, other in zip(rows_of(config), expected, strict=True):
            for key in ("loss", "gradient_norm", "drop/loss_after", "learning_rate", "own/norm"):
                if key in other:
                    assert row[key] == pytest.approx(other[key], rel=1e-4), (
                        *(config.run_dir, row["step"], key),
                    )
    counted = read_state(checkpoint_of(alone))["lightning"]["callbacks"]["Counting"]
    assert counted["steps"] == 12
    for config in others:
        saved = read_state(checkpoint_of(config))["lightning"]["callbacks"]["Counting"]
        assert saved["steps"] == 12
        assert saved["sum"] == pytest.approx(counted["sum"], rel=1e-4)
        assert saved["norm"] == pytest.approx(counted["norm"], rel=1e-4)
    weights = contents_of(checkpoint_of(alone))
    for config in others:
        saved = contents_of(checkpoint_of(config))
        for name, value in weights.items():
            if name.startswith("model."):
                torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=2e-4)
