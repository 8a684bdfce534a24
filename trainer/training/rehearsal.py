"""A step of one rank among many, without the others, without GPUs and without memory.

Tensors are fake: they have shapes and types and no values, so a model of any size fits; the other
ranks are torch's process group that only pretends. What runs is the program's own: its module,
strategy, optimizer and loss, uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.data.dataset import Batch
from trainer.model import decoder, loss
from trainer.model.decoder import Decoder
from trainer.model.forward_pass import slopes_of
from trainer.positional.config import PositionalConfig
from trainer.positional.rotation import frequencies
from trainer.recalibration.config import DropConfig
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.training import strategy as strategies
from trainer.training.module import LanguageModule, make_decoder


@contextmanager
def pretended(weights: torch.dtype = torch.float32, device: str = "cuda") -> Iterator[None]:
    """Within it tensors are fake, new weights of this type, and the loss goes in the chunks of a
    device."""
    usual = loss.CHUNKS["cpu"]
    loss.CHUNKS["cpu"] = loss.CHUNKS[device]
    torch.set_default_dtype(weights)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        for kept in (frequencies, slopes_of):
            kept.cache_clear()  # of fake tensors, which computations with real ones would not write
        torch.set_default_dtype(torch.float32)
        loss.CHUNKS["cpu"] = usual


@contextmanager
def rank_of(config: RunConfig, ranks: Ranks) -> Iterator[LanguageModule]:
    """The module of one rank, without weights yet, among others that only pretend to be there.

    Where a process group is there already, among its ranks.
    """
    own = not dist.is_initialized()
    if own:
        store = FakeStore()
        dist.init_process_group("fake", rank=ranks.rank, world_size=ranks.world_size, store=store)
    made = strategies.device_mesh
    try:
        if config.strategy.name in strategies.SHARDED:
            mesh = made(config.strategy, ranks, torch.device("cpu"))
            strategies.device_mesh = lambda *_: mesh  # to make it reads values
        module = LanguageModule(config, make_decoder(config, config.model.vocab_size or 0), ranks)
        module._trainer = SimpleNamespace(  # type: ignore[assignment]  # no trainer is needed here
            accumulate_grad_batches=config.trainer.accumulation(ranks.world_size),
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            global_step=0,
        )
        yield module
    finally:
        strategies.device_mesh = made
        if own:
            dist.destroy_process_group()


def update(
    module: LanguageModule,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, int],
    factor: float = 1.0,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """One update from micro-batches of ``shape`` ``[B, T]``; ``factor``: on gradients; ``begin``:
    before each of them."""
    ids = torch.zeros(shape, dtype=torch.long)
    weights = torch.ones(shape, dtype=torch.float32)
    batch: Batch = {"input_ids": ids, "labels": ids, "weights": weights, "hashes": ids[:, 0]}
    for index in range(module.trainer.accumulate_grad_batches):
        begin()
        (factor * module.training_step(batch, index)).backward()
    module.configure_gradient_clipping(optimizer)
    optimizer.step()
    optimizer.zero_grad()


Parts = dict[str, int]
"""Bytes by the names of :data:`PARTS`."""

LOSS = "Loss"
PARTS = {
    "parameters": ("Parameter", "Sharded Param", "Buffer"),
    "optimizer": ("Optstate", "OptState"),
    "gradients": ("Gradient", "Sharded Grad", "Unsharded Grad", "Reduce Scatter"),
    "gathered": ("Unsharded Param", "All Gather"),
    "activations": ("Activation", "Inputs", "Other"),
    "loss": (LOSS,),
    "backward": ("Temp",),
}
"""What memory holds, and torch's names for it. ``gathered``: whole parameters; ``loss``: logits and
the gradients that the loss takes with them; ``backward``: what backward makes in passing."""


class _Tracker(MemTracker):
    """Torch's, of the step alone: to keep the peak of every module takes it minutes. What is made
    in the loss is a part of its own."""

    in_loss = False

    def __init__(self, *tracked: Any) -> None:
        super().__init__(*tracked)
        self._ref_class: Any = (*self._ref_class, LOSS)
        self.stages: dict[str, dict[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most of all calls, and none takes memory
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track(self, kind: Any, tensor: torch.Tensor) -> None:
        stage: Any = LOSS if self.in_loss else kind
        super()._track(stage, tensor)

    def _update_peak_stats(self, _: Any) -> None:
        if self.in_loss:
            stage = "loss"
        elif self._mod_tracker.is_bw:
            stage = "backward"
        else:
            stage = "update" if "backward" in self.stages else "forward"
        (now,) = self._curr_mem_snap.values() or ({"Total": 0},)
        if self.stages.get(stage, {"Total": 0})["Total"] < now["Total"]:
            self.stages[stage] = dict(now)


class _ShardedTracker(_Tracker, FSDPMemTracker):
    """The same for a sharded model."""


@contextmanager
def _in_loss(tracker: _Tracker) -> Iterator[None]:
    """Within it the tracker knows when the loss computes."""
    patched: Any = decoder
    usual = patched.linear_cross_entropy

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        tracker.in_loss = True
        try:
            return usual(*args, **options)
        finally:
            tracker.in_loss = False

    patched.linear_cross_entropy = noted
    try:
        yield
    finally:
        patched.linear_cross_entropy = usual


def _lose_by_call(model: Decoder) -> None:
    """Have a sharded decoder's loss go through its hooks, by which alone the tracker knows it."""
    model.forward = MethodType(Decoder.loss, model)  # type: ignore[method-assign]  # of one object
    model.loss = model.__call__  # type: ignore[method-assign]  # of one object


