"""The runs of a sweep: their names and results, and the table of them in every format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap

from rich import box
from rich import table as rich_table
from rich.console import Group, RenderableType
from rich.text import Text

from trainer.common.files import csv_text
from trainer.common.words import factor_label, percent
from trainer.evaluation.effective_length import EffectiveLength
from trainer.evaluation.outcomes import AS_IS, Outcomes
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Report, is_known
from trainer.evaluation.statistics import Comparison, Estimate, change, sign_test
from trainer.report.tables import (
    EFFECTIVE_HEAD,
    EFFECTIVE_LEGEND,
    MISSING,
    WIDTH,
    Entry,
    effective_entries,
    markdown_cell,
    markdown_row,
    number,
    perplexity,
    terminal_cell,
    tied,
)
from trainer.runs.config import RunConfig

FEW = 2
"""Most swept keys that every row names; with more, a row names those unlike the first run's."""


@dataclass(frozen=True)
class Reached:
    """Results of a run at one length; None or empty if not measured.

    ``factor``: length over training length. ``retrieval``: mean of the trials' ``scores``.
    ``loss``: on the last tokens (nats per token), the mean of the windows' losses ``by_window``.
    """

    length: int
    factor: float
    retrieval: Estimate | None = None
    scores: tuple[float, ...] = ()
    loss: float | None = None
    by_window: tuple[float, ...] = ()


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
    reached: tuple[Reached, ...] = ()
    effective: EffectiveLength | None = None


@dataclass(frozen=True)
class Sweep:
    """Runs in the given order; the first with measurements is the reference of the others."""

    name: str
    runs: tuple[SweptRun, ...]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys that differ between runs, in the order of the runs' settings."""
        found = dict.fromkeys(key for run in self.runs for key in run.settings)
        return tuple(k for k in found if len({run.settings.get(k) for run in self.runs}) > 1)

    @cached_property
    def titles(self) -> dict[str, str]:
        """Short form of each key: its last two words, or as many as make it unique among keys."""
        return {key: _shortest(key, self.keys) for key in self.keys}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Unique name of each run, made of the settings that differ."""
        first = self.runs[0].settings
        found = []
        for run in self.runs:
            own = {key: run.settings[key] for key in self.keys if key in run.settings}
            if len(self.keys) > FEW:
                own = {key: value for key, value in own.items() if first.get(key) != value}
            found.append(", ".join(f"{self.titles[k]}={v}" for k, v in own.items()) or run.label)
        shared = Counter(found)
        return tuple(
            f"{name} ({run.place})" if shared[name] > 1 else name
            for name, run in zip(found, self.runs, strict=True)
        )

    @cached_property
    def reference(self) -> SweptRun | None:
        """Run with which the others are compared; None if nothing was measured."""
        return next((run for run in self.runs if run.reached), None)

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """Measured lengths of all runs over the training length, ascending."""
        return tuple(sorted({at.factor for run in self.runs for at in run.reached}))

    def at(self, run: SweptRun, factor: float) -> Reached | None:
        """Return the results of a run at a length, or None if it was not measured there."""
        return next((at for at in run.reached if at.factor == factor), None)

    def comparison(self, run: SweptRun, factor: float) -> Comparison | None:
        """Return the sign test of a run's retrieval against the reference's, on the same trials."""
        own, other = self._pair(run, factor)
        if own is None or other is None or not own.scores:
            return None
        same = len(own.scores) == len(other.scores)
        return sign_test(own.scores, other.scores) if same else None

    def loss_change(self, run: SweptRun, factor: float) -> Estimate | None:
        """Return a run's relative change in loss from the reference, on the same windows."""
        own, other = self._pair(run, factor)
        if own is None or other is None or not own.by_window:
            return None
        same = len(own.by_window) == len(other.by_window)
        return change(own.by_window, other.by_window) if same else None

    def _pair(self, run: SweptRun, factor: float) -> tuple[Reached | None, Reached | None]:
        first = self.reference
        if first is None or run is first or run.measured_on != first.measured_on:
            return None, None
        own, other = self.at(run, factor), self.at(first, factor)
        alike = own is not None and other is not None and own.length == other.length
        return (own, other) if alike else (None, None)


