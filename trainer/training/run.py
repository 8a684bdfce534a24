"""One training run from start or checkpoint to its last step."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainer.common.errors import PreemptedError, UserError
from trainer.data.corpus import Corpus
from trainer.runs.checkpoints import step_name
from trainer.runs.config import RunConfig
from trainer.runs.job_files import ask_for_requeue
from trainer.runs.phases import phases_of, with_ends
from trainer.runs.ranks import all_gather, on_rank_zero
from trainer.runs.starting_point import rewind_run, starting_point
from trainer.training.callbacks.garbage import set_modules_aside
from trainer.training.devices import numerics
from trainer.training.stretch import Around, Trained, train_stretch
from trainer.training.user_callbacks import make_callbacks

MAX_REWINDS = 10
"""In one process; a run that diverges more often needs a person."""


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    Holds its configuration with the actual steps of each phase, its last checkpoint, the
    ``effects`` of changes by phase, and the seconds spent in this process.
    """

    config: RunConfig
    checkpoint: Path
    effects: dict[str, dict[str, Any]]
    seconds: float

    @property
    def effect_of_drop(self) -> dict[str, Any] | None:
        """Effect of the first drop; None without a drop."""
        dropped = (phase.name for phase in phases_of(self.config) if phase.drop)
        return next((self.effects[name] for name in dropped if name in self.effects), None)


def train(
    config: RunConfig,
    corpus: Corpus,
    branch: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    user_callbacks: Sequence[L.Callback] | None = None,
) -> TrainedRun:
    """Train to ``trainer.max_steps``, from the newest checkpoint of ``run_dir`` if there is one.

    Args:
        config: the run.
        corpus: its text.
        branch: checkpoint of another run, with its metrics, to continue from if this run has none.
        callbacks: further Lightning callbacks.
        user_callbacks: callbacks that ``config.callbacks`` names; None: made here. They are made
            again for each further stretch and after a rewind.

    Raises:
        UserError: the checkpoint does not fit the run, none is sound, the last one cannot be
            written, or the backend cannot run here.
        PreemptedError: the run was asked to stop, and has.
    """
    began, clock, rewinds = time.time(), time.perf_counter(), 0
    skips, given = None, config
    own = make_callbacks(config.callbacks) if user_callbacks is None else user_callbacks
    if config.trainer.compile:
        torch.compiler.reset()  # shapes of an earlier run in this process would make sizes dynamic
    set_modules_aside()  # including the compiler's
    while True:
        # A finished trainer is a reference cycle: collect it now to free its memory.
        gc.collect()
        start = starting_point(given, branch)
        config = with_ends(given, start.state.get("ends", {}))
        with numerics(config):
            around = Around(began, own, callbacks)
            trained = train_stretch(config, corpus, start, skips, around)
        if trained.broken is not None:
            rewinds += 1
            if rewinds == MAX_REWINDS:
                raise UserError.at(
                    "trainer.rewind_after",
                    f"the run went back {MAX_REWINDS} times and diverges again; lower the "
                    "learning rate, or look at the text.",
                )
            left_out = start.state.get("skips", []) if skips is None else skips
            skips = rewind_run(config, *trained.broken, left_out)
        else:
            config = with_ends(given, trained.ends)
            if trained.step == config.trainer.max_steps:
                path = Path(config.run_dir) / "checkpoints" / step_name(trained.step)
                return TrainedRun(config, path, trained.effects, time.perf_counter() - clock)
            skips = None
            _stop_if_asked(trained)
            torch.compiler.reset()  # compile for the next length, not for dynamic ones
        own = make_callbacks(config.callbacks)


def _stop_if_asked(trained: Trained) -> None:
    """Stop between two stretches if any rank was asked to during the last step.

    The checkpoint exists, and the next stretch would take long to start.

    Raises:
        PreemptedError: a rank was asked to stop.
    """
    if asked := next(filter(None, all_gather(trained.asked)), None):
        on_rank_zero(ask_for_requeue)
        raise PreemptedError(f"Stopped after step {trained.step} ({asked}), checkpoint saved.")
