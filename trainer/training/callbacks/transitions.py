"""Begin and end of phases: drops, rescalings, QK-norm, a fresh optimizer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.corpus import Corpus
from trainer.data.dataset import Batch, as_batch
from trainer.data.held_out import held_out_windows
from trainer.model.attention import RMSNorm
from trainer.model.decoder import Decoder
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum
from trainer.runs.layouts import layout_of_phase
from trainer.runs.phases import Phase, phase_at
from trainer.runs.ranks import all_gather
from trainer.runs.saved_state import Effect, RunState
from trainer.training.module import LanguageModule, StepCallback, evaluating

log = logging.getLogger(__name__)


class Transitions(StepCallback):
    """Changes the model at the first step of a phase.

    A change concerns layout, QK-norm and optimizer state. Its effect is measured on one fixed
    held-out batch of the phase's length: just before, just after, and at the end of the phase.

    ``effects`` by phase are saved. A resumed run repeats no change: the layout is saved.
    """

    def __init__(
        self,
        phases: tuple[Phase, ...],
        effect_batch: Callable[[Phase], Batch],
        before_drop: Callable[[L.Trainer], None],
        add_metrics: Callable[[dict[str, float]], None],
    ) -> None:
        self.phases, self.effect_batch = phases, effect_batch
        self.before_drop, self.add_metrics = before_drop, add_metrics
        self.effects: dict[str, Effect] = {}
        self._batch: tuple[str, Batch] | None = None

    def restore(self, state: RunState) -> None:
        """Restore the measurements."""
        self.effects = dict(state.effects)

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.drop and phase.name in self.effects for phase in self.phases)

    def changed_at(self, step: int) -> bool:
        """Whether the model was changed after ``step`` steps."""
        return any(effect.step == step for effect in self.effects.values())

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Change the model before the first batch of a phase."""
        phase = phase_at(self.phases, trainer.global_step)
        if phase.start == trainer.global_step and phase.name not in self.effects:
            self._enter(trainer, module, phase)

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure the effect at the last step of a phase."""
        phase = phase_at(self.phases, trainer.global_step - 1)
        if trainer.global_step == phase.end:
            self._measure_end(trainer, module, phase)

    def _measure_end(self, trainer: L.Trainer, module: LanguageModule, phase: Phase) -> None:
        """Measure the loss at the end of a phase that began with a change."""
        effect = self.effects.get(phase.name)
        if effect is None:
            return
        losses = self.losses(module, phase)
        sequences = effect.sequences | {"end": list(losses)}
        self.effects[phase.name] = replace(effect, loss_end=fmean(losses), sequences=sequences)
        name = "recalibration" if phase.drop else f"phase {phase.name!r}"
        step, loss = trainer.global_step, fmean(losses)
        log.info("Step %d: held-out loss %.3f at the end of %s", step, loss, name)
        self.add_metrics({f"{_key(phase)}/loss_end": loss})

    def _enter(self, trainer: L.Trainer, module: LanguageModule, phase: Phase) -> None:
        longer = phase.config.data.sequence_length > module.model.layout.training_length
        if not phase.change and not longer:
            return
        if phase.drop and not self.has_dropped:
            self.before_drop(trainer)
        before = self.losses(module, phase)
        model, layout = module.model, module.model.layout
        new_layout = layout_of_phase(layout, phase, model.config)
        if phase.drop is not None and phase.drop.qk_norm_gain == "matched":
            self._match_gains(module, phase, new_layout)
        model.layout = new_layout
        # A new encoding may need another kernel: ALiBi has a mask, which cuDNN must not see.
        choice = module.choose_attention(phase.config, trainer.strategy.root_device.type)
        torch.backends.cuda.enable_cudnn_sdp(choice.cudnn)
        after = self.losses(module, phase)
        change, loss_before, loss_after = describe(phase, layout), fmean(before), fmean(after)
        self.effects[phase.name] = Effect(
            step=trainer.global_step,
            what=change,
            loss_before=loss_before,
            loss_after=loss_after,
            sequences={"before": list(before), "after": list(after)},
        )
        self._reset_optimizer(trainer, module, phase)
        log.info(
            "Step %d: %s; held-out loss %.3f before, %.3f after",
            *(trainer.global_step, change, loss_before, loss_after),
        )
        self.add_metrics(
            {f"{_key(phase)}/loss_before": loss_before, f"{_key(phase)}/loss_after": loss_after}
        )

    def _match_gains(self, module: LanguageModule, phase: Phase, after: Layout) -> None:
        """Set the gain of each QK-norm to the RMS of its inputs.

        It then rescales each vector to the average size that its layer was trained with, not to 1.
        Factors on logits that the layout ``after`` the drop lacks become part of the gains.
        """
        if module.model.config.qk_norm.when != "after_drop":
            return
        with evaluating(module) as model:
            batches = [ids for ids, _ in self._micro_batches(module, phase)]
            sizes = input_sizes(model, batches)
            factors = lost_factors(model, after)
        # Parameters are resharded now; within the block gains were temporary copies.
        with torch.no_grad():
            for norm, size in sizes.items():
                norm.weight.fill_(size * factors[norm])

    def _reset_optimizer(self, trainer: L.Trainer, module: LanguageModule, phase: Phase) -> None:
        policy, (optimizer,) = phase.optimizer_state, trainer.optimizers
        if policy == "reset":
            optimizer.state.clear()
        elif policy == "reset_new" and module.model.config.qk_norm.when == "after_drop":
            for name, submodule in module.model.named_modules():
                if isinstance(submodule, RMSNorm) and name.endswith(("q_norm", "k_norm")):
                    optimizer.state.pop(submodule.weight, None)

    def losses(self, module: LanguageModule, phase: Phase) -> list[float]:
        """Return the loss of each sequence in the fixed batch."""
        rank, ranks = module.ranks.rank, module.ranks.world_size
        with evaluating(module) as model:
            parts = self._micro_batches(module, phase, ranks)
            if len(parts) % ranks:  # too few parts to share: each rank reads them all
                rank, ranks = 0, 1
            losses = [model.token_losses(*x).mean(dim=1) for x in parts[rank::ranks]]
            mine = torch.stack(losses).tolist()
        of_ranks = [mine] if ranks == 1 else all_gather(mine)
        return [loss for row in zip(*of_ranks, strict=True) for part in row for loss in part]

    def _micro_batches(
        self, module: LanguageModule, phase: Phase, shared: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """Split the fixed batch, inputs and targets, into parts of one size.

        Parts are no larger than training's micro-batches. If possible, each of the ranks that share
        the parts gets the same number.
        """
        if self._batch is None or self._batch[0] != phase.name:
            self._batch = phase.name, self.effect_batch(phase)
        batch = self._batch[1]
        ids, labels = (x.to(module.device) for x in (batch["input_ids"], batch["labels"]))
        run, ranks = phase.config.trainer, module.ranks.world_size
        largest = run.batch_size // (run.accumulation(ranks) * ranks)
        fit = [n for n in range(-(-len(ids) // largest), len(ids) + 1) if len(ids) % n == 0]
        parts = next((n for n in fit if n % shared == 0), fit[0])
        return list(zip(ids.chunk(parts), labels.chunk(parts), strict=True))


@torch.no_grad()
def input_sizes(model: Decoder, batches: Sequence[Tensor]) -> dict[RMSNorm, float]:
    """Return the RMS of the inputs of each query and key norm on ``batches`` of ``[B, T]`` token
    ids.

    All batches have the same size.
    """
    squares: dict[RMSNorm, Tensor | float] = defaultdict(float)
    hooks = []

    def measure(norm: RMSNorm) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            squares[norm] = squares[norm] + output.float().square().mean()

        return hook

    for block in model.layers:
        attention = block.self_attn
        for projection, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            if norm is not None:
                hooks.append(projection.register_forward_hook(measure(norm)))
    try:
        for ids in batches:
            model.token_losses(ids, ids)
    finally:
        for hook in hooks:
            hook.remove()
    # one transfer from the device for all norms
    means = torch.stack([torch.as_tensor(x) for x in squares.values()]) / len(batches)
    return dict(zip(squares, means.sqrt().tolist(), strict=True))


def lost_factors(model: Decoder, after: Layout) -> dict[RMSNorm, float]:
    """Return the factor of each query and key norm that makes up for what ``after`` lacks.

    The scale of rotated channels (YaRN, LongRoPE) and that of the temperature multiply logits.
    Queries and keys share their product, averaged over heads, or one norm has all of it.
    """
    factors: dict[RMSNorm, float] = {}
    for block, old, new in zip(model.layers, model.layout.layers, after.layers, strict=True):
        lost = _logit_scale(old, model.config.head_size) / _logit_scale(new, model.config.head_size)
        attention = block.self_attn
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        factors |= {norm: lost ** (1 / len(norms)) for norm in norms}
    return factors


def _logit_scale(layer: LayerEncoding, head_dim: int) -> float:
    """Return the mean factor of a layer's encoding on logits within the training length."""

    def scale(spectrum: Spectrum) -> float:
        rotated = spectrum.rotary_dim / head_dim
        return spectrum.temperature.scale * (1 + rotated * (spectrum.rotary_scale**2 - 1))

    return fmean(map(scale, layer.spectra))


