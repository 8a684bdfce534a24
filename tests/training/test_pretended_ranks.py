"""What one rank of many sends, on torch's process group that only pretends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.model.config import ModelConfig, QKNormConfig
from trainer.recalibration.drop import drop
from trainer.runs.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training.module import LanguageModule, make_decoder

LAYERS, RANKS = 3, 8


class Collectives(TorchDispatchMode):
    """Their names and the numbers of elements they send or receive, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first its parts, then those come here
        space, name = operator.name().split("::")
        if "c10d" in space and "wrap" not in name and "wait" not in name:
            sizes = [x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.calls.append((name.strip("_"), max(sizes)))
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def module():
    """A function that makes the module of one rank, with its optimizer."""

    def make(rank, name="fsdp2", **strategy):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        norms = QKNormConfig("after_drop")
        config = RunConfig(
            model=ModelConfig(32, 48, LAYERS, 2, 1, None, 50, qk_norm=norms),
            strategy=StrategyConfig(name=name, **strategy),
            trainer=TrainerConfig(batch_size=4 * RANKS, micro_batch_size=2),
        )
        ranks = Ranks(rank, RANKS, rank % 4, 4)
        made = LanguageModule(config, make_decoder(config, 50), ranks)
        made._trainer = SimpleNamespace(
            accumulate_grad_batches=config.trainer.accumulation(RANKS),
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            global_step=0,
        )
        made.configure_model()
        return made, made.configure_optimizers()

    yield make
    dist.destroy_process_group()


def step(module, optimizer, factor=1.0):
    """The collectives of an update of two micro-batches."""
    ids = torch.randint(50, (2, 16))
    batch = {"input_ids": ids, "labels": ids, "weights": torch.ones(2, 16)}
    batch["hashes"] = torch.zeros(2, dtype=torch.int64)
    with Collectives() as seen:
        for index in range(2):
            (factor * module.training_step(batch, index)).backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return seen.calls


def counts(calls):
    found = {}
    for name, _ in calls:
        found[name] = found.get(name, 0) + 1
    return found


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
    assert calls[-2:] == [("allreduce", 10), ("all_reduce", calls[-1][1])]
    assert calls[-1][1] <= 100  # norms of parameters, not gradients


def test_every_step_and_every_rank_send_the_same_in_the_same_order(module):
    """Before the drop, after it, and where a gradient is not finite."""
    found = []
    for rank in (0, 5):
        made, optimizer = module(rank)
        found += [step(made, optimizer), step(made, optimizer, factor=float("nan"))]
        made.model.layout = drop(made.model.layout, qk_norm=True)
        optimizer.state.clear()
        found += [step(made, optimizer), step(made, optimizer)]
        if rank == 0:
            dist.destroy_process_group()
    assert all(calls == found[0] for calls in found)


def test_reducing_after_every_micro_batch_sends_gradients_as_often(module):
    calls = step(*module(rank=0, reduce_gradients="micro_batch"))
    assert counts(calls)["reduce_scatter_base"] == 2 * (LAYERS + 1)


def test_a_hybrid_reduces_shards_between_its_groups(module):
    calls = step(*module(rank=5, name="hsdp", shard_size=4))
    assert counts(calls)["reduce_scatter_base"] == LAYERS + 1
    assert counts(calls)["allreduce"] == LAYERS + 1 + 1
    sizes = {name: [size for other, size in calls if other == name] for name, _ in calls}
    assert sum(sizes["allreduce"]) - 10 == sum(sizes["reduce_scatter_base"]) / 4
