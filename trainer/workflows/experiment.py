"""A whole experiment: the run, its controls, their evaluation and the report."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import lightning as L

from trainer.common.errors import (
    DivergedError,
    PreemptedError,
    Problem,
    UserError,
    collecting,
    raise_all,
)
from trainer.data.corpus import Corpus, corpus_at
from trainer.evaluation.outcomes import Outcomes
from trainer.evaluation.results import Report
from trainer.report.pages import write_renderings
from trainer.runs.arms import arm_problems, arms_of, control_problems, spread_problems
from trainer.runs.checkpoints import (
    BEFORE_DROP,
    regular_checkpoints,
    step_name,
    step_of,
)
from trainer.runs.config import MAIN, RunConfig
from trainer.runs.directory import (
    check_run_directory,
    check_writable,
    locked,
    log_to_file,
    open_run_directory,
    saved_run,
)
from trainer.runs.memory import memory_problems
from trainer.runs.ranks import (
    Ranks,
    all_gather,
    evaluation_share,
    on_rank_zero,
    process_group,
)
from trainer.training.callbacks.monitors import benchmark_problems, check_monitored_text
from trainer.training.callbacks.stopping import heeding_signals, stopping_between_files
from trainer.training.devices import (
    device_problems,
    open_gpus,
    set_environment,
    set_threads,
)
from trainer.training.loggers import (
    finish_dashboards,
    kept_dashboards,
    log_table,
    logger_problems,
)
from trainer.training.run import train
from trainer.training.user_callbacks import callback_problems, make_callbacks
from trainer.workflows.experiment_report import make_report
from trainer.workflows.training_text import (
    check_evaluated_text,
    check_vocabularies,
    open_corpus,
    vocabulary_problems,
)


def run_experiment(config: RunConfig, chosen: Collection[str] = ()) -> tuple[Report, bool] | None:
    """Train the run and its controls, evaluate all of them, and write the report.

    An interrupted run resumes; a finished one stays unchanged. All ranks train and evaluate; rank 0
    writes the report. ``chosen``: keys whose values the caller chose and has explained.

    Returns:
        The report, and whether it existed before; None on other ranks.

    Raises:
        UserError: something given is wrong; checked before anything heavy starts if possible.
        PreemptedError: the run was asked to stop.
    """
    start_time = time.time()
    with ExitStack() as stack, kept_dashboards():
        return _run_experiment(config, stack, chosen, start_time)


def _run_experiment(
    config: RunConfig, stack: ExitStack, chosen: Collection[str], start_time: float
) -> tuple[Report, bool] | None:
    configs = arms_of(config)
    set_environment(config)
    with process_group(config) as ranks:
        finished = on_rank_zero(lambda: _finished_report(config))
        if finished is not None:
            return (finished, True) if ranks.is_rank_zero else None
        set_threads(config, ranks)
        callbacks = make_all_callbacks(configs)
        opened: list[Corpus] = []
        elsewhere = problems_elsewhere(configs, ranks)
        directories = on_rank_zero(lambda: _open(config, configs, ranks, stack, opened, elsewhere))
        corpus = open_everywhere(config, directories, *opened)
        if ranks.is_rank_zero:
            open_gpus(config, ranks)
        with heeding_signals(), _leaving_together():
            runs = {
                name: train(
                    arm,
                    corpus,
                    _branch(config, name),
                    user_callbacks=callbacks[name],
                    is_control=name != MAIN,
                    start_time=start_time,
                )
                for name, arm in configs.items()
            }
        configs = {name: run.config for name, run in runs.items()}
        share = evaluation_share(ranks)
    directory = Path(config.run_dir)
    # A finished trainer is a reference cycle: collect it now to free memory for the evaluation.
    gc.collect()
    with stopping_between_files():
        report = make_report(configs["main"], configs, runs, corpus, share)
        if share.index:
            return None
        figures = write_renderings(report, directory)
        shown = (f.path for f in figures if f.path.stem.startswith(("reach", "benchmarks")))
        images = {path.stem: path.with_suffix(".png") for path in shown}
        report.write(directory / "report.json")
        log_table(config, Outcomes(report).results(), report.reach, images)
    return report, False


@contextmanager
def _leaving_together() -> Iterator[None]:
    """Keep all ranks of a run that stops or diverges until rank 0 has uploaded its metrics: a
    launcher ends the others as soon as one rank exits with an error."""
    try:
        yield
    except (PreemptedError, DivergedError):
        on_rank_zero(finish_dashboards)
        raise


def make_all_callbacks(configs: dict[str, RunConfig]) -> dict[str, list[L.Callback]]:
    """Create the user's callbacks of every arm on every rank, since a node may lack their file.

    Raises:
        UserError: on all ranks, with the problems of any.
    """
    # All ranks import the classes before any constructs one, which may need all ranks.
    _raise_together([p for arm in configs.values() for p in callback_problems(arm.callbacks)])
    made: dict[str, list[L.Callback]] = {}
    problems: list[Problem] = []
    for name, arm in configs.items():
        with collecting(problems):
            made[name] = make_callbacks(arm.callbacks)
    _raise_together(problems)
    return made


def _raise_together(problems: list[Problem]) -> None:
    """Raise a ``UserError`` on all ranks if there are problems on any."""
    raise_all(problem for on_rank in all_gather(problems) for problem in on_rank)


def start_problems(configs: dict[str, RunConfig], ranks: Ranks) -> list[Problem]:
    """Return the problems of an experiment that show without its text.

    This is the one list of checks before a run: of each arm, of each phase of an arm, and of all
    arms together.
    """
    problems = machine_problems(configs, ranks.world_size)
    problems += experiment_problems(configs, ranks.world_size, ranks.local_size)
    with collecting(problems):
        check_writable(configs["main"].run_dir)
    return problems


def machine_problems(configs: dict[str, RunConfig], processes: int) -> list[Problem]:
    """Return what an experiment misses in this process's GPU, packages or memory."""
    return arm_problems(
        configs,
        of_run=[device_problems, logger_problems, benchmark_problems],
        of_phase=[lambda phase: memory_problems(phase, processes)],
    )


