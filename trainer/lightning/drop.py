"""The drop of positional encodings in mid-run, as a Lightning callback."""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from trainer.common.errors import UserError
from trainer.common.updates import check_updates, forget_moments, is_share
from trainer.lightning.module import evaluating
from trainer.lightning.rewarming import Rewarming
from trainer.lightning.updates import in_updates, total_updates, updates_done
from trainer.model.attention import RMSNorm
from trainer.model.decoder import Decoder
from trainer.positional.encodings import ENCODINGS, by_name
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
    """Change encoding, QK-norm and optimizer state; return the probe's losses before and after.

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
    """Return the loss of each sequence of a probe (:func:`apply_change`), which all ranks read."""
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
            forget_moments(optimizer)
        elif policy == "reset_new":
            for name, submodule in trainer.lightning_module.named_modules():
                if isinstance(submodule, RMSNorm) and name.endswith(("q_norm", "k_norm")):
                    optimizer.state.pop(submodule.weight, None)


@torch.no_grad()
def match_gains(model: Decoder, layout: Layout, probe: Sequence[Tensor]) -> None:
    """Set the gain of each QK-norm that ``layout`` turns on to the RMS of its inputs on a probe.

    It then rescales each vector to the average size that its layer was trained with, not to 1.
    """
    squares: dict[RMSNorm, list[Tensor]] = defaultdict(list)

    def measure(norm: RMSNorm, _: nn.Module, __: Any, out: Tensor) -> None:
        squares[norm].append(out.float().square().mean(dim=(1, 2)))

    with evaluating(model), ExitStack() as hooks:
        layers = zip(model.attentions, model.layout.layers, layout.layers, strict=True)
        for attention, old, new in layers:
            if old.qk_norm or not new.qk_norm:
                continue
            inputs = (attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)
            for norm, projection in inputs:
                if norm is not None:
                    hook = projection.register_forward_hook(partial(measure, norm))
                    hooks.callback(hook.remove)
        for ids in probe:
            x = ids[:, :-1].to(model.device)
            model.token_losses(x, x)
    # Parameters are resharded now; within the block gains were temporary copies.
    for norm, means in squares.items():
        norm.weight.fill_(torch.cat(means).mean().sqrt().item())


@dataclass(eq=False, repr=False)
class DropPositions(L.Callback):
    """Drops the positional encoding in mid-run (DroPE), in any Lightning trainer and strategy.

    The trained :class:`Decoder` of a module gets another layout. Any other module must hold a model
    of transformers, which loses the rotation of all layers, see :func:`trainer.hf.drop_rotation`;
    ``to``, ``layers``, ``heads``, ``qk_norm``, ``gain`` and ``probe`` are for a decoder.

    A checkpoint of Lightning holds the state of the drop. Resuming, validating or testing with it
    brings the model into that state, whatever state it has. A trainer may have several of these
    callbacks, which drop different layers or heads at different steps.

    An update is a step of the optimizer, or with manual optimization one of each, in any order.

    Args:
        at: updates before the drop; below 1 a share of all updates.
        to: what takes the encoding's place: a spectrum, or the name of one, such as "nope".
        layers: indices of the layers to drop; None: all.
        heads: indices of their key-value heads; None: all.
        qk_norm: normalize queries and keys from the drop on; None: if the decoder was built with
            ``qk_norm.when="after_drop"``.
        gain: of these norms: one, or matched to the RMS of queries and keys on the probe.
        rewarm: updates over which all learning rates rise again to the schedule's; below 1 a share
            of all updates.
        optimizer_state: keep, reset, or reset_new (of the QK-norms); of all optimizers.
        probe: held-out token ids ``[B, T + 1]`` whose loss is logged just before and just after.

    Raises:
        UserError: at once for another number or policy.
        ValueError: when training starts, for a layout that the model cannot take.
    """

    at: int | float
    to: str | Spectrum = "nope"
    _: KW_ONLY
    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    qk_norm: bool | None = None
    gain: Gain = "one"
    rewarm: int | float = 0
    optimizer_state: OptimizerState = "reset"
    probe: Tensor | None = None

    def __post_init__(self) -> None:
        check_updates("DropPositions.at", self.at)
        check_updates("DropPositions.rewarm", self.rewarm)
        for name, choices in (("gain", Gain), ("optimizer_state", OptimizerState)):
            value = getattr(self, name)
            expected = get_args(choices)
            if value not in expected:
                raise UserError(
                    f"DropPositions.{name}: expected one of {', '.join(expected)}, got {value!r}"
                )
        if self.gain == "matched" and self.probe is None:
            raise UserError("DropPositions.gain: expected a probe for matched, got none")
        self.dropped_at: int | None = None
        self.rewarm_updates = 0
        self._rewarming = Rewarming()

    # The state of the drop, in memory and in checkpoints

    @property
    def state_key(self) -> str:
        """Name of the state in checkpoints, by what is dropped: ``at`` may differ in a resume."""
        layers = None if self.layers is None else sorted(self.layers)
        heads = None if self.heads is None else sorted(self.heads)
        return self._generate_state_key(to=self.to, layers=layers, heads=heads)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the module, and forget an earlier training; a checkpoint is restored after this."""
        self._module = pl_module
        if stage == "fit" and trainer.global_step == 0:
            self.dropped_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return the update of the drop, the length of rewarming, and a decoder's layout."""
        state: dict[str, Any] = {
            "dropped_at": self.dropped_at,
            "rewarm_updates": self.rewarm_updates,
        }
        decoder = _decoder_in(self._module)
        if decoder is not None:
            state["layout"] = decoder.layout.to_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring the module into the state of a checkpoint."""
        self.dropped_at = state_dict["dropped_at"]
        self.rewarm_updates = state_dict["rewarm_updates"]
        decoder = _decoder_in(self._module)
        if decoder is not None:
            decoder.layout = Layout.from_dict(state_dict["layout"])
            return
        from trainer import hf

        if self.dropped_at is None:
            hf.restore_rotation(self._module)
        else:
            hf.drop_rotation(self._module)

    # Before the first update; some strategies restore a checkpoint only after on_fit_start

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the drop will work, or repeat those of a checkpoint; prepare rewarming."""
        if self.dropped_at is None:
            self._prepare(pl_module)
        callbacks: list[L.Callback] = getattr(trainer, "callbacks")  # noqa: B009 - not declared
        drops = [callback for callback in callbacks if isinstance(callback, DropPositions)]
        done = [callback for callback in drops if callback.dropped_at is not None]
        for callback in sorted(done, key=attrgetter("dropped_at")):  # not in the list's order
            callback._remove_encoding(pl_module)
        rewarm = self.rewarm or self.rewarm_updates  # those of a checkpoint
        if rewarm and isinstance(trainer.strategy, DeepSpeedStrategy):
            raise UserError(f"DropPositions.rewarm: expected 0 with DeepSpeed, got {rewarm}")
        total = total_updates(trainer)
        if math.isinf(total) and (is_share(self.at) or is_share(self.rewarm)):
            raise UserError("DropPositions: a share needs the trainer's max_steps or max_epochs")
        if self.dropped_at is None and not is_share(self.at) and self.at >= total:
            rank_zero_warn(f"DropPositions: training ends at update {total:.0f}, before {self.at}")
        if rewarm:
            self._rewarming.start(trainer)

    def _prepare(self, module: L.LightningModule) -> None:
        """Check that the drop will work; restore rotation that an earlier training has dropped."""
        decoder = _decoder_in(module)
        if decoder is not None:
            dropped = self._layout_behind(decoder)
            if dropped == decoder.layout and self.at != 0:
                raise UserError("DropPositions: the decoder has no such encoding to drop")
            with decoder.using(dropped):  # raises if it cannot take it
                return
        chosen = self.to, self.layers, self.heads, bool(self.qk_norm), self.probe is None
        if chosen != ("nope", None, None, False, True) or self.optimizer_state == "reset_new":
            raise UserError("DropPositions: without a Decoder only at, rewarm, keep and reset work")
        from trainer import hf

        if self.at != 0 or not hf.is_dropped(module):
            hf.restore_rotation(module)
        hf.check_droppable(module)

    def _remove_encoding(self, module: L.LightningModule) -> None:
        """Bring the module into its state behind this drop."""
        decoder = _decoder_in(module)
        if decoder is not None:
            decoder.layout = self._layout_behind(decoder)
            return
        from trainer import hf

        hf.drop_rotation(module)

    # Training

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Drop before the first micro-batch of the update."""
        updates = updates_done(trainer)
        if self.dropped_at is None and updates >= in_updates(self.at, trainer):
            rank_zero_info(f"Dropping positional encodings after {updates} updates")
            self.dropped_at = updates
            self.rewarm_updates = in_updates(self.rewarm, trainer)
            self._drop(trainer, pl_module)
        self._rewarming.factor = 1.0
        if self.dropped_at is not None and updates < self.dropped_at + self.rewarm_updates:
            self._rewarming.factor = (updates - self.dropped_at + 1) / self.rewarm_updates

    def _drop(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Remove the encoding, reset the optimizers, and log the losses of the probe."""
        decoder = _decoder_in(module)
        if decoder is None:
            self._remove_encoding(module)
            reset_optimizer(trainer, self.optimizer_state)
            return
        probe = [] if self.probe is None else [self.probe]
        before, after = apply_change(
            trainer,
            decoder,
            self._layout_behind(decoder),
            gain=self.gain,
            optimizer_state=self.optimizer_state,
            probe=probe,
        )
        if self.probe is not None:
            effect = {"drop/loss_before": fmean(before), "drop/loss_after": fmean(after)}
            for logger in trainer.loggers:
                logger.log_metrics(effect, step=self.dropped_at)

    def _layout_behind(self, decoder: Decoder) -> Layout:
        """Return the layout of a decoder behind this drop."""
        layout = decoder.layout
        to, qk_norm = self.to, self.qk_norm
        if isinstance(to, str):
            ENCODINGS.find(to, "DropPositions.to")
            to = by_name(to, decoder.config.head_size, layout.training_length)
        if qk_norm is None:
            qk_norm = decoder.config.qk_norm.when == "after_drop"
        layers, heads = self.layers, self.heads
        return drop(layout, to, "DropPositions", layers=layers, heads=heads, qk_norm=qk_norm)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Lower the learning rates of a step shortly after the drop."""
        self._rewarming.before_step(trainer, optimizer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        """End rewarming."""
        self._rewarming.end(trainer)

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        """End rewarming also with an error, which may come from within a step."""
        self._rewarming.end(trainer)


def _decoder_in(module: nn.Module) -> Decoder | None:
    """Return the decoder in a module; of several the one that is trained."""
    decoders = [part for part in module.modules() if isinstance(part, Decoder)]
    if len(decoders) <= 1:
        return decoders[0] if decoders else None
    trained = {each for each in decoders for p in each.parameters() if p.requires_grad}
    if len(trained) != 1:
        raise UserError(f"DropPositions: expected one decoder that is trained, got {len(trained)}")
    return trained.pop()
