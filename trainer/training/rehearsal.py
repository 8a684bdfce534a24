"""Simulation of a training step of one rank, and its memory, without GPUs or other ranks.

Tensors are fake: they have shapes and dtypes but no values, so a model of any size fits. The other
ranks are torch's fake process group. Module, strategy, optimizer and loss are the real ones,
uncompiled.
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

from trainer.config import DropConfig, RunConfig
from trainer.data.dataset import Batch
from trainer.model import decoder, loss
from trainer.model.decoder import Decoder
from trainer.model.forward_pass import slopes_of
from trainer.positional.config import PositionalConfig
from trainer.positional.rotation import frequencies
from trainer.runs.ranks import Ranks
from trainer.training import optimizers
from trainer.training import strategy as strategies
from trainer.training.module import LanguageModule, make_decoder
from trainer.training.optimizers import global_norm, gradients_of


@contextmanager
def fake_tensors(weights: torch.dtype = torch.float32, device: str = "cuda") -> Iterator[None]:
    """Create only fake tensors within the block.

    New weights have dtype ``weights``. The loss uses the chunks of ``device``, Muon its dtype.
    """
    cpu_chunks, cpu_dtype = loss.CHUNKS["cpu"], optimizers.CPU_DTYPE
    loss.CHUNKS["cpu"] = loss.CHUNKS[device]
    optimizers.CPU_DTYPE = torch.bfloat16 if device == "cuda" else cpu_dtype
    torch.set_default_dtype(weights)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        for cached in (frequencies, slopes_of):
            cached.cache_clear()  # it holds fake tensors, of no use with real ones
        torch.set_default_dtype(torch.float32)
        loss.CHUNKS["cpu"], optimizers.CPU_DTYPE = cpu_chunks, cpu_dtype


@contextmanager
def simulated_rank(config: RunConfig, ranks: Ranks) -> Iterator[LanguageModule]:
    """Provide the module of one rank among simulated ranks; it has no weights yet.

    If there is a process group already, it is used.
    """
    makes_group = not dist.is_initialized()
    if makes_group:
        store = FakeStore()
        dist.init_process_group("fake", rank=ranks.rank, world_size=ranks.world_size, store=store)
    make_mesh = strategies.device_mesh
    try:
        if config.strategy.name in strategies.SHARDED:
            mesh = make_mesh(config.strategy, ranks, torch.device("cpu"))
            strategies.device_mesh = lambda *_: mesh  # making one reads values
        module = LanguageModule(config, make_decoder(config, config.model.vocab_size or 0), ranks)
        module._trainer = SimpleNamespace(  # type: ignore[assignment]  # no trainer is needed here
            accumulate_grad_batches=config.trainer.accumulation(ranks.world_size),
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            global_step=0,
        )
        yield module
    finally:
        strategies.device_mesh = make_mesh
        if makes_group:
            dist.destroy_process_group()


def train_step(
    module: LanguageModule,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, int],
    factor: float = 1.0,
    before_micro_batch: Callable[[], None] = lambda: None,
) -> None:
    """Run one step on micro-batches of ``shape`` ``[B, T]``; gradients are scaled by ``factor``."""
    ids = torch.zeros(shape, dtype=torch.long)
    weights = torch.ones(shape, dtype=torch.float32)
    batch: Batch = {"input_ids": ids, "labels": ids, "weights": weights}
    for index in range(module.trainer.accumulate_grad_batches):
        before_micro_batch()
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
"""Parts of memory, and torch's names for them.