def describe(phase: Phase, layout: Layout | None = None) -> str:
    """Describe the changes at the start of a phase; ``layout``: the one before it, if known."""
    if phase.drop is not None:
        text = f"dropped the encoding ({phase.drop.to}){phase.drop.of_what}"
        windows = ", ".join(str(window or "none") for window in phase.drop.windows or ())
        return f"{text}; windows {windows}" if windows else text
    if (rescale := phase.rescale) is not None:
        layers = None if layout is None else layout.rotating(rescale.layers)
        if layout is None or layers == layout.rotating("all"):
            where = ""
        else:
            where = f", layers {', '.join(map(str, layers or ()))}"
        if layers != [] and rescale.base is not None:
            return f"new base of the frequencies ({rescale.base:,.0f}{where})"
        if layers != []:
            return f"frequencies rescaled for longer sequences ({rescale.method}{where})"
    length = phase.config.data.sequence_length
    return f"phase {phase.name!r} with sequences of {length:,} tokens"


def _key(phase: Phase) -> str:
    """Return the prefix of a phase's metrics."""
    return "drop" if phase.drop else f"phase_{phase.name}"


def effect_batch(corpus: Corpus, phase: Phase) -> Batch:
    """Return the fixed batch of validation text on which the effect of a change is measured.

    A mixture has the weights of the phase.
    """
    count, length = phase.config.drop.effect_sequences, phase.config.data.sequence_length
    text = corpus.mixed(phase.config.data).validation
    windows = held_out_windows(text, count, length)
    weights = np.ones(windows.shape, dtype=np.float32)
    return as_batch(windows, corpus.first_token, corpus.end_of_text, weights)
