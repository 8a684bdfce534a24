"""SWEEPDOC"""

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
from trainer.evaluation.outcomes import AS_IS, Outcomes
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Report, is_known
from trainer.evaluation.statistics import Comparison, Estimate, change, sign_test
from trainer.report.tables import MISSING, WIDTH, Entry, markdown_cell, markdown_row, terminal_cell

FEW = 2
"""Swept keys that are all named in every row; of more, those in which it differs from the first."""


@dataclass(frozen=True)
class Reached:
    """A run as it is at one ``length`` (tokens; ``factor`` times its training length): ``scores``
    of its trials and their mean, ``loss`` on the last tokens (nats per token), the mean of those of
    the windows (``by_window``). None and empty: not measured."""

    length: int
    factor: float
    retrieval: Estimate | None = None
    scores: tuple[float, ...] = ()
    loss: float | None = None
    by_window: tuple[float, ...] = ()


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep.

    ``place``: its directory. ``label``: what its own report calls it. ``settings``: values by key,
    of keys that differ between runs. ``state``: ``finished``, or how far it is. ``problem``: why it
    failed, or that its numbers say nothing. ``tokens``, ``loss``, ``skipped``: read, the training
    loss and updates left out, in its last row of metrics. ``measured_on``: runs with the same saw
    the same trials and windows. ``reached``: by length, ascending.
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


@dataclass(frozen=True)
class Sweep:
    """``runs`` in the order in which they were given. The first with measurements is what the
    others are compared with."""

    name: str
    runs: tuple[SweptRun, ...]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Those that differ between runs, in the order of the runs' settings."""
        found = dict.fromkeys(key for run in self.runs for key in run.settings)
        return tuple(k for k in found if len({run.settings.get(k) for run in self.runs}) > 1)

    @cached_property
    def titles(self) -> dict[str, str]:
        """The ends of the keys, of two words or as many as tell them apart: ``qk_norm.when`` for
        ``model.qk_norm.when``."""
        return {key: _shortest(key, self.keys) for key in self.keys}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all runs, by what differs between them; no two alike."""
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
        """What the others are compared with; None where nothing was measured."""
        return next((run for run in self.runs if run.reached), None)

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """Lengths in units of the training length at which any run was measured, ascending."""
        return tuple(sorted({at.factor for run in self.runs for at in run.reached}))

    def at(self, run: SweptRun, factor: float) -> Reached | None:
        """What a run reached at a length; None where it was not measured there."""
        return next((at for at in run.reached if at.factor == factor), None)

    def comparison(self, run: SweptRun, factor: float) -> Comparison | None:
        """The sign test of its retrieval with the reference's, on the same trials."""
        own, other = self._pair(run, factor)
        if own is None or other is None or not own.scores:
            return None
        same = len(own.scores) == len(other.scores)
        return sign_test(own.scores, other.scores) if same else None

    def loss_change(self, run: SweptRun, factor: float) -> Estimate | None:
        """How much its loss is above the reference's (0.01 for 1%), on the same windows."""
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
    """What a run's own report says of a model as it is: its retrieval (that of the statements, or
    else the mean over the tasks with scores) and its loss, by length."""
    outcomes = Outcomes(report)
    row = (label, AS_IS)
    tasks = [STATEMENTS] if STATEMENTS in outcomes.scored else outcomes.averaged
    tasks = tasks or outcomes.scored[:1]
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


def numeric(text: str) -> float | None:
    """The number that a setting is, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _shortest(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    ends = (".".join(parts[-n:]) for n in range(2, len(parts)))
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
    """By length (in units of the training length) and directory what a run reached: its retrieval
    with the loss beside it, or the loss alone."""
    found: dict[float, dict[str, Entry]] = {}
    for factor in sweep.factors:
        column = {run.place: at for run in sweep.runs if (at := sweep.at(run, factor))}
        most = max((at.retrieval.mean for at in column.values() if at.retrieval), default=None)
        least = min((at.loss for at in column.values() if at.loss is not None), default=None)
        found[factor] = {}
        for run in (run for run in sweep.runs if run.place in column):
            at = column[run.place]
            loss = MISSING if at.loss is None else f"{at.loss:.3f}"
            if (own := at.retrieval) is None:
                found[factor][run.place] = Entry(loss, best=at.loss == least and most is None)
                continue
            held = sweep.comparison(run, factor)
            interval = f"{percent(own.low)}–{percent(own.high)}"
            mark = held.mark if held else ""
            entry = Entry(percent(own.mean), interval, mark, own.mean == most, loss)
            found[factor][run.place] = entry
    return found


def facts(run: SweptRun) -> tuple[str, str, str]:
    """Its tokens, training loss and skipped updates."""
    return (
        MISSING if run.tokens is None else short(run.tokens),
        MISSING if run.loss is None else f"{run.loss:.3f}",
        MISSING if run.skipped is None else f"{run.skipped:,}",
    )


def short(count: int) -> str:
    """``26.2M`` for 26,214,400."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def sweep_heads(sweep: Sweep) -> list[str]:
    """Of the columns of lengths; with tokens where the training length is the same for all."""
    found = []
    for factor in sweep.factors:
        lengths = {at.length for run in sweep.runs if (at := sweep.at(run, factor))}
        trained = " (trained)" if factor == 1 else ""
        tokens = f"{lengths.pop()} tokens" if len(lengths) == 1 else "tokens vary"
        found.append(f"{tokens}\n{factor_label(factor)}{trained}")
    return found