def problems_elsewhere(configs: dict[str, RunConfig], ranks: Ranks) -> list[Problem]:
    """Return the problems of other ranks' machines, one per node and key; all ranks call this
    together.

    GPUs and packages of nodes may differ: a smaller GPU would end the run in its first step, or in
    the evaluation after its last one.
    """
    mine: list[Problem] = []
    if not ranks.is_rank_zero:
        with collecting(mine):
            mine += machine_problems(configs, ranks.world_size)
    by_node_and_key: dict[tuple[str, str], Problem] = {}
    gathered = all_gather((os.uname().nodename, ranks.local_size, mine))
    for node, _, problems in gathered:
        for problem in _on_node(problems, node):
            by_node_and_key.setdefault((node, problem.key), problem)
    sizes = sorted({size for _, size, _ in gathered})
    strategies = [arm.strategy for arm in configs.values()]
    shards_nodes = any(s.name == "hsdp" and s.shard_size is None for s in strategies)
    unequal = Problem(
        "strategy.shard_size",
        f"by default the number of ranks on a node, but nodes have {' or '.join(map(str, sizes))}; "
        "give a number that divides all of them.",
    )
    return [*by_node_and_key.values(), *([unequal] if shards_nodes and len(sizes) > 1 else [])]


def _on_node(problems: Iterable[Problem], node: str) -> list[Problem]:
    return [replace(p, hint=f"{p.hint} (On {node}.)".strip()) for p in problems]


def experiment_problems(
    configs: dict[str, RunConfig], processes: int, on_a_node: int
) -> list[Problem]:
    """Return the problems of an experiment that any machine sees, also one that only submits it."""
    problems = arm_problems(
        configs,
        of_run=[vocabulary_problems],
        of_phase=[lambda phase: spread_problems(phase, processes, on_a_node)],
    )
    return problems + control_problems(configs)


