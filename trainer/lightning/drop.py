"""The drop of positional encodings in mid-run, as a Lightning callback."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer.lightning.module import evaluating
from trainer.model.attention import RMSNorm
from trainer.model.decoder import Decoder
from trainer.positional.encodings import by_name
from trainer.positional.layout import Layout, drop
from trainer.positional.spectrum import Spectrum

OptimizerState = Literal["keep", "reset", "reset_new"]
Gain = Literal["one", "matched"]


def apply_change(
    trainer: L.Trainer,
    model: Decoder,
    layout: Layout,
    *,
    gain: Gain = "one",
    optimizer_state: OptimizerState = "keep",
    probe: Sequence[Tensor] = (),
) -> tuple[list[float], list[float]]:
    """Change encoding, QK-norm and optimizer state; return the losses of the probe's sequences
    before and after.

    All ranks call this together, with the same probe.

    Args:
        layout: the encoding after the change.
        gain: of QK-norms that come on: 1, or matched to the RMS of their inputs on the probe.
        optimizer_state: keep, reset, or reset_new (of the QK-norms alone).
        probe: held-out token ids in batches ``[B, T + 1]``; empty: no losses.
    """
    before = losses_of(model, probe)
    if gain == "matched" and probe:
        match_gains(model, layout, probe)
    model.layout = layout
    reset_optimizer(trainer, optimizer_state)
    return before, losses_of(model, probe)


def losses_of(model: Decoder, probe: Sequence[Tensor]) -> list[float]:
    """Return the mean loss of each sequence of a probe, see :func:`apply_change`; every rank reads
    all."""
    losses: list[float] = []
    with evaluating(model):
        for ids in probe:
            x = ids.to(model.device)
            losses += model.token_losses(x[:, :-1], x[:, 1:]).mean(dim=1).tolist()
    return losses


def reset_optimizer(trainer: L.Trainer, policy: OptimizerState) -> None:
    """Clear the optimizer's state, or with reset_new the state of the QK-norms alone."""
    for optimizer in trainer.optimizers:
        if policy == "reset":
            optimizer.state.clear()
        elif policy == "reset_new":
            for name, submodule in trainer.lightning_module.named_modules():
                if isinstance(submodule, RMSNorm) and name.endswith(("q_norm", "k_norm")):
                    optimizer.state.pop(submodule.weight, None)


@torch.no_grad()
def match_gains(model: Decoder, layout: Layout, probe: Sequence[Tensor]) -> None:
    """Set the gain of each QK-norm that ``layout`` turns on to the RMS of its inputs on a probe,
    see :func:`apply_change`.

    It then rescales each vector to the average size that its layer was trained with, not to 1.
    """
    squares: dict[RMSNorm, list[Tensor]] = defaultdict(list)
    with evaluating(model), ExitStack() as hooks:
        layers = zip(model.layers, model.layout.layers, layout.layers, strict=True)
        for block in (block for block, old, new in layers if new.qk_norm > old.qk_norm):
            attention = block.self_attn
            for projection, norm in (
                (attention.q_proj, attention.q_norm),
                (attention.k_proj, attention.k_norm),
            ):
                if norm is not None:

                    def measure(_: nn.Module, __: Any, out: Tensor, norm: RMSNorm = norm) -> None:
                        squares[norm].append(out.float().square().mean(dim=(1, 2)))

                    hooks.callback(projection.register_forward_hook(measure).remove)
        for ids in probe:
            x = ids[:, :-1].to(model.device)
            model.token_losses(x, x)
    # Parameters are resharded now; within the block gains were temporary copies.
    for norm, means in squares.items():
        norm.weight.fill_(torch.cat(means).mean().sqrt().item())


