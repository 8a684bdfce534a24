"""The runs of a sweep: their names and results, and the table of them in every format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from textwrap import wrap

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from trainer.common.files import csv_text
from trainer.common.words import factor_label, percent
from trainer.config import RunConfig
from trainer.evaluation.outcomes import AS_IS, Outcomes, Result
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Report, is_known
from trainer.evaluation.statistics import Comparison, EffectiveLength, Estimate, change, sign_test
from trainer.report.tables import (
    EFFECTIVE_HEAD,
    EFFECTIVE_LEGEND,
    MISSING,
    WIDTH,
    Entry,
    effective_entries,
    interval,
    markdown_cell,
    markdown_row,
    number,
    perplexity,
    terminal_cell,
    terminal_table,
)

FEW = 2
"""Most swept keys that every row names; with more, a row names those unlike the first run's."""


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep.

    ``place``: its directory. ``label``: its name in its own report. ``settings``: values of keys
    that differ between runs. ``state``: ``finished``, or its progress. ``problem``: why it failed,
    or why its numbers are meaningless. ``tokens``, ``loss``, ``skipped``: tokens read, training
    loss and skipped updates in its last row of metrics. ``measured_on``: equal for runs with the
    same trials and windows. ``reached``: results by length, ascending. ``effective``: effective
    length of its retrieval.
    """

    place: str
    label: str
    settings: Mapping[str, str]
    state: str
    problem: str = ""
    tokens: int | None = None
    loss: float | None = None
    skipped: int | None = None
    measured_on: str = ""
    reached: tuple[Result, ...] = ()
    effective: EffectiveLength | None = None


@dataclass(frozen=True)
class Sweep:
    """Runs in the given order; the first with measurements is the reference of the others."""

    name: str
    runs: tuple[SweptRun, ...]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys that differ between runs, in the order of the runs' settings."""
        keys = dict.fromkeys(key for run in self.runs for key in run.settings)
        return tuple(k for k in keys if len({run.settings.get(k) for run in self.runs}) > 1)

    @cached_property
    def titles(self) -> dict[str, str]:
        """Short form of each key: its last two words, or as many as make it unique among keys."""
        return {key: _shortest(key, self.keys) for key in self.keys}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Unique name of each run, made of the settings that differ."""
        first = self.runs[0].settings if len(self.keys) > FEW else {}
        names = []
        for run in self.runs:
            named = [k for k in self.keys if k in run.settings and run.settings[k] != first.get(k)]
            settings = (f"{self.titles[key]}={run.settings[key]}" for key in named)
            names.append(", ".join(settings) or run.label)
        shared = Counter(names)
        return tuple(
            f"{name} ({run.place})" if shared[name] > 1 else name
            for name, run in zip(names, self.runs, strict=True)
        )

    @cached_property
    def reference(self) -> SweptRun | None:
        """Run with which the others are compared; None if nothing was measured."""
        return next((run for run in self.runs if run.reached), None)

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """Measured lengths of all runs over the training length, ascending."""
        return tuple(sorted({point.factor for run in self.runs for point in run.reached}))

    @cached_property
    def shared_factors(self) -> tuple[float, ...]:
        """Those of :attr:`factors` at which all runs with results were measured."""
        measured = [{point.factor for point in run.reached} for run in self.runs if run.reached]
        return tuple(factor for factor in self.factors if all(factor in run for run in measured))

    def point(self, run: SweptRun, factor: float) -> Result | None:
        """Return the results of a run at a length, or None if it was not measured there."""
        return next((point for point in run.reached if point.factor == factor), None)

    def comparison(
        self, run: SweptRun, factor: float, other: SweptRun | None = None
    ) -> Comparison | None:
        """Return the sign test of a run's retrieval against another's, on the same trials.

        ``other``: the reference by default.
        """
        scores = [point.scores for point in self._pair(run, factor, other)]
        return sign_test(*scores) if scores and len(scores[0]) == len(scores[1]) > 0 else None

    def loss_change(
        self, run: SweptRun, factor: float, other: SweptRun | None = None
    ) -> Estimate | None:
        """Return a run's relative change in loss from another's, on the same windows, two at least.

        ``other``: the reference by default.
        """
        losses = [point.losses for point in self._pair(run, factor, other)]
        return change(*losses) if losses and len(losses[0]) == len(losses[1]) > 1 else None

    def leader(self, factor: float) -> SweptRun | None:
        """Return the run that is better than every other measured one at a length, if any.

        Each lead has to hold in a test on the same trials or, without retrieval, windows.
        """
        points = [(run, point) for run in self.runs if (point := self.point(run, factor))]
        rates = [(point.retrieval.mean, run) for run, point in points if point.retrieval]
        ranked = rates or [(-point.loss, run) for run, point in points if point.loss is not None]
        if len(ranked) < 2:
            return None
        _, best = max(ranked, key=itemgetter(0))
        others = [run for _, run in ranked if run is not best]
        if rates:
            tests = [self.comparison(best, factor, other) for other in others]
            leads = all(test is not None and test.mark == "↑" for test in tests)
        else:
            changes = [self.loss_change(best, factor, other) for other in others]
            leads = all(lower is not None and lower.high < 0 for lower in changes)
        return best if leads else None

    def _pair(self, run: SweptRun, factor: float, other: SweptRun | None) -> list[Result]:
        """Return the results of two runs, or nothing if they do not compare."""
        first = other or self.reference
        if first is None or run is first or run.measured_on != first.measured_on:
            return []
        pair = [point for r in (run, first) if (point := self.point(r, factor)) is not None]
        return pair if len(pair) == 2 and pair[0].length == pair[1].length else []


def reached(report: Report, label: str) -> tuple[Result, ...]:
    """Return retrieval and loss by length of the model as is, from a run's own report."""
    outcomes = Outcomes(report)
    row, tasks = (label, AS_IS), _retrieval_tasks(outcomes)
    lengths = {c.length: c.factor for c in report.cells if (c.model, c.method) == row}
    points = []
    for length, factor in sorted(lengths.items()):
        samples = outcomes.samples(row, tasks, length) if tasks else []
        text = outcomes.cell(row, PERPLEXITY, length)
        points.append(
            Result(
                *(label, length, factor),
                outcomes.estimate(row, tasks, length) if tasks else None,
                text.last_loss if text else None,
                tuple(x for x in text.by_window if is_known(x)) if text else (),
                tuple(score for sample in samples for score in sample.scores),
            )
        )
    return tuple(points)