def reached(report: Report, label: str) -> tuple[Reached, ...]:
    """Return retrieval and loss by length of the model as is, from a run's own report."""
    outcomes = Outcomes(report)
    row, tasks = (label, AS_IS), _retrieval_tasks(outcomes)
    lengths = {c.length: c.factor for c in report.cells if (c.model, c.method) == row}
    found = []
    for length, factor in sorted(lengths.items()):
        cells = [outcomes.cell(row, task, length) for task in tasks]
        text = outcomes.cell(row, PERPLEXITY, length)
        found.append(
            Reached(
                length,
                factor,
                outcomes.estimate(row, tasks, length) if tasks else None,
                tuple(score for cell in cells if cell for score in cell.scores),
                text.last_loss if text else None,
                tuple(x for x in text.by_window if is_known(x)) if text else (),
            )
        )
    return tuple(found)


def effective(report: Report, label: str) -> EffectiveLength | None:
    """Return the effective length of the model as is, from a run's own report."""
    outcomes = Outcomes(report)
    return outcomes.effective_length((label, AS_IS), _retrieval_tasks(outcomes))


def _retrieval_tasks(outcomes: Outcomes) -> list[str]:
    """Return the tasks whose mean score is the retrieval: the statements, or else those that can
    be averaged."""
    tasks = [STATEMENTS] if STATEMENTS in outcomes.scored else outcomes.averaged
    return tasks or outcomes.scored[:1]


def numeric(text: str) -> float | None:
    """Return a setting as a number, or None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


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
"""Behind a run's name and the keys that were swept."""
SOUND = ("tokens", "training loss", "skipped updates")
_CELL, _NAME, _FACTS = 13, 19, ((6, "\ntokens"), (5, "train\nloss"), (7, "skipped\nupdates"))


def entries(sweep: Sweep) -> dict[float, dict[str, Entry]]:
    """Return table entries by factor and directory: retrieval with the loss, or perplexity if no
    run has retrieval, as in a run's own table."""
    found: dict[float, dict[str, Entry]] = {}
    alone = not has_retrieval(sweep)
    for factor in sweep.factors:
        column = {run.place: at for run in sweep.runs if (at := sweep.at(run, factor))}
        most = max((at.retrieval.mean for at in column.values() if at.retrieval), default=None)
        losses = [at.loss for at in column.values() if at.loss is not None]
        least = None if tied(losses) else min(losses, default=None)
        found[factor] = {}
        for run in (run for run in sweep.runs if run.place in column):
            at = column[run.place]
            loss = MISSING if at.loss is None else f"{at.loss:.3f}"
            if (own := at.retrieval) is None:
                lowest = most is None and at.loss is not None and at.loss == least
                shown = number(perplexity(at.loss)) if alone and at.loss is not None else loss
                found[factor][run.place] = Entry(shown, best=lowest)
                continue
            held = sweep.comparison(run, factor)
            interval = f"{percent(own.low)}–{percent(own.high)}"
            mark = held.mark if held else ""
            entry = Entry(percent(own.mean), interval, mark, 0 < own.mean == most, loss)
            found[factor][run.place] = entry
    return found


def has_retrieval(sweep: Sweep) -> bool:
    """Whether any run has a score; otherwise the table shows perplexity."""
    return any(at.retrieval for run in sweep.runs for at in run.reached)


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
    found, by_factor = [], entries(sweep)
    for factor in sweep.factors:
        lengths = {at.length for run in sweep.runs if (at := sweep.at(run, factor))}
        trained = " (trained)" if factor == 1 else ""
        tokens = f"{lengths.pop()} tokens" if len(lengths) == 1 else "tokens vary"
        found.append((f"{tokens}\n{factor_label(factor)}{trained}", by_factor[factor]))
    if own := effective_entries({run.place: run.effective for run in sweep.runs}):
        found.append(("\n".join(EFFECTIVE_HEAD), own))
    return found


def legend(sweep: Sweep) -> str:
    """Return the meaning of the cells."""
    if sweep.reference is None:
        return "No run has been evaluated yet."
    retrieval = has_retrieval(sweep)
    first = sweep.names[sweep.runs.index(sweep.reference)]
    said = (
        "Success in % with its 95% interval, then the held-out loss (nats per token). ↑ ↓ better "
        f"or worse than {first} on the same trials (exact sign test, p < 0.05, not corrected for "
        "the number of tests). Bold: the highest of a column."
        if retrieval
        else "Held-out perplexity, exp of the loss in nats per token. Bold: the lowest of a column."
    )
    apart = [run for run in sweep.runs if run.reached]
    if any(run.measured_on != apart[0].measured_on for run in apart):
        said += (
            " Runs that were measured on other text, tokens or trials than the first are not "
            "tested, and their losses do not compare with its."
        )
    if any(run.effective for run in sweep.runs):
        said += f" {EFFECTIVE_LEGEND}"
    named = " Runs are named by the keys that differ." if sweep.keys else ""
    return f"{said} {MISSING} not measured.{named}"


