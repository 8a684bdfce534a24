"""Tables of results: a row for each model and method, a column for each length."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from trainer.common.errors import UserError
from trainer.common.files import expecting, write_atomically
from trainer.evaluation.results import AS_IS, MEAN, PERPLEXITY, averaged, by_text
from trainer.evaluation.statistics import ROUNDING, sign_mark
from trainer.report.report import FACTS, Report, RowKey, read_csv

MISSING = "·"
TABLE = "results.csv"


class Cell(NamedTuple):
    """Content of a cell: a value such as ``97.3``, its interval such as ``92.4–99.1``, a mark ``↑``
    or ``↓`` if it is significant, and whether it is the best of its column."""

    value: str
    interval: str = ""
    mark: str = ""
    best: bool = False


class Table(NamedTuple):
    """A table for the page and the terminal.

    ``columns``: two lines each. ``rows``: a name, which begins with ``+`` for a further method of
    the model above, and a cell for every column, None if not measured.
    """

    title: str
    note: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def tables(report: Report) -> list[Table]:
    """Return the mean over tasks if there are several, a table for each task, and perplexity."""
    # A loss that is not finite was measured all the same.
    rows = report.rows[report.rows.value.notna() | (report.rows.task == PERPLEXITY)]
    shown = [_scores(report, task, rows[rows.task == task]) for task in report.scored]
    losses = rows[rows.task == PERPLEXITY]
    if len(losses):
        shown.append(_perplexities(report, losses))
    return shown


def compare(runs: Sequence[str]) -> list[Table]:
    """Return a table for each task, metric and text of losses with the rows of several ``runs``:
    directories that hold ``results.csv``, or whose ``evaluation`` does. Raise a UserError if one of
    them has no rows."""
    names = [Path(run).resolve().name for run in runs]
    names = names if len({*names}) == len(names) else list(runs)
    named = zip(names, map(_results, runs), strict=True)
    rows = pd.concat([rows.assign(model=f"{name}: " + rows.model) for name, rows in named])

    def cell(row: Any) -> Cell:
        show = percent if row.metric == "score" else "{:.3f}".format
        limits = "" if pd.isna(row.low) else f"{show(row.low)}–{show(row.high)}"
        return Cell(show(row.value), limits, best=row.value > 0 and row.value == row.best)

    shown = []
    units = {"score": ("in %", "max"), "loss": ("as loss in nats per token", "min")}
    rows = rows.dropna(subset="value")
    for (task, metric, text), of_task in rows.groupby(["task", "metric", "text"], sort=False):
        unit, best = units[metric]
        note = "With 95% intervals; bold: the best of a column."
        if text:
            note = f"{text}. {note}"
        of_task["best"] = of_task.groupby("length").value.transform(best)
        shown.append(_table(f"{task}, {unit}", note, of_task, cell))
    return shown


def _results(run: str) -> pd.DataFrame:
    """Return the rows of a run or an evaluation, with titles of tasks and methods, and what text a
    loss is measured on."""
    place = Path(run).expanduser()
    for path in (place / TABLE, place / "evaluation" / TABLE):
        rows = read_csv(path) if path.is_file() else pd.DataFrame()
        if len(rows):
            with expecting("the facts of a report", path.with_name(FACTS)):
                facts = json.loads(path.with_name(FACTS).read_bytes())
                environment, C = facts["environment"], facts["training_length"]
                text = f"Held-out text of corpus {environment['corpus']}, C = {C} tokens"
                titles = {"task": facts["tasks"], "method": facts["methods"] | {AS_IS: AS_IS}}
            return rows.replace(titles).assign(text=rows.metric.map({"loss": text}).fillna(""))
    raise UserError(f"runs: expected directories with rows in {TABLE}, got {run!r}")


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats per token, or infinity if it overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


def percent(fraction: float) -> str:
    """Return ``97.3`` for 0.973."""
    return f"{100 * fraction:.1f}"


def interval(row: Any) -> str:
    """Return ``92.4–99.1``, the interval of a row's rate in percent."""
    return f"{percent(row.low)}–{percent(row.high)}"


