"""A whole experiment: the run, its controls, their evaluation and the report."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trainer.checkpoint import BEFORE_DROP, step_name
from trainer.common.ranks import Ranks, all_gather, on_rank_zero
from trainer.config import MAIN, RunConfig
from trainer.data.corpus import corpus_at
from trainer.evaluation.results import FACTS, PERPLEXITY, STATEMENTS, Report, estimates
from trainer.lightning.devices import check_device, set_environment, set_threads
from trainer.lightning.fit import train
from trainer.lightning.loggers import log_results
from trainer.report.pages import write_renderings
from trainer.runs.arms import arms_of, check_arms, check_spread
from trainer.runs.directory import (
    check_run_directory,
    locked,
    log_to_file,
    open_run_directory,
)
from trainer.runs.phases import phases_of
from trainer.runs.ranks import process_group
from trainer.workflows.experiment_report import make_report
from trainer.workflows.training_text import (
    check_evaluated_text,
    check_vocabularies,
    open_corpus,
)


def run_experiment(config: RunConfig, beside: Sequence[str] = ()) -> tuple[Report, bool] | None:
    """Train the run and its controls, evaluate all of them, and write the report.

    An interrupted run resumes; a finished one stays unchanged. All ranks train and evaluate; rank 0
    writes the report.

    ``beside``: other models that the evaluation measures as well, by their names.

    Returns:
        The report, and whether it existed before; None on other ranks.

    Raises:
        UserError: something given is wrong; checked before anything heavy starts if possible.
        PreemptedError: the run was asked to stop.
    """
    start_time, directory = time.time(), Path(config.run_dir)
    arms = arms_of(config)
    set_environment(config)
    with process_group(config) as ranks:
        finished = on_rank_zero(lambda: _finished_report(config))
        if finished is not None:
            return (finished, True) if ranks.is_rank_zero else None
        set_threads(config, ranks)
        check_start(arms, ranks)
        with ExitStack() as lock:
            places = on_rank_zero(lambda: _open(config, arms, ranks, lock))
            corpus = corpus_at(config.data, places)
            runs = {
                name: train(
                    arm,
                    corpus,
                    branch_checkpoint(config, name),
                    is_control=name != MAIN,
                    start_time=start_time,
                )
                for name, arm in arms.items()
            }
        all_gather(ranks.rank)  # all ranks have trained before one reads the checkpoints
    gc.collect()  # a finished trainer is a reference cycle: free its memory for the evaluation
    configs = {name: run.config for name, run in runs.items()}
    report = make_report(configs[MAIN], configs, runs, corpus, ranks, beside)
    if ranks.rank:
        return None
    figures = write_renderings(report, directory)
    shown = (f.path for f in figures if f.path.stem.startswith(("reach", "benchmarks")))
    images = {path.stem: path.with_suffix(".png") for path in shown}
    report.write(directory)
    log_results(config, _by_length(report), images)
    return report, False


def _by_length(report: Report) -> dict[int, dict[str, float]]:
    """Return retrieval and loss by length in tokens, under the names of dashboards."""
    values: dict[int, dict[str, float]] = {}
    for name, task, metric in (("retrieval", STATEMENTS, "score"), ("loss", PERPLEXITY, "loss")):
        for row, by_length in estimates(report.rows, task, metric).items():
            for length, value in by_length.items():
                key = f"evaluation/{name}/{report.row_name(row)}"
                values.setdefault(length, {})[key] = value.mean
    return dict(sorted(values.items()))


def _finished_report(config: RunConfig) -> Report | None:
    """Return the report of a finished run; nothing is written.

    Raises:
        UserError: the finished run is another one.
    """
    directory = Path(config.run_dir)
    if config.overwrite or not (directory / FACTS).exists():
        return None
    check_run_directory(config, finished=True)
    return Report.read(directory)


def _open(
    config: RunConfig, arms: dict[str, RunConfig], ranks: Ranks, lock: ExitStack
) -> list[str]:
    """Prepare text and directories, and return where the text lies.

    Raises:
        UserError: the text does not suffice, or a directory holds something else.
    """
    for arm in arms.values():
        if not config.overwrite or arm is config:  # overwriting the run deletes its controls too
            check_run_directory(arm)
    corpus = open_corpus(config, alone=ranks.world_size == 1)
    check_vocabularies(arms, corpus)
    check_evaluated_text(arms, corpus)
    directory = Path(config.run_dir)
    lock.enter_context(locked(directory))
    for arm in arms.values():
        open_run_directory(arm)
    log_to_file(directory)
    return list(corpus.directories)


def check_start(arms: dict[str, RunConfig], ranks: Ranks) -> None:
    """Check what shows without the text: packages, devices, batches, and the controls.

    Raises:
        UserError: some of it does not fit.
    """
    for arm in arms.values():
        check_device(arm)
        for phase in phases_of(arm):
            check_spread(phase.config, ranks.world_size, ranks.local_size)
    check_arms(arms)


def branch_checkpoint(config: RunConfig, control: str) -> Path | None:
    """Return the checkpoint that a control continues from, if it branches off the run."""
    branch = config.controls.get(control, {}).get("branch")
    if branch is None:
        return None
    name = BEFORE_DROP if branch == "drop" else step_name(branch)
    return Path(config.run_dir) / "checkpoints" / name