def unfinished(sweep: Sweep) -> list[str]:
    """Return a sentence for every run that is unfinished or has a problem."""
    return [
        f"{name}: {run.state}{f'; {run.problem}' if run.problem else ''}"
        for name, run in zip(sweep.names, sweep.runs, strict=True)
        if run.state != FINISHED or run.problem
    ]


def terminal_sweep(sweep: Sweep, width: int = WIDTH) -> RenderableType:
    """Return the table, at most ``width`` characters wide; further lengths continue below."""
    beside = sum(size + 1 for size, _ in _FACTS)
    fitting = max(1, (width - _NAME - 1 - beside) // (_CELL + 1))
    columns = sweep_columns(sweep)
    shown: list[RenderableType] = []
    for start in range(0, max(1, len(columns)), fitting):
        chosen = columns[start : start + fitting]
        facts_too = start == 0
        room = width - 1 - len(chosen) * (_CELL + 1) - facts_too * beside
        shown.append(_terminal(sweep, chosen, min(40, room), facts_too))
    shown += [Text(f"{legend(sweep)}\n", style="dim")]
    shown += [Text(said, style="bold red") for said in unfinished(sweep)]
    return Group(*shown)


def _terminal(
    sweep: Sweep,
    chosen: list[tuple[str, dict[str, Entry]]],
    name_width: int,
    facts_too: bool,
) -> rich_table.Table:
    drawn = rich_table.Table(
        title=Text(f"{sweep.name}{'' if facts_too else ' (continued)'}", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    drawn.add_column("\nrun", width=name_width, overflow="fold")
    for head, _ in chosen:
        drawn.add_column(Text(head), justify="right", width=_CELL, overflow="fold")
    for size, head in _FACTS if facts_too else ():
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
    found = []
    for part in re.split("(?<=,) ", name):
        pieces = [part] if len(part) <= width else re.split("(?<==)", part)
        found += [line for piece in pieces for line in wrap(piece, width)]
    return found


def markdown_sweep(sweep: Sweep) -> str:
    """Return the table as Markdown under its heading; ends with a newline."""
    columns = sweep_columns(sweep)
    head = ["run", *(", ".join(one.split("\n")) for one, _ in columns), *SOUND, "state"]
    lines = [markdown_row(head), markdown_row(["---", *["---:"] * (len(head) - 2), "---"])]
    for name, run in zip(sweep.names, sweep.runs, strict=True):
        cells = [markdown_cell(column.get(run.place)) for _, column in columns]
        lines.append(markdown_row([name, *cells, *facts(run), run.state]))
    said = "".join(f"\n- {one}" for one in unfinished(sweep))
    body = "\n".join(lines)
    return f"## {sweep.name}\n\n{body}\n\n{legend(sweep)}\n{said and said + chr(10)}"


def csv_sweep(sweep: Sweep) -> str:
    """Return CSV with a row for each run and length, or one row for a run without measurements.

    ``n`` counts trials. Empty: not measured.
    """
    return csv_text(("run", *sweep.keys, *CSV_HEAD), _csv_rows(sweep))


def _csv_rows(sweep: Sweep) -> Iterable[tuple[object, ...]]:
    for name, run in zip(sweep.names, sweep.runs, strict=True):
        settings = (run.settings.get(key, "") for key in sweep.keys)
        what = (name, *settings, run.place, run.state, run.problem)
        about = (*what, run.tokens, run.loss, run.skipped)
        for at in run.reached:
            held, more = sweep.comparison(run, at.factor), sweep.loss_change(run, at.factor)
            own = at.retrieval
            yield (
                *(*about, at.length, at.factor, len(at.scores) or None),
                *((own.mean, own.low, own.high) if own else (None,) * 3),
                *(held.p_value if held else None, at.loss),
                *((more.mean, more.low, more.high) if more else (None,) * 3),
            )
        if not run.reached:
            yield (*about, *[None] * (len(CSV_HEAD) - 6))
