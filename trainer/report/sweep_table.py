"""The table of a sweep: a row a run; for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import wrap

from rich import box
from rich import table as rich_table
from rich.console import Group, RenderableType
from rich.text import Text

from trainer.report.rendering import csv_text
from trainer.report.sweep import Sweep, SweptRun
from trainer.report.table import MISSING, Entry
from trainer.report.text import WIDTH, markdown_cell, markdown_row, terminal_cell
from trainer.report.words import factor_label, percent

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


def heads(sweep: Sweep) -> list[str]:
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
    columns, found = heads(sweep), entries(sweep)
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
        label = Text("\n".join(_lines(name, name_width)))
        if run.state != FINISHED:
            label.append("\n" + "\n".join(wrap(run.state, name_width)), style="red")
        cells = [terminal_cell(found[factor].get(run.place)) for _, factor in chosen]
        drawn.add_row(label, *cells, *(facts(run) if facts_too else ()))
    return drawn


def _lines(name: str, width: int) -> list[str]:
    """A name in lines; a setting that fits one stays on it, another goes on behind its =."""
    found = []
    for part in re.split("(?<=,) ", name):
        pieces = [part] if len(part) <= width else re.split("(?<==)", part)
        found += [line for piece in pieces for line in wrap(piece, width)]
    return found


def markdown_sweep(sweep: Sweep) -> str:
    """The table under its heading; ends with a newline."""
    found = entries(sweep)
    head = ["run", *(", ".join(one.split("\n")) for one in heads(sweep)), *SOUND, "state"]
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