``gathered``: unsharded parameters. ``loss``: logits, and the gradients that the loss computes with
them. ``backward``: temporary tensors of the backward pass.
"""


class _Tracker(MemTracker):
    """Torch's memory tracker, without peaks of every module, which take minutes.

    Tensors created in the loss are a separate part. ``stages`` holds the peak of each stage.
    """

    in_loss = False

    def __init__(self, *tracked: Any) -> None:
        super().__init__(*tracked)
        self._ref_class: Any = (*self._ref_class, LOSS)
        self.stages: dict[str, dict[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most calls; none allocates
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
    """Memory tracker of a sharded model."""


@contextmanager
def _in_loss(tracker: _Tracker) -> Iterator[None]:
    """Set ``tracker.in_loss`` while the loss is computed."""
    patched: Any = decoder
    original = patched.linear_cross_entropy

    def tracked(*args: Any, **options: Any) -> torch.Tensor:
        tracker.in_loss = True
        try:
            return original(*args, **options)
        finally:
            tracker.in_loss = False

    patched.linear_cross_entropy = tracked
    try:
        yield
    finally:
        patched.linear_cross_entropy = original


def memory_peaks(
    module: LanguageModule,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, int],
    has_gradients: bool = False,
) -> dict[str, Parts]:
    """Return bytes by part at the peak of each stage of a step, with the optimizer's state.

    ``module`` comes from :func:`simulated_rank`, with its weights, and cannot be used afterwards.
    ``shape``: of a micro-batch, ``[B, T]``. ``has_gradients``: whether gradients exist before the
    first micro-batch, as before later ones.
    """
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # DTensor makes fake tensors of the whole model on an operator's first call with a shape. Make
    # them now: the tracker would count them.
    global_norm(gradients_of(module))
    optimizer.step()
    if not has_gradients:
        optimizer.zero_grad()
    if module.config.strategy.name in strategies.SHARDED:
        tracker: _Tracker = _ShardedTracker(module.model, optimizer)
        # The tracker relies on forward hooks: call the loss through them.
        model: Any = module.model
        model.forward, model.loss = MethodType(Decoder.loss, model), model.__call__
    else:
        tracker = _Tracker()
        tracker.track_external(module.model, optimizer)
    with _in_loss(tracker), tracker:
        train_step(module, optimizer, shape, before_micro_batch=tracker.reset_mod_stats)
    peaks = {}
    for stage, sizes in tracker.stages.items():
        named = {getattr(kind, "value", kind): size for kind, size in sizes.items()}
        peaks[stage] = {p: sum(named.get(n, 0) for n in names) for p, names in PARTS.items()}
    return peaks


def step_memory(config: RunConfig, ranks: Ranks, exact: bool = True) -> Parts:
    """Return the bytes of each part at the peak of one rank's step; the vocabulary must be known.

    Encodings are ignored, since they take next to nothing. ``exact``: simulate all layers, which
    takes longer; otherwise three and five, from which the peak of each stage is extrapolated.
    """
    depth = config.model.num_hidden_layers
    if exact or depth <= FEW_LAYERS[1]:
        return max(_peaks_of(config, ranks, depth).values(), key=_total)
    few, more = (_peaks_of(config, ranks, layers) for layers in FEW_LAYERS)
    per_layer = (depth - FEW_LAYERS[1]) / (FEW_LAYERS[1] - FEW_LAYERS[0])
    stages = [
        {part: round(size + per_layer * (size - few[stage][part])) for part, size in parts.items()}
        for stage, parts in more.items()
    ]
    return max(stages, key=_total)


FEW_LAYERS = 3, 5
"""Numbers of layers from which the memory of others is extrapolated; two gather fewer blocks."""


def _total(parts: Parts) -> int:
    return sum(parts.values())


def _peaks_of(config: RunConfig, ranks: Ranks, layers: int) -> dict[str, Parts]:
    run, length = config.trainer, config.data.sequence_length
    rows = run.micro_batch_size or run.batch_size // ranks.world_size
    # The second of several micro-batches needs more, since gradients exist. Unsharded gradients
    # that stay until the last micro-batch can only be made by a first one.
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
        # A float8 copy lives only within its product, and torchao may be missing here.
        trainer=replace(run, batch_size=batch, micro_batch_size=rows, compile=False, fp8=False),
    )
    with simulated_rank(config, ranks) as module, fake_tensors():
        module.configure_model()
        optimizer = module.configure_optimizers()
        return memory_peaks(module, optimizer, (rows, length), several and not whole)
