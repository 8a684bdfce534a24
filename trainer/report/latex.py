"""The tables of a report for a paper; they need the package booktabs alone."""

from __future__ import annotations

import re
from itertools import groupby

from trainer.report.results import Report
from trainer.report.table import MISSING, Entry, Table, tables

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "×": r"$\times$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "–": "--",
    "\n": " ",
}


def latex_tables(report: Report) -> str:
    """A ``table`` for each, labelled ``tab:<key>``."""
    head = "% Needs \\usepackage{booktabs}.\n"
    return head + "\n".join(_table(table) for table in tables(report))


def escaped(text: str) -> str:
    """Text that LaTeX sets as it stands."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _table(table: Table) -> str:
    count = len(table.columns)
    tops = (" & ".join(escaped(column[line]) for column in table.columns) for line in (0, 1))
    models = [
        "".join(
            f"{escaped(model) if i == 0 else ''} & {escaped(method)} & "
            f"{' & '.join(map(_cell, entries))} \\\\\n"
            for i, (_, method, entries) in enumerate(rows)
        )
        for model, rows in groupby(table.rows, key=lambda row: row[0])
    ]
    return (
        "\\begin{table}\n\\centering\\footnotesize\\setlength{\\tabcolsep}{4pt}\n"
        f"\\caption{{{escaped(f'{table.title}. {table.note} {table.legend}')}}}\n"
        f"\\label{{tab:{re.sub('[^A-Za-z0-9-]+', '-', table.key)}}}\n"
        f"\\begin{{tabular}}{{ll{'r' * count}}}\n\\toprule\n"
        f" & & {next(tops)} \\\\\nmodel & method & {next(tops)} \\\\\n\\midrule\n"
        + "\\midrule\n".join(models)
        + "\\bottomrule\n\\end{tabular}\n\\end{table}\n"
    )


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return escaped(MISSING)
    value = f"\\textbf{{{escaped(entry.value)}}}" if entry.best else escaped(entry.value)
    interval = f" {{\\scriptsize ({escaped(entry.interval)})}}" if entry.interval else ""
    mark = {"↑": "^{\\uparrow}", "↓": "^{\\downarrow}"}.get(entry.mark)
    loss = f" / {escaped(entry.loss)}" if entry.loss else ""
    return f"{value}{interval}{f'${mark}$' if mark else ''}{loss}"