def legend(sweep: Sweep) -> str:
    """What the cells mean."""
    if sweep.reference is None:
        return "No run has been evaluated yet."
    retrieval = any(at.retrieval for run in sweep.runs for at in run.reached)
    first = sweep.names[sweep.runs.index(sweep.reference)]
    said = (
        "Success in % with its 95% interval, then the held-out loss (nats per token). ↑ ↓ better "
        f"or worse than {first} on the same trials (exact sign test, p < 0.05, not corrected for "
        "the number of tests). Bold: the highest of a column."
        if retrieval
        else "Held-out loss in nats per token. Bold: the lowest of a column."
    )
    apart = [run for run in sweep.runs if run.reached]
    if any(run.measured_on != apart[0].measured_on for run in apart):
        said += (
            " Runs that were measured on other text, tokens or trials than the first are not "
            "tested, and their losses do not compare with its."
        )
    return f"{said} {MISSING} not measured."


def unfinished(sweep: Sweep) -> list[str]:
    """A sentence for every run that is not finished, or whose numbers say nothing."""
    return [
        f"{name}: {run.state}{f'; {run.problem}' if run.problem else ''}"
        for name, run in zip(sweep.names, sweep.runs, strict=True)
        if run.state != FINISHED or run.problem
    ]


def terminal_sweep(sweep: Sweep, width: int = WIDTH) -> RenderableType:
    """The table, at most ``width`` columns wide; more lengths than fit continue below."""
    beside = sum(size + 1 for size, _ in _FACTS)
    fitting = max(1, (width - _NAME - 1 - beside) // (_CELL + 1))
    columns, found = sweep_heads(sweep), entries(sweep)
    shown: list[RenderableType] = []
    for start in range(0, max(1, len(columns)), fitting):
        chosen = list(zip(columns, sweep.factors, strict=True))[start : start + fitting]
        facts_too = start == 0
        room = width - 1 - len(chosen) * (_CELL + 1) - facts_too * beside
        shown.append(_terminal(sweep, found, chosen, min(40, room), facts_too))
    shown += [Text(f"{legend(sweep)}\n", style="dim")]
    shown += [Text(said, style="bold red") for said in unfinished(sweep)]
    return Group(*shown)


def _terminal(
    sweep: Sweep,
    found: dict[float, dict[str, Entry]],
    chosen: list[tuple[str, float]],
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
        cells = [terminal_cell(found[factor].get(run.place)) for _, factor in chosen]
        drawn.add_row(label, *cells, *(facts(run) if facts_too else ()))
    return drawn


def _name_lines(name: str, width: int) -> list[str]:
    """A name in lines; a setting that fits one stays on it, another goes on behind its =."""
    found = []
    for part in re.split("(?<=,) ", name):
        pieces = [part] if len(part) <= width else re.split("(?<==)", part)
        found += [line for piece in pieces for line in wrap(piece, width)]
    return found


def markdown_sweep(sweep: Sweep) -> str:
    """The table under its heading; ends with a newline."""
    found = entries(sweep)
    head = ["run", *(", ".join(one.split("\n")) for one in sweep_heads(sweep)), *SOUND, "state"]
    lines = [markdown_row(head), markdown_row(["---", *["---:"] * (len(head) - 2), "---"])]
    for name, run in zip(sweep.names, sweep.runs, strict=True):
        cells = [markdown_cell(found[factor].get(run.place)) for factor in sweep.factors]
        lines.append(markdown_row([name, *cells, *facts(run), run.state]))
    said = "".join(f"\n- {one}" for one in unfinished(sweep))
    body = "\n".join(lines)
    return f"## {sweep.name}\n\n{body}\n\n{legend(sweep)}\n{said and said + chr(10)}"


def csv_sweep(sweep: Sweep) -> str:
    """A row for every run at every length, numbers in full, one without a length for a run without
    measurements; ``n`` counts trials; empty: not measured."""
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
