"""A step of one rank among many, without the others, without GPUs and without memory.

Tensors are fake: they have shapes and types and no values, so a model of any size fits; the other
ranks are torch's process group that only pretends. What runs is the program's own: its module,
strategy, optimizer and loss, uncompiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.model import decoder, loss
from trainer.model.decoder import Decoder
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
        module._trainer = SimpleNamespace(  # type: ignore[assignment]
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
) -> None:
    """One update from micro-batches of ``shape`` ``[B, T]``; ``factor``: on gradients."""
    ids = torch.zeros(shape, dtype=torch.long)
    weights = torch.ones(shape, dtype=torch.float32)
    batch = {"input_ids": ids, "labels": ids, "weights": weights, "hashes": ids[:, 0]}
    for index in range(module.trainer.accumulate_grad_batches):
        (factor * module.training_step(batch, index)).backward()
    module.configure_gradient_clipping(optimizer)
    optimizer.step()
    optimizer.zero_grad()


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

    def _track(self, kind: Any, tensor: torch.Tensor) -> None:
        super()._track(LOSS if self.in_loss else kind, tensor)

    def _update_peak_stats(self, _: Any) -> None:
        for device, now in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < now["Total"]:
                self._peak_mem[device] = now["Total"]
                self._peak_mem_snap[device] = dict(now)


class _ShardedTracker(_Tracker, FSDPMemTracker):
    """The same for a sharded model."""


@contextmanager
def _in_loss(tracker: _Tracker) -> Iterator[None]:
    """Within it the tracker knows when the loss computes."""
    usual = decoder.linear_cross_entropy

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        tracker.in_loss = True
        try:
            return usual(*args, **options)
        finally:
            tracker.in_loss = False

    decoder.linear_cross_entropy = noted
    try:
        yield
    finally:
        decoder.linear_cross_entropy = usual


def _lose_by_call(model: Decoder) -> None:
    """Have a sharded decoder's loss go through its hooks, by which alone the tracker knows it."""
    model.forward = MethodType(Decoder.loss, model)  # type: ignore[method-assign]
    model.loss = model.__call__  # type: ignore[method-assign]


def peak_memory(
    module: LanguageModule, optimizer: torch.optim.Optimizer, shape: tuple[int, int]
) -> dict[str, int]:
    """Bytes by part at the peak of an update, when the optimizer has its state. The module is of no
    use afterwards.

    Args:
        module: of a rank, with its weights, see :func:`rank_of`.
        optimizer: its optimizer.
        shape: of a micro-batch, ``[B, T]``.
    """
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if module.config.strategy.name in strategies.SHARDED:
        tracker: _Tracker = _ShardedTracker(module.model, optimizer)
        _lose_by_call(module.model)
    else:
        tracker = _Tracker()
        tracker.track_external(module.model, optimizer)
    with _in_loss(tracker), tracker:
        update(module, optimizer, shape)
    (found,) = tracker.get_tracker_snapshot("peak").values()
    sizes = {getattr(kind, "value", kind): size for kind, size in found.items()}
    return {part: sum(sizes.get(name, 0) for name in names) for part, names in PARTS.items()}
