"""A run without its updates: all that ``train`` builds, and what its callback does at each step.

A stand-in for Lightning's trainer reads the batches and calls the hooks in Lightning's order, so
that a dozen steps take some hundredths of a second.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from trainer.checkpoint import Writer, read_state
from trainer.common.errors import DivergedError, PreemptedError
from trainer.data.corpus import prepare_corpus
from trainer.runs.directory import read_metrics
from trainer.runs.parsing import parse
from trainer.training import dashboards, fit, measurements, rows, run, setup


class Stage:
    """Stands for ``L.Trainer``.

    ``weights``, ``last_weights``: before the first step and after the last.
    ``states``: parameters whose optimizer state a phase's start leaves, for each phase.
    ``events``: what happened, each after how many steps. ``batches``: of every micro-batch the
    step, the batch, the learning rates and the model's layout. ``rows``: of metrics.csv.
    """

    world_size, global_rank = 1, 0
    skipped = frozenset()
    """Numbers of updates without a finite loss, from 1."""
    logged_metrics: dict = {}  # noqa: RUF012
    """What a user's callback has logged."""

    def __init__(self, of_run, strategy, loggers, callbacks):
        self.run, self.strategy, self.loggers, self.callbacks = of_run, strategy, loggers, callbacks
        self.global_step, self.events, self.batches, self.states = 0, [], [], []
        self.is_deterministic = torch.are_deterministic_algorithms_enabled()

    def note(self, event):
        self.events.append((self.global_step, event))

    def count(self, tally):
        """Count an update of loss n and gradient norm 2 n, the n-th one, or a skipped one."""
        step = float("nan") if self.global_step in self.skipped else float(self.global_step)
        loss = torch.tensor(step)
        tally.add(loss, 2 * loss, ~loss.isfinite())

    def note_states(self, start_phase):
        """Give each parameter a state, start a phase, and note whose state is left."""
        names, state = dict(self.module.model.named_parameters()), self.optimizers[0].state
        state.update({parameter: {"step": torch.zeros(())} for parameter in names.values()})
        start_phase(self, self.module)
        self.states.append([name for name, parameter in names.items() if parameter in state])
        state.clear()

    def save_checkpoint(self, path):
        self.note(f"save {path.name}")

    def fit(self, module, datamodule, ckpt_path):
        module._trainer = module.trainer = datamodule.trainer = self
        self.module = self.lightning_module = module
        self.initial_seed = torch.initial_seed()
        self.weights = copies(module.model)
        self.optimizers = [module.configure_optimizers()]
        callback = self.callbacks[-1]
        if ckpt_path:
            state = read_state(ckpt_path)
            self.global_step = state["step"]
            module.on_load_checkpoint({"layout": state["layout"]})
        callback.on_train_start(self, module)
        while self.global_step < self.run.steps:
            self.loader = datamodule.train_dataloader()
            if self.global_step in {phase.start for phase in self.run.phases}:
                self.note_states(callback.on_train_epoch_start)
            for index, batch in enumerate(self.loader.dataset):
                module.on_train_batch_start(batch, index)
                rates = [group["lr"] for group in self.optimizers[0].param_groups]
                self.batches.append((self.global_step, batch, rates, module.model.layout))
                if (index + 1) % self.accumulate_grad_batches == 0:
                    self.global_step += 1
                    self.count(module.tally)
                callback.on_train_batch_end(self, module, None, batch, index)
            callback.on_train_epoch_end(self, module)
        self.last_weights = copies(module.model)


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Dashboard:
    """Stands for the logger of Weights & Biases; ``settings``: name, group, and whether offline."""

    def __init__(self, directory, *settings):
        self.settings, self.rows = settings, {}

    def log_metrics(self, row, step):
        self.rows[step] = row


def rehearse(values, monkeypatch, branch=None, skipped=()):
    """Return the stage on which a run of plain values was rehearsed; a step takes a minute.

    ``branch``: checkpoint to begin at. ``skipped``: numbers of updates that are skipped."""
    kept = SimpleNamespace(stage=None, writer=None, parallelize={})

    class KeptWriter(Writer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            kept.writer = self

    def stage(*arguments):
        kept.stage = Stage(*arguments)
        kept.stage.skipped = frozenset(skipped)
        return kept.stage

    def parallelize(model, device, strategy, **options):
        kept.parallelize = options
        apply(model, device, **options | {"shard_size": None, "compile": False})

    def benchmarks(measurements, model, step):
        if measurements.tasks:
            kept.stage.note("benchmarks")

    def monotonic():
        return 60.0 * kept.stage.global_step if kept.stage else 0.0

    def perf_counter():
        return 1000.0 + monotonic()

    apply = setup.parallelize
    with monkeypatch.context() as patch:
        patch.setattr(
            fit, "gc", SimpleNamespace(collect=lambda: None)
        )  # takes a quarter of a second
        patch.setattr(fit, "Writer", KeptWriter)
        patch.setattr(fit, "make_trainer", stage)
        patch.setattr(setup, "parallelize", parallelize)
        patch.setattr(dashboards, "_wandb", Dashboard)
        patch.setattr(run, "time", SimpleNamespace(monotonic=monotonic))
        patch.setattr(rows, "time", SimpleNamespace(perf_counter=perf_counter))
        patch.setattr(torch.distributed, "get_world_size", lambda: 1)
        patch.setattr(torch.compiler, "reset", lambda: kept.stage.note("compile anew"))
        patch.setattr(measurements.Measurements, "measure_benchmarks", benchmarks)
        of_run = parse(values)
        of_run.directory.mkdir(parents=True, exist_ok=True)
        corpus = prepare_corpus(of_run.config.data, of_run.config.tokenizer)
        try:
            callbacks = fit.user_callbacks(of_run.config)
            fit.train(of_run, corpus, branch, callbacks, start_time=time.time() - 60)
        except (PreemptedError, DivergedError) as end:
            kept.stage.note(f"end {end}")
    kept.stage.writer, kept.stage.parallelize = kept.writer, kept.parallelize
    kept.stage.rows = read_metrics(of_run.directory / "metrics.csv")
    return kept.stage
