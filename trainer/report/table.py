"""The results as tables: for a terminal of 100 columns and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import batched

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.report.results import Cell, Report
from trainer.report.summary import VERDICTS, factor_label, percent, summary

WIDTH = 100
_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "yellow")}


def terminal_table(report: Report) -> RenderableType:
    pass
