"""Collectives of one rank in a step, on torch's fake process group."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest
import torch

from scripts.rehearse import sent
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.recalibration.drop import drop
from trainer.runs.config import OptimizerConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training import optimizers
from trainer.training.rehearsal import simulated_rank

LAYERS, RANKS = 3, 8


@pytest.fixture
def module():
    """A function that makes the module of one rank, with its optimizer, in place of the last."""
    with ExitStack() as stack:

        def make(rank, name="fsdp2", optimizer="adamw", **strategy):
            stack.close()
            config = RunConfig(
                model=ModelConfig(
                    32, 48, LAYERS, 2, 1, None, 50, qk_norm=QKNormConfig("after_drop")
                ),
                strategy=StrategyConfig(name=name, **strategy),
                optimizer=OptimizerConfig(name=optimizer),
                trainer=TrainerConfig(batch_size=4 * RANKS, micro_batch_size=2),
            )
            made = stack.enter_context(simulated_rank(config, Ranks(rank, RANKS, rank % 4, 4)))
            made.configure_model()
            return made, made.configure_optimizers()

        yield make


def step(module, optimizer, factor=1.0):
    return sent(module, optimizer, (2, 16), factor)


def counts(calls):
    numbers = {}
    for name, _ in calls:
        numbers[name] = numbers.get(name, 0) + 1
    return numbers


def test_a_step_sends_no_more_than_sharding_needs(module):
    """Each micro-batch gathers the root and the blocks, and in backward all blocks but the last;
    each step reduces them once, one sum of losses and one of norms."""
    calls = step(*module(rank=0))
    assert counts(calls) == {
        "allgather_base": 2 * (1 + LAYERS + LAYERS - 1),
        "reduce_scatter_base": LAYERS + 1,
        "allreduce": 1,
        "all_reduce": 1,
    }
    assert calls[-2:] == [("allreduce", 4 * 10), ("all_reduce", calls[-1][1])]
    assert calls[-1][1] <= 400  # norms of parameters, not gradients


def test_every_step_and_every_rank_send_the_same_in_the_same_order(module):
    """Before the drop, after it, and where a gradient is not finite."""
    sequences = []
    for rank in (0, 5):
        made, optimizer = module(rank)
        sequences += [step(made, optimizer), step(made, optimizer, factor=float("nan"))]
        made.model.layout = drop(made.model.layout, qk_norm=True)
        optimizer.state.clear()
        sequences += [step(made, optimizer), step(made, optimizer)]
    assert all(calls == sequences[0] for calls in sequences)


def test_reducing_after_every_micro_batch_sends_gradients_as_often(module):
    calls = step(*module(rank=0, reduce_gradients="micro_batch"))
    assert counts(calls)["reduce_scatter_base"] == 2 * (LAYERS + 1)


def test_a_hybrid_reduces_shards_between_its_groups(module):
    calls = step(*module(rank=5, name="hsdp", shard_size=4))
    assert counts(calls)["reduce_scatter_base"] == LAYERS + 1
    assert counts(calls)["allreduce"] == LAYERS + 1 + 1
    sizes = {name: [size for other, size in calls if other == name] for name, _ in calls}
    assert sum(sizes["allreduce"]) - 4 * 10 == sum(sizes["reduce_scatter_base"]) / 4


def test_a_hybrid_adds_up_its_groups_once_a_step(module):
    """Even if every micro-batch reduces gradients within a group."""
    made = module(rank=5, name="hsdp", shard_size=4, reduce_gradients="micro_batch")
    calls = step(*made)
    assert counts(calls)["reduce_scatter_base"] == 2 * (LAYERS + 1)
    assert counts(calls)["allreduce"] == LAYERS + 1 + 1
    assert step(*made) == calls


def test_muon_exchanges_shards_twice_for_all_matrices_of_a_shape(module, monkeypatch):
    """A rank sends its shards in bfloat16, and gets its part of the matrices whole."""
    monkeypatch.setattr(optimizers, "CPU_DTYPE", torch.bfloat16)  # as on a GPU
    made, optimizer = module(rank=0, optimizer="muon")
    exchanges = [size for name, size in step(made, optimizer) if name == "alltoall_base"]
    matrices = [p for n, p in made.model.named_parameters() if "layers" in n and p.ndim == 2]
    shapes = Counter(p.shape for p in matrices)
    assert len(exchanges) == 2 * len(shapes)
    whole = sum(-(-count // RANKS) * shape.numel() for shape, count in shapes.items())
    assert sum(exchanges) == 2 * 2 * whole