def multiply_rates(
    optimizer: torch.optim.Optimizer, factor: Callable[[], float]
) -> tuple[RemovableHandle, ...]:
    """Multiply the learning rates by ``factor()`` in every step alone: schedulers may multiply
    them. Removing the handles ends it."""
    rates: list[float] = []

    def lower(*_: Any) -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= factor()

    def restore(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    return optimizer.register_step_pre_hook(lower), optimizer.register_step_post_hook(restore)


@dataclass(eq=False, repr=False)
class DropPositions(L.Callback):
    """Drops the positional encoding in mid-run (DroPE), in any Lightning trainer and strategy.

    A module that holds a :class:`Decoder` gets another layout. Any other module must hold a model
    of transformers, which loses the rotation of all layers, see :func:`trainer.hf.drop_rotation`;
    ``to``, ``layers``, ``heads``, ``qk_norm``, ``gain`` and ``probe`` are for a decoder. Runs
    resume from Lightning's checkpoints on either side of the drop, with the same callback.

    Args:
        at: updates before the drop; below 1 a share of all updates.
        to: what takes the encoding's place: a spectrum, or the name of one, such as "nope".
        layers: indices of the layers to drop; None: all.
        heads: indices of their key-value heads; None: all.
        qk_norm: normalize queries and keys from the drop on, by the norms of a model built with
            ``qk_norm.when="after_drop"``.
        gain: of these norms: one, or matched to the RMS of queries and keys on the probe.
        rewarm: updates over which the learning rate rises again to the schedule's; below 1 a share
            of all updates.
        optimizer_state: keep, reset, or reset_new (of the QK-norms).
        probe: held-out token ids ``[B, T + 1]`` whose loss is logged just before and just after.

    Raises:
        ValueError: at once for a negative ``at`` or another policy; when training starts, for a
            layout that the decoder cannot take, or what a model of transformers has not.
    """

    at: int | float
    to: str | Spectrum = "nope"
    _: KW_ONLY
    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    qk_norm: bool = True
    gain: Gain = "one"
    rewarm: int | float = 0
    optimizer_state: OptimizerState = "keep"
    probe: Tensor | None = None

    def __post_init__(self) -> None:
        if min(self.at, self.rewarm) < 0 or self.optimizer_state not in get_args(OptimizerState):
            raise ValueError(
                f"DropPositions: at={self.at}, rewarm={self.rewarm}, "
                f"optimizer_state={self.optimizer_state!r}"
            )
        self.dropped_at: int | None = None
        self._hooks: list[RemovableHandle] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget the drop of an earlier training; a checkpoint is restored after this."""
        if stage == "fit" and trainer.global_step == 0:
            self.dropped_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the drop."""
        return {"dropped_at": self.dropped_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the step of a drop that is done."""
        self.dropped_at = state_dict["dropped_at"]

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Repeat the drop in a resumed model of transformers."""
        if self.dropped_at is not None and _decoder_in(pl_module) is None:
            _drop_rotation(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the step; repeat the drop in a resumed model of transformers; prepare rewarming."""
        self.on_sanity_check_start(trainer, pl_module)
        steps = trainer.estimated_stepping_batches
        numbers = self.at, self.rewarm
        if any(0 < number < 1 for number in numbers) and not 0 < steps < math.inf:
            raise ValueError("DropPositions: a share of max_steps, which is not set")
        self.step, rewarm = (round(n * steps) if 0 < n < 1 else round(n) for n in numbers)
        if self.step >= steps > 0:
            rank_zero_warn(f"DropPositions: training ends at update {steps}, before {self.step}")
        if (model := _decoder_in(pl_module)) is None:
            chosen = self.to, self.layers, self.heads, self.gain
            is_default = chosen == ("nope", None, None, "one") and self.probe is None
            if not is_default or self.optimizer_state == "reset_new":
                raise ValueError(
                    "DropPositions: to, layers, heads, gain, probe and reset_new need a Decoder"
                )
            from trainer.hf import check_droppable

            check_droppable(pl_module)
        elif self.dropped_at is None:
            with model.using(self._dropped(model)):  # raises if it cannot take it
                pass

        def factor() -> float:
            since = -1 if self.dropped_at is None else trainer.global_step - self.dropped_at
            return (since + 1) / rewarm if 0 <= since < rewarm else 1.0

        for optimizer in trainer.optimizers:
            self._hooks += multiply_rates(optimizer, factor)

    def on_train_end(self, *_: Any) -> None:
        """End rewarming: the module may keep its optimizer for another fit."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_exception(self, *_: Any) -> None:
        """End rewarming also with an error."""
        self.on_train_end()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Drop before the first micro-batch of the step."""
        if self.dropped_at is not None or trainer.global_step < self.step:
            return
        self.dropped_at = trainer.global_step
        rank_zero_info(f"Dropping positional encodings after {self.dropped_at} updates")
        model = _decoder_in(pl_module)
        if model is None:
            _drop_rotation(pl_module)
            reset_optimizer(trainer, self.optimizer_state)
            return
        losses = apply_change(
            trainer,
            model,
            self._dropped(model),
            gain=self.gain,
            optimizer_state=self.optimizer_state,
            probe=() if self.probe is None else (self.probe,),
        )
        if self.probe is not None:
            names = "drop/loss_before", "drop/loss_after"
            effect = dict(zip(names, map(fmean, losses), strict=True))
            for logger in trainer.loggers:
                logger.log_metrics(effect, step=self.dropped_at)

    def _dropped(self, model: Decoder) -> Layout:
        layout, to = model.layout, self.to
        if isinstance(to, str):
            to = by_name(to, model.config.head_size, layout.training_length)
        return drop(layout, to, layers=self.layers, heads=self.heads, qk_norm=self.qk_norm)


def _decoder_in(module: nn.Module) -> Decoder | None:
    return next((part for part in module.modules() if isinstance(part, Decoder)), None)


def _drop_rotation(module: nn.Module) -> None:
    from trainer.hf import drop_rotation

    drop_rotation(module)
