"""Begin and end of phases: what changes, and its effect on held-out text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import lightning as L
import numpy as np
import torch

from trainer.data.corpus import Corpus, held_out_windows
from trainer.data.dataset import as_batch
from trainer.lightning.callbacks import Metrics, Saving, StepCallback
from trainer.lightning.drop import Change, Probe, apply_change, losses_of
from trainer.lightning.module import LanguageModule
from trainer.runs.phases import Phase, layout_of_phase, phase_at, phase_before

log = logging.getLogger(__name__)


class PhaseChange(StepCallback):
    """Changes the model at the first step of a phase, and measures the effect.

    The held-out loss of the phase's length is measured just before, just after, and at the end of
    the phase. ``effects``: by phase. A resumed run repeats no change: the layout is in the
    checkpoint.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        probe: Callable[[Phase], Probe],
        saving: Saving,
        metrics: Metrics,
    ) -> None:
        self.phases, self.probe, self.saving, self.metrics = phases, probe, saving, metrics
        self.effects: dict[str, dict[str, Any]] = {}
        self._probe: tuple[str, Probe] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the effects so far."""
        return {"effects": dict(self.effects)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the effects so far."""
        self.effects = dict(state_dict["effects"])

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.settings.drop and phase.name in self.effects for phase in self.phases)

    def changed_at(self, step: int) -> bool:
        """Whether the model was changed after ``step`` steps."""
        return any(effect["step"] == step for effect in self.effects.values())

    def begin_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Change the model before the first batch of a phase."""
        step = trainer.global_step
        phase = phase_at(self.phases, step)
        if phase.start != step or phase.name in self.effects:
            return
        longer = phase.config.data.sequence_length > module.model.layout.training_length
        if not phase.change and not longer:
            return
        if phase.settings.drop and not self.has_dropped:
            self.saving.before_drop(trainer)
        drop, norms_come_on = phase.settings.drop, module.model.config.qk_norm.when == "after_drop"
        change = Change(
            partial(layout_of_phase, phase=phase),
            drop.qk_norm_gain if drop is not None and norms_come_on else "one",
            phase.settings.optimizer_state,
        )
        with self.metrics.elsewhere():
            before, after = apply_change(trainer, module, change, self._probe_of(phase))
        self.effects[phase.name] = {
            "step": step,
            "what": describe(phase),
            "loss_before": fmean(before),
            "loss_after": fmean(after),
            "loss_end": None,
            "sequences": {"before": before, "after": after},
        }
        self.metrics.add(
            {f"{_key(phase)}/loss_before": fmean(before), f"{_key(phase)}/loss_after": fmean(after)}
        )
        log.info(
            "Step %d: %s; held-out loss %.3f before, %.3f after",
            *(step, describe(phase), fmean(before), fmean(after)),
        )

    def end_step(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure the loss at the end of a phase that began with a change."""
        phase = phase_before(self.phases, trainer.global_step)
        if phase.end != trainer.global_step or phase.name not in self.effects:
            return
        with self.metrics.elsewhere():
            losses = losses_of(module, self._probe_of(phase))
        effect = self.effects[phase.name]
        sequences = effect["sequences"] | {"end": losses}
        self.effects[phase.name] = effect | {"loss_end": fmean(losses), "sequences": sequences}
        self.metrics.add({f"{_key(phase)}/loss_end": fmean(losses)})
        name = "recalibration" if phase.settings.drop else f"phase {phase.name!r}"
        log.info("Step %d: held-out loss %.3f at the end of %s", phase.end, fmean(losses), name)

    def _probe_of(self, phase: Phase) -> Probe:
        if self._probe is None or self._probe[0] != phase.name:
            self._probe = phase.name, self.probe(phase)
        return self._probe[1]


def describe(phase: Phase) -> str:
    """Describe the changes at the start of a phase."""
    change, rescale = phase.settings.drop, phase.settings.rescale
    if change is not None:
        text = f"dropped the encoding ({change.to}){change.of_what}"
        windows = ", ".join(str(window or "none") for window in change.windows or ())
        return f"{text}; windows {windows}" if windows else text
    if rescale is not None and rescale.base is not None:
        return f"new base of the frequencies ({rescale.base:,.0f})"
    if rescale is not None:
        return f"frequencies rescaled for longer sequences ({rescale.method})"
    length = phase.config.data.sequence_length
    return f"phase {phase.name!r} with sequences of {length:,} tokens"


def _key(phase: Phase) -> str:
    """Return the prefix of a phase's metrics."""
    return "drop" if phase.settings.drop else f"phase_{phase.name}"


def effect_probe(corpus: Corpus, rows: int, phase: Phase) -> Probe:
    """Return the validation text on which the effect of a change is measured.

    A mixture has the weights of the phase. ``rows``: most sequences of a forward pass; all parts
    have the same number.
    """
    count, length = phase.config.drop.effect_sequences, phase.config.data.sequence_length
    text = corpus.mixed(phase.config.data).validation
    windows = held_out_windows(text, count, length)
    weights = np.ones(windows.shape, dtype=np.float32)
    batch = as_batch(windows, corpus.first_token, corpus.end_of_text, weights)
    rows = next(n for n in range(min(rows, count), 0, -1) if count % n == 0)
    parts = (torch.split(batch[key], rows) for key in ("input_ids", "labels"))
    return list(zip(*parts, strict=True))
