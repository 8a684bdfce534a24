"""The callback of a run: it restores, changes, measures, logs, saves and stops."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from statistics import fmean
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from trainer.checkpoint import (
    BEFORE_DROP,
    Writer,
    regular_checkpoints,
    restore,
    step_name,
    step_of,
)
from trainer.common.errors import DivergedError, PreemptedError, UserError
from trainer.common.progress import Progress
from trainer.common.ranks import any_rank, current_ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus, held_out_windows
from trainer.data.dataset import TrainingSamples
from trainer.lightning.drop import DropPositions, apply_change, losses_of
from trainer.lightning.module import Batch, LanguageModule
from trainer.lightning.optimizers import global_norm
from trainer.model.decoder import Decoder
from trainer.model.flops import dense_peak, training_flops
from trainer.runs.directory import COLUMNS, append_metrics
from trainer.runs.phases import Phase, kept_steps, layout_of_phase, phase_at, phases_of
from trainer.training.benchmarks import benchmark_scores, benchmark_tasks
from trainer.training.setup import precision_of

log = logging.getLogger(__name__)

MOST_SKIPPED = 32
"""Updates skipped in a row after which a run ends with an error.

Loss spikes skip one update or a few. Skipped updates leave the weights as they are, so 32 batches
have failed with the same weights.
"""


@dataclass(eq=False, repr=False)
class RunCallback(L.Callback):
    """Restores, changes, measures, logs, saves and stops a run; lives through its phases.

    It follows the user's callbacks.

    ``phase``: the present phase. ``step``: updates done before it. ``effects``: losses before and
    after the change of each phase, by its name. ``milestones``: benchmarks so far, see
    :class:`~trainer.report.report.RunSummary`. ``pending``: more values of the next row.

    Args:
        config: the run.
        corpus: its text.
        checkpoint, state: where it begins, as ``starting_point`` returns them.
        progress: the bar.
        asked: returns why this process is asked to stop, or None.
        is_control: see :func:`~trainer.training.fit.train`.
    """

    config: RunConfig
    corpus: Corpus
    checkpoint: Path | None
    state: dict[str, Any]
    progress: Progress
    asked: Callable[[], str | None]
    is_control: bool
    phase: Phase = field(init=False)

    def __post_init__(self) -> None:
        config, state = self.config, self.state
        self.step, self.phases = state["step"], phases_of(config)
        self.effects: dict[str, dict[str, Any]] = dict(state.get("effects", {}))
        self.milestones: list[dict[str, Any]] = [*state.get("benchmarks", ())]
        self.pending: dict[str, float] = dict(state.get("pending_metrics", {}))
        self.row_step, self.row_time = 0, 0.0  # of the last row, without time that is not training
        self.epochs = epochs_read(self.corpus, self.phases)
        self.benchmarks = benchmark_tasks(config, self.corpus)
        self.user_callbacks: list[L.Callback] = []
        for values in config.callbacks.values():
            arguments = dict(values)
            target = ":".join(arguments.pop("_target_").rsplit(".", 1))
            self.user_callbacks.append(resolve_name(target)(**arguments))
        if any(isinstance(callback, DropPositions) for callback in self.user_callbacks):
            raise UserError("callbacks: a run drops its encoding by drop.at, not by DropPositions")
        directory, keep = Path(config.run_dir) / "checkpoints", config.trainer.keep_checkpoints
        last, every = config.trainer.max_steps, config.trainer.keep_every
        self.kept_steps = kept_steps(config)
        regular = range(every, last + 1, every) if every else ()
        self.writer = Writer(directory, keep, self.kept_steps.union(regular))
        self.saved_at = time.monotonic()

    # The start of a phase

    def on_fit_start(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule
    ) -> None:
        """Restore the checkpoint, and change the model, before other callbacks' training starts."""
        if self.checkpoint is not None:
            restore(module.model, trainer.optimizers[0], self.checkpoint)
            module.tally.load(self.state["tally"], module.device)
            for callback in self.user_callbacks:
                if callback.state_key in self.state["user_callbacks"]:
                    callback.load_state_dict(self.state["user_callbacks"][callback.state_key])
            self.checkpoint = None
        # Lightning begins at a later step only from its own checkpoints: the step is set here.
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready = progress.total.completed = self.step
        if self.step == 0 and self.config.model.is_trained and not self.milestones:
            self.measure_benchmarks(module, 0)
        longer = self.phase.config.data.sequence_length > module.model.layout.training_length
        # A resumed run repeats no change: the layout is in the checkpoint.
        begins = self.phase.start == self.step and self.phase.name not in self.effects
        if begins and (self.phase.change or longer):
            self.change(trainer, module)

    def change(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Change the model for its phase, and measure the held-out loss before and after."""
        phase, drop = self.phase, self.phase.settings.drop
        if drop and not self.has_dropped:
            self.save(trainer, module, BEFORE_DROP)
        norms_come_on = module.model.config.qk_norm.when == "after_drop"
        before, after = apply_change(
            trainer,
            module.model,
            layout_of_phase(module.model.layout, phase),
            gain=drop.qk_norm_gain if drop and norms_come_on else "one",
            optimizer_state=phase.settings.optimizer_state,
            probe=self.probe(),
        )
        losses = {"loss_before": fmean(before), "loss_after": fmean(after)}
        self.effects[phase.name] = {
            "step": self.step,
            "what": phase.description,
            "length": phase.config.data.sequence_length,
            **losses,
            "loss_end": None,
            "sequences": {"before": before, "after": after},
        }
        self.pending |= {f"{phase.key}/{name}": loss for name, loss in losses.items()}
        log.info(
            "Step %d: %s; held-out loss %.3f before, %.3f after",
            *(self.step, phase.description, *losses.values()),
        )
        self.measure_benchmarks(module, self.step)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the clock of the phase."""
        self.row_step, self.row_time = trainer.global_step, time.perf_counter()
        self.progress.advance_to(self.row_step)

    # The end of a step

    def on_train_batch_end(  # type: ignore[override]  # our trainers have no other module
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Batch, index: int
    ) -> None:
        """Measure, write a row, save and stop, in this order, after a step's last micro-batch."""
        if (index + 1) % trainer.accumulate_grad_batches:
            return
        phase, step, settings = self.phase, trainer.global_step, self.config.trainer
        is_last = step == phase.end
        if is_last and phase.name in self.effects:
            self.measure_effect(module)
        if is_last or step % (self.config.benchmarks.every or step + 1) == 0:
            self.measure_benchmarks(module, step)
        if is_last or step % settings.log_every == 0:
            self.write_row(trainer, module, batch)
        reason, age = self.asked(), time.monotonic() - self.saved_at
        is_late = age > 60 * (settings.checkpoint_minutes or math.inf)
        # Clocks of ranks differ, and signals: all save and stop after the same step.
        is_late, stops = any_rank(is_late, reason is not None and step < settings.max_steps)
        is_due = is_late or step % settings.checkpoint_every == 0
        # While updates are skipped, nothing is saved by schedule: the newest checkpoint is healthy.
        saves = is_last or stops or step in self.kept_steps
        if saves or (is_due and not module.tally.skipped_in_a_row()):
            self.save(trainer, module, step_name(step))
        if is_last or stops:
            self.writer.wait()
        if stops:
            reason = reason or "another rank"
            text = f"Stopped after step {step} ({reason}), checkpoint saved."
            raise PreemptedError(text, reason)

    @property
    def has_dropped(self) -> bool:
        """Whether an encoding was dropped."""
        return any(phase.settings.drop and phase.name in self.effects for phase in self.phases)

    def probe(self) -> Sequence[Tensor]:
        """Return the probe of the phase, see :func:`effect_probe`, in micro-batches."""
        run = self.phase.config.trainer
        rows = run.micro_batch_size or run.batch_size // current_ranks().world_size
        return effect_probe(self.corpus, self.phase).split(rows)

    def measure_effect(self, module: LanguageModule) -> None:
        """Measure the loss at the end of a phase that began with a change."""
        phase, effect = self.phase, self.effects[self.phase.name]
        with self.untimed():
            losses = losses_of(module.model, self.probe())
        sequences = effect["sequences"] | {"end": losses}
        self.effects[phase.name] = effect | {"loss_end": fmean(losses), "sequences": sequences}
        self.pending[f"{phase.key}/loss_end"] = fmean(losses)
        name = "recalibration" if phase.settings.drop else f"phase {phase.name!r}"
        log.info("Step %d: held-out loss %.3f at the end of %s", phase.end, fmean(losses), name)

    def measure_benchmarks(self, module: LanguageModule, step: int) -> None:
        """Add a milestone after ``step`` updates, the same on all ranks."""
        if not self.benchmarks:
            return
        with self.untimed():
            scores = benchmark_scores(module.model, self.benchmarks, self.config)
        tokens = phase_at(self.phases, step).tokens_at(step)
        milestone = {"step": step, "tokens": tokens, "dropped": self.has_dropped, "scores": scores}
        self.milestones.append(milestone)
        self.pending |= {f"benchmark/{key}": x for key, x in scores.items() if math.isfinite(x)}

    def write_row(self, trainer: L.Trainer, module: LanguageModule, batch: Batch) -> None:
        """Write a row to ``metrics.csv`` and all loggers, with what callbacks passed to
        ``module.log``; a run that diverged ends with it."""
        step, phase = trainer.global_step, self.phase
        metrics = {
            "tokens": phase.tokens_at(step),
            **{f"epochs/{name}": round(times, 6) for name, times in self.epochs(step).items()},
            "phase": self.phases.index(phase),
            **module.tally.read(),
            "parameter_norm": global_norm(p.detach() for p in module.model.parameters()).item(),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            **self.speed(module, step, batch),
            # A user's callback may log under a name of the run.
            **{
                f"callback/{name}" if name in COLUMNS else name: float(value)
                for name, value in trainer.logged_metrics.items()
            },
            **self.pending,
        }
        self.pending = {}
        path = Path(self.config.run_dir) / "metrics.csv"
        rank_zero_only(append_metrics)(path, metrics | {"step": step})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self.progress.advance_to(step, loss=metrics["loss"])
        if not self.is_control:
            check_divergence(module.tally.skipped_in_a_row(), step, self.writer.directory)

    def speed(self, module: LanguageModule, step: int, batch: Batch) -> dict[str, float]:
        """Return tokens per second since the last row; on a GPU also peak memory in GiB, and the
        share of the dense peak of all ranks' GPUs if it is known."""
        now = time.perf_counter()
        tokens = (step - self.row_step) * self.phase.config.tokens_per_step
        rate = tokens / (now - self.row_time)
        self.row_step, self.row_time = step, now
        speed = {"tokens_per_second": round(rate, 1)}
        if module.device.type == "cuda":
            speed["memory"] = torch.cuda.max_memory_allocated() / 2**30
            peak = dense_peak(torch.cuda.get_device_name(), precision_of(self.config))
            if peak is not None:
                flops = flops_per_token(module.model, batch)
                speed["mfu"] = rate * flops / (peak * current_ranks().world_size)
        return speed

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the time of the block out of the speed of training."""
        start = time.perf_counter()
        yield
        self.row_time += time.perf_counter() - start

    def save(self, trainer: L.Trainer, module: LanguageModule, name: str) -> None:
        """Write a checkpoint of the present state beside training; all ranks call this together."""
        step, corpus = trainer.global_step, self.corpus
        with self.untimed():
            state = {
                "step": step,
                "model": asdict(module.model.config),
                "layout": module.model.layout.to_dict(),
                "tokenizer": corpus.tokenizer.to_str(),
                "end_of_text": corpus.end_of_text,
                "token_files": self.state.get("token_files", {}),
                "config": asdict(self.config),
                "texts": corpus.fingerprints,
                "tally": module.tally.state(),
                "pending_metrics": dict(self.pending),
                "effects": dict(self.effects),
                "benchmarks": [*self.milestones],
                "user_callbacks": {c.state_key: c.state_dict() for c in self.user_callbacks},
            }
            self.writer.save(name, module.model, trainer.optimizers[0], state)
        self.saved_at = time.monotonic()


def effect_probe(corpus: Corpus, phase: Phase) -> Tensor:
    """Return the validation text ``[sequences, T + 1]`` on which the effect of a change is
    measured; a mixture has the weights of the phase."""
    data, count = phase.config.data, phase.config.drop.effect_sequences
    windows = held_out_windows(corpus.mixed(data).validation, count, data.sequence_length)
    return F.pad(torch.from_numpy(windows), (1, 0), value=corpus.first_token)


def check_divergence(in_a_row: int, step: int, directory: Path) -> None:
    """Raise if too many updates in a row, until ``step``, had no finite loss and gradient."""
    if in_a_row >= MOST_SKIPPED:
        paths = [p for p in regular_checkpoints(directory) if step_of(p) <= step - in_a_row]
        raise DivergedError(
            f"the loss or the gradient was not finite in steps {step - in_a_row + 1} to {step}; "
            f"the last healthy checkpoint is {str(paths[-1]) if paths else None}"
        )


def epochs_read(corpus: Corpus, phases: Sequence[Phase]) -> Callable[[int], dict[str, float]]:
    """Return a function from step to the number of times each text has been read."""
    samples = [
        TrainingSamples(corpus.mixed(phase.config.data), phase.config.data, phase.seed)
        for phase in phases
    ]

    def read(step: int) -> dict[str, float]:
        total = {part.name: 0.0 for part in corpus.parts}
        for phase, of_phase in zip(phases, samples, strict=True):
            steps = max(min(step, phase.end) - phase.start, 0)
            epochs = of_phase.epochs(steps * phase.config.trainer.batch_size)
            for name, times in epochs.items():
                total[name] += times
        return total

    return read


def flops_per_token(model: Decoder, batch: Batch) -> float:
    """Return the operations of a training step per token; document masks are those of ``batch``."""
    rows, length = batch["input_ids"].shape
    if "documents" not in batch:
        return training_flops(model.config, model.layout, length) / length
    counts = [row.unique_consecutive(return_counts=True)[1].tolist() for row in batch["documents"]]
    total = sum(training_flops(model.config, model.layout, length, each) for each in counts)
    return total / (rows * length)