def rate(row: Any) -> str:
    """Return ``97.3% (92.4–99.1)``, the rate of a row with its interval."""
    return f"{percent(row.value)}% ({interval(row)})"


def factor_label(factor: float) -> str:
    """Return ``2×`` for 2.0, ``1.5×`` for 1.5 and ``0.781×`` for 100 of 128 tokens."""
    return f"{factor:.3g}×" if factor < 100 else f"{factor:g}×"


def legend(shown: Sequence[Table]) -> str:
    """Return the meaning of the marks in tables of a report."""
    rows = chain.from_iterable(table.rows for table in shown)
    cells = [*chain.from_iterable(row for _, row in rows)]
    known = [cell for cell in cells if cell is not None]
    parts = []
    if any(cell.interval for cell in known):
        parts.append("Scores are in %, with their 95% intervals.")
    if any(cell.mark for cell in known):
        parts.append(
            "↑ ↓ better or worse than the model without a method (a model without one: than the "
            "first model) on the same trials (exact sign test, p < 0.05, not corrected)."
        )
    if any(cell.best for cell in known):
        parts.append("Bold: the best of a column.")
    if len(known) < len(cells):
        parts.append(f"{MISSING} not measured.")
    return " ".join(parts)


def _scores(report: Report, task: str, scores: pd.DataFrame) -> Table:
    """Return the table of a task with scores, or of the mean over tasks."""
    marks = _marks(report, task)
    highest = scores.groupby("length").value.max()

    def cell(row: Any) -> Cell:
        mark = marks.get(((row.model, row.method), row.length), "")
        best = row.value > 0 and highest[row.length] - row.value <= ROUNDING
        return Cell(percent(row.value), interval(row), mark, best)

    if task == MEAN:
        note = (
            "Unweighted mean. Differences are tested on one score per text, its mean over the "
            "tasks with equally many texts."
        )
    else:
        trials = report.trials[(report.trials.task == task) & (report.trials.metric == "score")]
        cells = trials.groupby(["model", "method", "length"]).text.agg(["size", "nunique"])
        trials_in_cell, texts = _range(cells["size"]), _range(cells["nunique"])
        note = f"Trials in a cell: {trials_in_cell}, texts: {texts}."
    return _table(report.tasks[task], note, scores, cell, report.methods, report.trained)


def _range(counts: pd.Series) -> str:
    """Return ``256``, or ``128 to 256`` if counts differ."""
    least, most = counts.min(), counts.max()
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _marks(report: Report, task: str) -> dict[tuple[RowKey, int], str]:
    """Return ``↑``, ``↓`` or nothing by the sign test, for each row and length that is compared:
    with the same model as is or, for a model as is, with the first model as is."""
    scores = values_by_text(report, task)
    first = next(iter(report.rows.model), "")
    marks = {}
    for row in scores:
        model, method = row
        reference = (first if method == AS_IS else model), AS_IS
        if reference != row and reference in scores:
            pairs = scores[[row, reference]].dropna()
            for length, both in pairs.groupby("length"):
                marks[row, length] = sign_mark(both[row], both[reference])
    return marks


def values_by_text(report: Report, task: str) -> pd.DataFrame:
    """Return the independent scores or losses of a task, or of the mean over tasks: a row for each
    length and text, a column for each model and method."""
    tasks = averaged(report.trials) if task == MEAN else [task]
    return by_text(report.trials[report.trials.task.isin(tasks)]).pivot(
        index=["length", "texts", "text"], columns=["model", "method"], values="value"
    )


