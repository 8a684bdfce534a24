"""Report of an experiment: the evaluation of its runs, and what their training showed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_high

from trainer.common.fields import adapter
from trainer.common.ranks import Ranks
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.evaluation.results import (
    AS_IS,
    PERPLEXITY,
    Arm,
    Change,
    Drop,
    Milestone,
    Reach,
    Report,
    estimates,
    troubles,
)
from trainer.lightning.fit import TrainedRun
from trainer.runs.descriptions import encodings, label, reference_first, without_home
from trainer.runs.directory import plain
from trainer.runs.metrics_file import read_metrics
from trainer.runs.models import Candidate, find_candidate, origin
from trainer.runs.phases import phases_of, tokens_at
from trainer.workflows.evaluate import (
    Text,
    fitting_together,
    measure_models,
    unmeasured,
    with_observations,
)

log = logging.getLogger(__name__)


def make_report(
    config: RunConfig,
    configs: dict[str, RunConfig],
    runs: dict[str, TrainedRun],
    corpus: Corpus,
    ranks: Ranks,
    beside: Sequence[str] = (),
) -> Report:
    """Evaluate all arms as saved, and make the report.

    Finished cells are stored in ``evaluation/cells`` of the run directory, so that an interrupted
    evaluation resumes.

    ``configs``, ``runs``: configurations and results of the arms. ``ranks``: this process;
    the report of the first one is complete. ``beside``: names of other models to measure.
    """
    C = config.evaluation.training_length
    arms = {
        name: replace(
            find_candidate(str(runs[name].checkpoint)).with_training_length(C),
            name=label(arm),
        )
        for name, arm in configs.items()
    }
    trained = {name: arm_of(arm, arms[name], runs[name]) for name, arm in configs.items()}
    for trouble in troubles(list(trained.values())):
        log.warning("%s", trouble)
    began = time.perf_counter()
    others = [find_candidate(model).with_training_length(C) for model in beside]
    ordered = fitting_together(
        sorted([*arms.values(), *others], key=lambda candidate: reference_first(candidate.role))
    )
    cells = Path(config.run_dir) / "evaluation" / "cells"
    text = Text(corpus, arms["main"])
    evaluation = config.evaluation
    report = (
        measure_models(
            config.name,
            ordered,
            evaluation,
            text,
            cells,
            config.trainer.accelerator,
            ranks,
            config.trainer.tf32,
        )
        if evaluation.enabled
        else unmeasured(config.name, config.training_length, corpus)
    )
    seconds = round(time.perf_counter() - began, 1)
    losses = estimates(report.rows, PERPLEXITY, "loss")
    states = {arm.name: arm.state for arm in arms.values()}
    reaches, milestones = adapter(tuple[Reach, ...]), adapter(tuple[Milestone, ...])
    effect = runs["main"].effect_of_drop
    report = replace(
        report,
        config=without_home(plain(config)),
        made=origin(ordered),
        arms=tuple(
            replace(arm, final_loss=None if loss is None else loss.mean)
            for arm in trained.values()
            for loss in [losses.get((arm.name, AS_IS), {}).get(report.training_length)]
        ),
        drop=adapter(Drop).validate_python(effect) if effect else None,
        reach={n: reaches.validate_python(s.get("lengths", ())) for n, s in states.items()},
        milestones={
            n: milestones.validate_python(s.get("benchmarks", ())) for n, s in states.items()
        },
        timing={
            "tokens_per_second": {
                label(arm): median_rate(Path(arm.run_dir)) for arm in configs.values()
            },
            "evaluation_seconds": seconds,
            "training_seconds": {
                label(arm): round(spent, 1)
                for name, arm in configs.items()
                if (spent := runs[name].seconds) is not None
            },
        },
    )
    return with_observations(report, ordered, {arm.name: arm for arm in report.arms})


def arm_of(config: RunConfig, candidate: Candidate, run: TrainedRun) -> Arm:
    """Return what its training shows of a run, without an evaluation."""
    rows = read_metrics(Path(config.run_dir) / "metrics.csv")
    last = rows[-1] if rows else {}
    encoding = encodings(config)
    changes = tuple(
        Change(
            phase.start,
            effect["what"],
            phase.config.data.sequence_length,
            *(effect[name] for name in ("loss_before", "loss_after", "loss_end")),
        )
        for phase in phases_of(config)
        if (effect := run.effects.get(phase.name)) is not None
    )
    if config.drop_step is not None:
        encoding += f", dropped at step {config.drop_step}"
    return Arm(
        name=candidate.name,
        encoding=encoding,
        parameters=candidate.parameters,
        steps=config.trainer.max_steps,
        tokens=tokens_at(config, config.trainer.max_steps),
        curve=tuple((row["step"], row["loss"]) for row in rows if "loss" in row),
        skipped=last.get("skipped_steps", 0),
        finite=math.isfinite(last.get("parameter_norm", 0.0)),
        changes=changes,
    )


def median_rate(run_dir: Path) -> float | None:
    rows = read_metrics(run_dir / "metrics.csv")
    rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return round(median_high(rates), 0) if rates else None