def corpus_problems(configs: dict[str, RunConfig], corpus: Corpus) -> list[Problem]:
    """Return the problems of an experiment that show once its text is known."""
    problems: list[Problem] = []
    for arm in configs.values():
        with collecting(problems):
            check_monitored_text(arm, corpus)
    for check in (check_vocabularies, check_evaluated_text):
        with collecting(problems):
            check(configs, corpus)
    return problems


def _finished_report(config: RunConfig) -> Report | None:
    """Return the report of a finished run, which any machine can show; nothing is written.

    Raises:
        UserError: it cannot be read, or the finished run is another one.
    """
    path = Path(config.run_dir) / "report.json"
    if config.overwrite or not path.exists():
        return None
    try:
        report = Report.read(path)
    except UserError:
        raise UserError.at(
            "run_dir",
            f"{str(path)!r} is damaged, or of an earlier version; remove it, and the same command "
            "evaluates the finished run again, without training.",
        ) from None
    check_run_directory(config, finished=True)
    return report


def _open(
    config: RunConfig,
    configs: dict[str, RunConfig],
    ranks: Ranks,
    stack: ExitStack,
    opened: list[Corpus],
    elsewhere: Sequence[Problem],
) -> list[str]:
    """Check everything, then prepare text and directories.

    ``elsewhere``: the machine problems of other ranks.

    Returns:
        Where the text lies, which is then ``opened``.

    Raises:
        UserError: with all that is wrong.
    """
    problems = start_problems(configs, ranks)
    keys = {problem.key for problem in problems}
    raise_all([*problems, *(problem for problem in elsewhere if problem.key not in keys)])
    for arm in configs.values():
        if not config.overwrite or arm is config:  # deletes the controls' directories, too
            check_run_directory(arm)
    check_added_controls(config)
    opened.append(open_corpus(config, ranks.world_size == 1))
    raise_all(corpus_problems(configs, opened[0]))
    directory = Path(config.run_dir)
    stack.enter_context(locked(directory))
    for arm in configs.values():
        open_run_directory(arm)
    log_to_file(Path(config.run_dir))
    return list(opened[0].directories)


def check_added_controls(config: RunConfig) -> None:
    """Check that controls which a resume adds to its run begin where they should.

    Raises:
        UserError: a removed control lies in the way, or the checkpoint of a branch is gone.
    """
    directory = Path(config.run_dir)
    if config.overwrite or not (directory / "config.yaml").exists():
        return
    steps = [step_of(path) for path in regular_checkpoints(directory / "checkpoints")]
    problems = []
    for name in sorted(config.controls.keys() - saved_run(directory).controls.keys()):
        place, start = directory / "controls" / name, _branch(config, name)
        if place.exists():
            reason = (
                f"{str(place)!r} holds a control that was removed, and it may have branched off "
                "elsewhere; choose another name, or delete that directory."
            )
            problems.append(Problem(f"controls.{name}", reason))
        branch = config.controls[name].get("branch")
        step = config.drop_step if branch == "drop" else branch
        if start and step and not start.is_dir() and step < max(steps, default=0):
            reason = (
                f"the run has passed step {step:,} and keeps checkpoints of {steps} alone; choose "
                "one of these, or leave branch out."
            )
            problems.append(Problem(f"controls.{name}.branch", reason))
    raise_all(problems)


def open_everywhere(config: RunConfig, places: list[str], opened: Corpus | None = None) -> Corpus:
    """Open the corpus on every rank at the places where rank 0 found it; a node may lack its files.

    ``opened``: the corpus, on rank 0.

    Raises:
        UserError: on all ranks, with the problems of any.
    """
    corpus = opened
    problems: list[Problem] = []
    try:
        corpus = corpus or corpus_at(config.data, places)
    except UserError as error:
        problems = _on_node(error.problems, os.uname().nodename)
    _raise_together(problems)
    assert corpus is not None
    return corpus


def _branch(config: RunConfig, control: str) -> Path | None:
    """Return the checkpoint that a control continues from, if it branches off the run."""
    branch = config.controls.get(control, {}).get("branch")
    if branch is None:
        return None
    name = BEFORE_DROP if branch == "drop" else step_name(branch)
    return Path(config.run_dir) / "checkpoints" / name
