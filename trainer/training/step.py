"""Order of events within a training step, and the state that a checkpoint saves.

Lightning calls the callbacks of :meth:`Step.callbacks` in their order: change, end, measure, log,
save, stop. Before the first step :class:`Resume` restores the checkpoint.

===============  ==================================================================  ===============
moment           what happens                                                        where
===============  ==================================================================  ===============
step begins      a phase changes the model: save ``before-drop``; measure the loss;  Transitions
                 set QK-norm's gains, the layout and the attention kernel; measure the loss again;
                 store both losses; reset the optimizer
                 hooks of the user's callbacks                                       callbacks
                 take all measures if the model was changed                          Monitors
                 arm the watchdog; start the profiler                                guards
                 set the learning rates                                              module.py
micro-batches    forward, loss, backward; gradients are reduced at the last one      module.py
update           clip, or skip if loss or gradient is not finite; optimizer step     module.py
step ends        measure the held-out loss at the end of a phase                     Transitions
                 hooks of the user's callbacks                                       callbacks
                 take the measures that are due                                      Monitors
                 write a row to all loggers                                          Metrics
                 save a checkpoint, by steps or by time; wait for the last one       Saving
                 save and stop on a signal or a time limit, all ranks together       Stopping
                 stop if it diverged; timeouts; profile                              guards
===============  ==================================================================  ===============
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from trainer.checkpoint import restore
from trainer.common.progress import Progress
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.runs.phases import Phase, kept_steps, phase_at, phase_before
from trainer.runs.ranks import Ranks
from trainer.runs.saved_state import RunState, description
from trainer.runs.starting_point import data_fingerprints, epochs_read
from trainer.training.callbacks.guards import Divergence, make_guards
from trainer.training.callbacks.metrics import Metrics
from trainer.training.callbacks.monitors import Monitors
from trainer.training.callbacks.saving import Saving
from trainer.training.callbacks.stopping import Stopping
from trainer.training.callbacks.transitions import Transitions, effect_batch
from trainer.training.lightning_trainer import set_steps_done
from trainer.training.module import LanguageModule
from trainer.training.user_callbacks import load_states, states_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhaseStretch:
    """Phases that read batches of one size and length, trained by one Lightning trainer.

    ``run`` is the whole run with its ``phases``; ``config`` the run with this stretch's lengths,
    sizes and end. ``phase`` is the one of the next step.
    ``is_control``: see :func:`~trainer.training.run.train`. ``token_files``: of the published model
    in which training began.
    """

    run: RunConfig
    config: RunConfig
    corpus: Corpus
    phases: tuple[Phase, ...]
    phase: Phase
    is_control: bool = False
    token_files: Mapping[str, str] = field(default_factory=dict)

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample that ``step`` reads."""
        return phase_at(self.phases, step).first_sample(step)


class Step:
    """The callbacks of a stretch, the user's between them, and the state they share."""

    def __init__(
        self,
        stretch: PhaseStretch,
        module: LanguageModule,
        ranks: Ranks,
        progress: Progress,
        user_callbacks: Sequence[L.Callback],
        start_time: float,
    ) -> None:
        config, corpus, phases = stretch.config, stretch.corpus, stretch.phases
        self.stretch, self.module, self.ranks = stretch, module, ranks
        self.user_callbacks = user_callbacks
        self.metrics = Metrics(config, progress, epochs_read(corpus, phases))
        self.saving = Saving(config, ranks, self.collect_state, kept_steps(stretch.run))
        self.transitions = Transitions(
            phases, partial(effect_batch, corpus), self.saving.before_drop, self.metrics.add
        )
        self.stopping = Stopping(stretch.run, self.saving, start_time)
        self.monitors = Monitors(stretch.run, corpus, ranks, self.transitions, self.metrics.add)
        self.divergence = Divergence(config, stretch.is_control)
        self.guards = make_guards(config, ranks)

    def callbacks(self) -> list[L.Callback]:
        """Return the callbacks in the order in which Lightning calls their hooks."""
        return [
            self.transitions,
            *self.user_callbacks,
            self.monitors,
            self.metrics,
            self.saving,
            self.stopping,
            self.divergence,
            *self.guards,
        ]

    def collect_state(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return the contents of ``state.json``; all ranks call this together."""
        stretch, step, transitions = self.stretch, trainer.global_step, self.transitions
        phase = phase_before(stretch.phases, step)
        state = RunState(
            data=data_fingerprints(stretch.corpus, phase),
            tally=self.module.tally.state(),
            pending_metrics=self.metrics.pending,
            effects=transitions.effects,
            lengths=self.monitors.reaches,
            benchmarks=self.monitors.milestones,
            loss=self.metrics.last_loss,
            world_size=self.ranks.world_size,
            user_callbacks=states_of(self.user_callbacks),
            wandb_id=next((str(x.version) for x in trainer.loggers if x.version), None),
        )
        tokenizer = stretch.corpus.tokenizer.to_str()
        tokens = tokenizer, stretch.corpus.end_of_text, stretch.token_files
        return description(stretch.run, self.module.model, *tokens, step) | state.to_dict()

    def restore(self, state: RunState) -> None:
        """Restore what :meth:`collect_state` collected."""
        self.module.tally.load(state.tally, self.module.device)
        self.metrics.restore(state)
        self.transitions.restore(state)
        self.monitors.restore(state)
        if unused := load_states(self.user_callbacks, state.user_callbacks):
            log.warning(
                "The checkpoint holds states of callbacks that this command does not have: %s",
                ", ".join(unused),
            )


class Resume(L.Callback):
    """Restores weights, optimizer, counters and callbacks from a checkpoint before the first step.

    It is the first callback, so that all others start from the restored run. The data loader begins
    at the right step, so Lightning's loops start from zero and need only the number of updates.
    """

    def __init__(self, step: Step, checkpoint: Path, state: RunState, steps_done: int) -> None:
        self.step, self.checkpoint = step, checkpoint
        self.state, self.steps_done = state, steps_done

    def on_fit_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Restore after model and optimizer are on their devices."""
        restore(module.model, trainer.optimizers[0], self.checkpoint)
        self.step.restore(self.state)
        set_steps_done(trainer, self.steps_done)