def _perplexities(report: Report, losses: pd.DataFrame) -> Table:
    """Return the table of perplexities, with intervals where a row is the mean of several seeds."""
    lowest = losses.groupby("length").value.min()

    def cell(row: Any) -> Cell:
        if math.isnan(row.value):
            return Cell("not finite")
        value = perplexity(row.value)
        digits = ".0e"
        if value < 100_000:
            digits = ".2f" if value < 100 else ".0f"
        limits = ""
        if row.model in report.seeds.values():
            low, high = perplexity(row.low), perplexity(row.high)
            limits = f"{low:{digits}}–{high:{digits}}"
        return Cell(f"{value:{digits}}", limits, best=row.value == lowest[row.length])

    note = (
        f"exp of the mean loss on the last {report.training_length:,} tokens of each held-out "
        "window (all tokens of shorter ones), the same at every length: longer ones add context."
    )
    title = report.tasks[PERPLEXITY]
    return _table(title, note, losses, cell, report.methods, report.trained)


def _table(
    title: str,
    note: str,
    rows: pd.DataFrame,
    cell: Callable[[Any], Cell],
    methods: Mapping[str, str] | None = None,
    trained: int | None = None,
) -> Table:
    """Return the table of ``rows``, of one task and metric.

    ``cell``: shows a row. ``methods``: titles by key. ``trained``: the length to mark. The rows of
    a model after its first are named by their method alone.
    """
    factors = rows.groupby("length").factor.unique()  # several if models differ in C
    marks = {trained: " (trained)"}
    columns = tuple(
        (f"{length} tokens", " or ".join(map(factor_label, of_length)) + marks.get(length, ""))
        for length, of_length in factors.items()
    )
    cells = {(row.model, row.method, row.length): cell(row) for row in rows.itertuples()}
    shown = []
    before = None
    for model, method in dict.fromkeys(key[:2] for key in cells):
        added = "" if method == AS_IS else f"+ {(methods or {}).get(method, method)}"
        name = added if added and model == before else f"{model} {added}".rstrip()
        shown.append((name, tuple(cells.get((model, method, length)) for length in factors.index)))
        before = model
    return Table(title, note, columns, tuple(shown))


def write_tables(shown: Sequence[Table], directory: Path) -> None:
    """Write each table as ``NUMBER.tex`` (for booktabs) and ``NUMBER.md``."""
    for number, table in enumerate(shown, 1):
        heads = ["", *(" ".join(column) for column in table.columns)]
        rows = [[name, *map(_plain, cells)] for name, cells in table.rows]
        grid = [heads, ["---", *["---:"] * len(table.columns)], *rows]
        lines = []
        for row in grid:
            without_bars = [cell.replace("|", "/") for cell in row]
            lines.append(f"| {' | '.join(without_bars)} |")
        caption = f"{table.title}. {table.note} {legend([table])}".rstrip()
        text = f"{caption}\n\n" + "\n".join(lines) + "\n"
        write_atomically(directory / f"{number}.md", text)
        frame = pd.DataFrame(rows, columns=[_latex(head) for head in heads]).map(_latex)
        columns = "l" + "r" * len(table.columns)
        latex = frame.to_latex(index=False, column_format=columns, caption=_latex(caption))
        write_atomically(directory / f"{number}.tex", latex)


def _plain(cell: Cell | None) -> str:
    """Return a cell in one line: ``97.3↑ (92.4–99.1)``, or ``**97.3**↑ (92.4–99.1)`` if best."""
    if cell is None:
        return MISSING
    value = f"**{cell.value}**" if cell.best else cell.value
    value += cell.mark
    return f"{value} ({cell.interval})" if cell.interval else value


_LATEX = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"↑": r"$\uparrow$", "↓": r"$\downarrow$", "×": r"$\times$", "–": "--", "·": r"$\cdot$"},
    **{"<": "$<$", ">": "$>$"},
}


def _latex(text: str) -> str:
    """Return text with LaTeX's special characters escaped, and ``**bold**`` text in bold."""
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", escaped)