def peaks(
    module: LanguageModule,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, int],
    has_gradients: bool = False,
) -> dict[str, Parts]:
    """Bytes by part at the peak of each stage of an update, when the optimizer has its state. The
    module is of no use afterwards.

    Args:
        module: of a rank, with its weights, see :func:`rank_of`.
        optimizer: its optimizer.
        shape: of a micro-batch, ``[B, T]``.
        has_gradients: whether the first one finds gradients, as those behind it do.
    """
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if not has_gradients:
        optimizer.zero_grad()
    if module.config.strategy.name in strategies.SHARDED:
        tracker: _Tracker = _ShardedTracker(module.model, optimizer)
        _lose_by_call(module.model)
    else:
        tracker = _Tracker()
        tracker.track_external(module.model, optimizer)
    with _in_loss(tracker), tracker:
        update(module, optimizer, shape, begin=tracker.reset_mod_stats)
    found = {}
    for stage, sizes in tracker.stages.items():
        named = {getattr(kind, "value", kind): size for kind, size in sizes.items()}
        found[stage] = {p: sum(named.get(n, 0) for n in names) for p, names in PARTS.items()}
    return found


def memory_of(config: RunConfig, ranks: Ranks, exact: bool = True) -> Parts:
    """Bytes by part when a step needs most, of a rank of a run whose vocabulary is known.

    Args:
        config: the run; its encodings are left out, which take next to nothing.
        ranks: which rank of how many.
        exact: go through all layers, which takes longer, and not through two and four, from which
            the peak of each stage follows for any number.
    """
    depth = config.model.num_hidden_layers
    if exact or depth <= FEW[1]:
        return max(_peaks_of(config, ranks, depth).values(), key=_total)
    few, more = (_peaks_of(config, ranks, layers) for layers in FEW)
    per_layer = (depth - FEW[1]) / (FEW[1] - FEW[0])
    stages = [
        {part: round(size + per_layer * (size - few[stage][part])) for part, size in parts.items()}
        for stage, parts in more.items()
    ]
    return max(stages, key=_total)


FEW = 2, 4
"""Layers from which others follow."""


def _total(parts: Parts) -> int:
    return sum(parts.values())


def _peaks_of(config: RunConfig, ranks: Ranks, layers: int) -> dict[str, Parts]:
    run, length = config.trainer, config.data.sequence_length
    rows = run.micro_batch_size or run.batch_size // ranks.world_size
    # Of several micro-batches the second finds the gradients of the first. Where these are whole
    # until the last one, only a micro-batch makes them.
    several = run.accumulation(ranks.world_size) > 1
    whole = config.strategy.name in strategies.SHARDED
    whole = whole and config.strategy.reduce_gradients != "micro_batch"
    batch = rows * ranks.world_size * (2 if several and whole else 1)
    config = replace(
        config,
        model=replace(config.model, num_hidden_layers=layers, from_pretrained=None, from_run=None),
        positional=PositionalConfig(),
        drop=DropConfig(),
        phases={},
        trainer=replace(run, batch_size=batch, micro_batch_size=rows, compile=False),
    )
    with rank_of(config, ranks) as module, pretended():
        module.configure_model()
        optimizer = module.configure_optimizers()
        return peaks(module, optimizer, (rows, length), several and not whole)
