"""A whole experiment: the run, its controls, their evaluation and the report."""

import gc
import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median_high

from trainer.checkpoint import BEFORE_DROP, step_name
from trainer.common.errors import UserError
from trainer.common.files import expecting
from trainer.common.processes import check_signals, current_ranks
from trainer.common.ranks import all_gather, device_type, process_group, shared_value
from trainer.config import RunConfig
from trainer.data.corpus import Corpus, corpus_at
from trainer.evaluation.results import PERPLEXITY, STATEMENTS
from trainer.evaluation.saved_model import SavedModel
from trainer.evaluation.tasks import check_names
from trainer.lightning.strategy import SHARDED
from trainer.model.backends import BACKENDS
from trainer.plotting import use_style
from trainer.report.pages import write_renderings
from trainer.report.report import FACTS, Report, RunSummary, troubles
from trainer.runs.directory import (
    check_run_directory,
    locked,
    log_to_file,
    open_run_directory,
    plain,
    read_metrics,
)
from trainer.runs.models import encodings, environment, find_models, without_home
from trainer.runs.phases import Run
from trainer.training.dashboards import check_dashboards, log_results
from trainer.training.fit import train, user_callbacks
from trainer.training.setup import check_device, optimizer_settings, set_environment, set_threads
from trainer.workflows.evaluate import held_out_of, measure_models, publish
from trainer.workflows.text import check_vocabularies, open_corpus

log = logging.getLogger(__name__)


def run_experiment(run: Run, beside: Sequence[str] = ()) -> Report | None:
    """Train the run and its controls, evaluate all of them, and write the report.

    An interrupted run resumes. A finished one stays unchanged, unless its evaluation or its
    controls are to be others than those of its report; other ``plots`` draw its figures anew.

    ``beside``: other models that the evaluation measures as well, by their names.

    Returns the report; None on other ranks.

    Raises:
        UserError: something given is wrong; checked before anything heavy starts if possible.
        PreemptedError: the run was asked to stop.
    """
    start_time = time.time()
    config = run.config
    set_environment(config.trainer.accelerator)
    if shared_value(lambda: is_finished(config)):
        log.info("Finished before: nothing is trained; overwrite=true starts again")
        return None if current_ranks().rank else finished_report(config)
    set_threads(config.trainer)
    check_machine(run)
    callbacks = [user_callbacks(each.config) for each in run.runs.values()]
    with ExitStack() as lock:
        # Without a process group, whose operations have a time limit: a machine may read for hours.
        places = shared_value(lambda: _open(run, lock))
        corpus = corpus_at(config.data, places)
        with process_group(config.strategy.name, config.trainer.accelerator):
            checkpoints = []
            for number, each in enumerate(run.runs.values(), 1):
                log.info("Model %d of %d", number, len(run.runs))
                begin = None
                if each.branch is not None:
                    name = BEFORE_DROP if each.branch == "drop" else step_name(each.branch)
                    begin = run.directory / "checkpoints" / name
                own = callbacks[number - 1]
                checkpoints.append(train(each, corpus, begin, own, start_time=start_time))
            all_gather(None)  # all ranks have trained before one reads the checkpoints
    check_signals()  # of the last step
    gc.collect()  # a finished trainer is a reference cycle: free its memory for the evaluation
    report = make_report(run, checkpoints, corpus, beside)
    if report is not None:
        log_results(run, _by_length(report))
    return report


def is_finished(config: RunConfig) -> bool:
    """Whether the run has a report of these controls and of this evaluation, if it has one."""
    check_run_directory(config)
    facts = Path(config.run_dir, FACTS)
    if config.overwrite or not facts.exists():
        return False
    keys = ("controls", "evaluation") if config.evaluation.enabled else ("controls",)
    with expecting("the facts of a report", facts):
        values = without_home(plain(config))
        reported = json.loads(facts.read_bytes())["config"]
        return all(reported[key] == values[key] for key in keys)


def finished_report(config: RunConfig) -> Report:
    """Return the report of a finished run; other ``plots`` than its own draw its figures anew."""
    report = Report.read(Path(config.run_dir))
    plots = asdict(config.plots)
    if report.config.get("plots") != plots:
        use_style(**plots)
        report = replace(report, config=report.config | {"plots": plots})
        write_renderings(report, Path(config.run_dir))
        report.write(Path(config.run_dir))
    return report


