"""Two processes: replicated, sharded and both, their checkpoints, and the death of one of them.

On two GPUs over NCCL; on the CPU (weekly) over gloo, as tests/training/test_distributed.py.
"""

from __future__ import annotations

import signal
import time

import pytest
import torch

from tests.comparing import assert_same_state, checkpoint_of, rows_of
from tests.program import start_ranks
from tests.training.test_distributed import launch, variant

ON_TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
VARIANTS = {
    "ddp": {},
    "fsdp2": {},
    "hsdp": {"strategy": {"shard_size": 1}},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=pytest.mark.weekly), pytest.param("cuda", marks=ON_TWO_GPUS)],
)
def accelerator(request):
    return {"cpu": "cpu", "cuda": "gpu"}[request.param]


@pytest.fixture(scope="module")
def trained(accelerator, base, tmp_path_factory):
    """Three runs of every strategy: whole, resumed at step 8, and stopped in step 3 and resumed."""
    directory, jobs = tmp_path_factory.mktemp("several"), {}
    for name, more in VARIANTS.items():
        changes = variant(name, **more)
        changes["trainer"] |= {"accelerator": accelerator, "deterministic": True}
        if name != "fsdp2":  # the default there; once is enough
            changes["trainer"]["compile"] = False
        middle = directory / name / "whole" / "checkpoints" / "step-000008"
        jobs |= {
            f"{name}/whole": (changes, None, None),
            f"{name}/resumed": (changes, middle, None),
            f"{name}/stopped": (changes, None, 2),
        }
    return launch(base, directory, 2, jobs)


@pytest.mark.parametrize("name", VARIANTS)
def test_resumed_runs_are_bitwise_the_uninterrupted_one(trained, name):
    whole = checkpoint_of(trained[f"{name}/whole"])
    for part in ("resumed", "stopped"):
        assert_same_state(checkpoint_of(trained[f"{name}/{part}"]), whole)


def test_all_strategies_have_the_losses_of_one_process(trained, accelerator, base, tmp_path):
    changes = {"trainer": {"accelerator": accelerator, "log_every": 1, "precision": "fp32"}}
    alone = launch(base, tmp_path, 1, {"alone": (changes, None, None)})["alone"]
    for name in VARIANTS:
        for row, expected in zip(rows_of(trained[f"{name}/whole"]), rows_of(alone), strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_a_checkpoint_of_two_is_resumed_by_one(trained, accelerator, base, tmp_path):
    sharded = trained["fsdp2/whole"]
    changes = variant("single", trainer={"accelerator": accelerator})
    jobs = {"shrunk": (changes, checkpoint_of(sharded, 8), None)}
    shrunk = launch(base, tmp_path, 1, jobs)["shrunk"]
    for row, expected in zip(rows_of(shrunk), rows_of(sharded), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_killed_rank_ends_the_other_within_30_s(
    accelerator, finished, tmp_path, victim, strategy
):
    text = finished[0].data
    words = [
        *("-m", "trainer", "model=nano", f"strategy={strategy}", "data.source=files"),
        *(f"data.files=[{text.files[0]}]", f"data.cache_dir={text.cache_dir}"),
        *("data.sequence_length=32", "tokenizer.vocab_size=300", "trainer.max_steps=1000000"),
        *(f"trainer.accelerator={accelerator}", "trainer.log_every=1", "trainer.batch_size=4"),
        f"run_dir={tmp_path / 'run'}",
    ]
    ranks = start_ranks(2, *words, cwd=tmp_path)
    try:
        metrics, deadline = tmp_path / "run" / "metrics.csv", time.monotonic() + 120
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert metrics.exists(), [rank.said("stderr") for rank in ranks]
        ranks[victim].signal(signal.SIGKILL)
        began = time.monotonic()
        survivor = ranks[1 - victim].finish(timeout=60)
        assert time.monotonic() - began < 30
        assert survivor.returncode == 1
        assert f"rank {victim}" in survivor.stderr
    finally:
        for rank in ranks:
            rank.process.kill()