def effective(report: Report, label: str) -> EffectiveLength | None:
    """Return the effective length of the model as is, from a run's own report."""
    outcomes = Outcomes(report)
    return outcomes.effective_length((label, AS_IS), _retrieval_tasks(outcomes))


def _retrieval_tasks(outcomes: Outcomes) -> list[str]:
    """Return the tasks whose mean score is the retrieval: the statements, or else those that can
    be averaged."""
    tasks = [STATEMENTS] if STATEMENTS in outcomes.scored else outcomes.averaged
    return tasks or outcomes.scored[:1]


def _shortest(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    groups = RunConfig.__dataclass_fields__  # schedule.peak is not drop.schedule.peak
    ends = (".".join(parts[-n:]) for n in range(2, len(parts)) if parts[-n] not in groups)
    return next((e for e in ends if sum(f".{k}".endswith(f".{e}") for k in keys) == 1), key)


FINISHED = "finished"
CSV_HEAD = (
    *("run_dir", "state", "problem", "tokens", "training_loss", "skipped_steps", "length"),
    *("factor", "n", "retrieval", "low", "high", "p_value", "loss"),
    *("loss_change", "loss_change_low", "loss_change_high"),
)
"""Columns after a run's name and the swept keys."""
FACTS = ("tokens", "training loss", "skipped updates")
_CELL, _NAME = 13, 19  # characters of a column in a terminal
_TERMINAL_FACTS = ((6, "\ntokens"), (5, "train\nloss"), (7, "skipped\nupdates"))


def entries(sweep: Sweep, factor: float) -> dict[str, Entry]:
    """Return a column by directory: retrieval with the loss, or perplexity if no run has retrieval,
    as in a run's own table."""
    points = [(run, point) for run in sweep.runs if (point := sweep.point(run, factor))]
    leader, shows_perplexity = sweep.leader(factor), not has_retrieval(sweep)
    column = {}
    for run, point in points:
        loss = MISSING if point.loss is None else f"{point.loss:.3f}"
        if (rate := point.retrieval) is None:
            if shows_perplexity and point.loss is not None:
                loss = number(perplexity(point.loss))
            column[run.place] = Entry(loss, best=run is leader)
            continue
        comparison = sweep.comparison(run, factor)
        mark = comparison.mark if comparison else ""
        column[run.place] = Entry(percent(rate.mean), interval(rate), mark, run is leader, loss)
    return column


def has_retrieval(sweep: Sweep) -> bool:
    """Whether any run has a score; otherwise the table shows perplexity."""
    return any(point.retrieval for run in sweep.runs for point in run.reached)


def facts(run: SweptRun) -> tuple[str, str, str]:
    """Return tokens, training loss and skipped updates as text."""
    return (
        MISSING if run.tokens is None else short(run.tokens),
        MISSING if run.loss is None else f"{run.loss:.3f}",
        MISSING if run.skipped is None else f"{run.skipped:,}",
    )


def short(count: int) -> str:
    """Return ``26.2M`` for 26,214,400."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def sweep_columns(sweep: Sweep) -> list[tuple[str, dict[str, Entry]]]:
    """Return the head of each column and its entries by directory, the effective length last.

    A head has the tokens if all runs have the same training length.
    """
    columns = []
    for factor in sweep.factors:
        lengths = {point.length for run in sweep.runs if (point := sweep.point(run, factor))}
        trained = " (trained)" if factor == 1 else ""
        tokens = f"{lengths.pop()} tokens" if len(lengths) == 1 else "tokens vary"
        head = f"{tokens}\n{factor_label(factor)}{trained}"
        columns.append((head, entries(sweep, factor)))
    if effective_lengths := effective_entries({run.place: run.effective for run in sweep.runs}):
        untested = {place: replace(e, best=False) for place, e in effective_lengths.items()}
        columns.append(("\n".join(EFFECTIVE_HEAD), untested))
    return columns


def caveat(sweep: Sweep) -> str:
    """Return a sentence if the runs were not all measured on the same text, or an empty text."""
    measured = [run for run in sweep.runs if run.reached]
    if all(run.measured_on == measured[0].measured_on for run in measured):
        return ""
    return (
        " Runs that were measured on other text, tokens or trials than the first are not "
        "tested, and their losses are not comparable with the first run's."
    )


def legend(sweep: Sweep) -> str:
    """Return the meaning of the cells."""
    if sweep.reference is None:
        return "No run has been evaluated yet."
    retrieval = has_retrieval(sweep)
    first = sweep.names[sweep.runs.index(sweep.reference)]
    text = (
        "Success in % with its 95% interval, then the held-out loss (nats per token). ↑ ↓ better "
        f"or worse than {first} on the same trials (exact sign test, p < 0.05, not corrected for "
        "the number of tests). Bold: better than every other run of its column by this test."
        if retrieval
        else "Held-out perplexity, exp of the loss in nats per token. Bold: lower than every other "
        "run of its column on the same windows (95% interval of a paired bootstrap)."
    )
    text += " A row is one training run: the tests do not cover the choice of its seed."
    text += caveat(sweep)
    if any(run.effective for run in sweep.runs):
        text += f" {EFFECTIVE_LEGEND}"
    names = " Runs are named by the keys that differ." if sweep.keys else ""
    return f"{text} {MISSING} not measured.{names}"


def unfinished(sweep: Sweep) -> list[str]:
    """Return a sentence for every run that is unfinished or has a problem."""
    return [
        f"{name}: {run.state}{f'; {run.problem}' if run.problem else ''}"
        for name, run in zip(sweep.names, sweep.runs, strict=True)
        if run.state != FINISHED or run.problem
    ]


def terminal_sweep(sweep: Sweep, width: int = WIDTH) -> RenderableType:
    """Return the table, at most ``width`` characters wide; further lengths continue below."""
    facts_width = sum(size + 1 for size, _ in _TERMINAL_FACTS)
    fitting = max(1, (width - _NAME - 1 - facts_width) // (_CELL + 1))
    columns = sweep_columns(sweep)
    shown: list[RenderableType] = []
    for start in range(0, max(1, len(columns)), fitting):
        chosen = columns[start : start + fitting]
        facts_too = start == 0
        room = width - 1 - len(chosen) * (_CELL + 1) - facts_too * facts_width
        shown.append(_terminal(sweep, chosen, min(40, room), facts_too))
    shown.append(Text(f"{legend(sweep)}\n", style="dim"))
    shown += [Text(trouble, style="bold red") for trouble in unfinished(sweep)]
    return Group(*shown)


def _terminal(
    sweep: Sweep,
    chosen: list[tuple[str, dict[str, Entry]]],
    name_width: int,
    facts_too: bool,
) -> RichTable:
    drawn = terminal_table(f"{sweep.name}{'' if facts_too else ' (continued)'}")
    drawn.padding = 0
    drawn.add_column("\nrun", width=name_width, overflow="fold")
    for head, _ in chosen:
        drawn.add_column(Text(head), justify="right", width=_CELL, overflow="fold")
    for size, head in _TERMINAL_FACTS if facts_too else ():
        drawn.add_column(head, justify="right", width=size)
    for name, run in zip(sweep.names, sweep.runs, strict=True):
        label = Text("\n".join(_name_lines(name, name_width)))
        if run.state != FINISHED:
            label.append("\n" + "\n".join(wrap(run.state, name_width)), style="red")
        cells = [terminal_cell(column.get(run.place)) for _, column in chosen]
        drawn.add_row(label, *cells, *(facts(run) if facts_too else ()))
    return drawn


def _name_lines(name: str, width: int) -> list[str]:
    """Wrap a name, between settings if they fit on a line, otherwise after their =."""
    lines = []
    for part in re.split("(?<=,) ", name):
        pieces = [part] if len(part) <= width else re.split("(?<==)", part)
        lines += [line for piece in pieces for line in wrap(piece, width)]
    return lines


def markdown_sweep(sweep: Sweep) -> str:
    """Return the table as Markdown under its heading; ends with a newline."""
    columns = sweep_columns(sweep)
    head = ["run", *(text.replace("\n", ", ") for text, _ in columns), *FACTS, "state"]
    lines = [markdown_row(head), markdown_row(["---", *["---:"] * (len(head) - 2), "---"])]
    for name, run in zip(sweep.names, sweep.runs, strict=True):
        cells = [markdown_cell(column.get(run.place)) for _, column in columns]
        lines.append(markdown_row([name, *cells, *facts(run), run.state]))
    text = [f"## {sweep.name}", "", *lines, "", legend(sweep)]
    if troubles := unfinished(sweep):
        text += ["", *(f"- {trouble}" for trouble in troubles)]
    return "\n".join([*text, ""])


def csv_sweep(sweep: Sweep) -> str:
    """Return CSV with a row for each run and length, or one row for a run without measurements.

    ``n`` counts texts, which are independent. Empty: not measured.
    """
    return csv_text(("run", *sweep.keys, *CSV_HEAD), _csv_rows(sweep))


def _csv_rows(sweep: Sweep) -> Iterable[tuple[object, ...]]:
    for name, run in zip(sweep.names, sweep.runs, strict=True):
        settings = (run.settings.get(key, "") for key in sweep.keys)
        about_run = (
            *(name, *settings, run.place, run.state, run.problem),
            *(run.tokens, run.loss, run.skipped),
        )
        for point in run.reached:
            comparison = sweep.comparison(run, point.factor)
            yield (
                *(*about_run, point.length, point.factor, len(point.scores) or None),
                *_numbers(point.retrieval),
                *(comparison.p_value if comparison else None, point.loss),
                *_numbers(sweep.loss_change(run, point.factor)),
            )
        if not run.reached:
            yield (*about_run, *[None] * (len(CSV_HEAD) - 6))


def _numbers(estimate: Estimate | None) -> tuple[float | None, ...]:
    return (estimate.mean, estimate.low, estimate.high) if estimate else (None,) * 3