def check_machine(run: Run) -> None:
    """Check what shows without the text: names, packages, devices, shards, batches.

    Raises:
        UserError: some of it does not fit.
        ImportError: a dashboard's package is missing.
    """
    ranks = current_ranks().world_size
    for each in run.runs.values():
        check_names(each.config.evaluation)
        check_device(each.config.trainer)
        check_dashboards(each.config.logger)
        optimizer_settings(each.config.optimizer)
        if each.config.model.attention_backend != "auto":
            BACKENDS.find(each.config.model.attention_backend, "model.attention_backend")
        strategy = each.config.strategy
        size = strategy.shard_size
        if strategy.name == "single" and ranks > 1:
            raise UserError(f"strategy: single uses one process, and {ranks} were started")
        if strategy.name == "hsdp" and size is not None and ranks % size:
            raise UserError(f"strategy.shard_size: expected a divisor of {ranks} ranks, got {size}")
        if strategy.name in SHARDED and each.config.optimizer.name == "muon":
            raise UserError("optimizer: muon needs whole matrices (strategy=single or ddp)")
        for phase in each.phases:
            phase.micro_batches(ranks)


def _open(run: Run, lock: ExitStack) -> list[str]:
    """Prepare text and directories, and return where the text lies."""
    corpus = open_corpus(run)
    check_vocabularies(run.runs, corpus)
    lock.enter_context(locked(run.directory))
    for each in run.runs.values():
        open_run_directory(each.config)
    log_to_file(run.directory)
    return [str(part.directory) for part in corpus.parts]


def make_report(
    run: Run, checkpoints: Sequence[Path], corpus: Corpus, beside: Sequence[str] = ()
) -> Report | None:
    """Evaluate all runs as saved, and write the report; return None on other ranks than the first.

    ``checkpoints``: of the run itself, which is the first, and of its controls. ``beside``: names
    of other models to measure.
    """
    config = run.config
    use_style(**asdict(config.plots))
    references = [*map(str, checkpoints), *beside]
    adds_origins = config.evaluation.enabled and not beside
    unit = config.evaluation.training_length
    measured = find_models(references, unit, with_origins=adds_origins)
    models = [model for model in measured if model.path in checkpoints]
    if config.evaluation.enabled:
        report = measure_models(
            config.name,
            measured,
            config.evaluation,
            held_out_of(corpus, models[0]),
            run.directory / "evaluation" / "cells",
            config.trainer.accelerator,
        )
    else:
        C = run.phases[-1].length
        device = device_type(config.trainer.accelerator)
        report = Report(config.name, C, C, {}, environment(corpus, device))
    if report is None or current_ranks().rank:
        return None
    summaries = [summary_of(*pair) for pair in zip(run.runs.values(), models, strict=True)]
    for trouble in troubles(summaries):
        log.warning("%s", trouble)
    effects = models[0].state["effects"]
    drops = [phase.name for phase in run.phases if phase.drop is not None]
    report = replace(
        report,
        config=without_home(plain(config)),
        runs=tuple(summaries),
        drop=next((effects[name] for name in drops if name in effects), None),
    )
    return publish(report, measured, run.directory)


def summary_of(run: Run, model: SavedModel) -> RunSummary:
    """Return what the training of a finished run shows; ``model``: its last checkpoint."""
    rows = read_metrics(run.directory / "metrics.csv")
    last = rows[-1] if rows else {}
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    step = run.phases.drop_step
    dropped = "" if step is None else f", dropped at step {step}"
    return RunSummary(
        name=model.name,
        encoding=f"{encodings(run.config)}{dropped}",
        parameters=model.parameters,
        steps=run.steps,
        tokens=run.phases.tokens,
        curve=tuple((row["step"], row["loss"]) for row in rows if "loss" in row),
        skipped=last.get("skipped_steps", 0),
        finite=math.isfinite(last.get("parameter_norm", 0.0)),
        changes=tuple(model.state["effects"].values()),
        tokens_per_second=round(median_high(speeds)) if speeds else None,
        milestones=tuple(model.state.get("benchmarks", ())),
    )


def _by_length(report: Report) -> dict[int, dict[str, float]]:
    """Return retrieval and loss by length in tokens, under the names of dashboards."""
    names = {STATEMENTS: "retrieval", PERPLEXITY: "loss"}
    values: dict[int, dict[str, float]] = {}
    rows = report.rows[report.rows.task.isin(names)].dropna(subset="value")
    for row in rows.sort_values("length", kind="stable").itertuples():
        key = f"evaluation/{names[row.task]}/{report.row_name((row.model, row.method))}"
        values.setdefault(row.length, {})[key] = row.value
    return values
