"""A length report and all its renderings as files of a directory."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from trainer.errors import UserError
from trainer.report.atomic import write_atomically
from trainer.report.length.figures import write_length_figures
from trainer.report.length.html import write_length_html
from trainer.report.length.latex import latex_tables
from trainer.report.length.text import csv_table, markdown_tables
from trainer.report.lengths import LengthReport


def write_length_report(report: LengthReport, directory: Path) -> None:
    """Write ``table.md``, ``table.tex``, ``table.csv``, ``figures/``, ``report.html`` and, when
    they are complete, ``report.json``; all of them depend on the report alone.

    Raises:
        OSError: as the file system does.
        TypeError: the settings or the environment hold something that JSON has no word for.
    """
    data = _json(report)
    write_atomically(directory / "table.md", markdown_tables(report))
    write_atomically(directory / "table.tex", latex_tables(report))
    write_atomically(directory / "table.csv", csv_table(report))
    figures = write_length_figures(report, directory / "figures")
    write_length_html(report, figures, directory / "report.html")
    write_atomically(directory / "report.json", data)


def read_length_report(path: Path) -> LengthReport:
    """The report of a ``report.json``. Raises ``UserError`` where it cannot be read as one."""
    try:
        return LengthReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"Cannot read the report {path}: {error.strerror}.") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the report"
        raise UserError(f"{path} is not a length report: {where}: {problem['msg']}.") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a length report: {error}.") from error


def _json(report: LengthReport) -> str:
    """Strict JSON with one cell a line, so that files can be searched and compared by lines."""
    data = report.to_dict()
    cells = [json.dumps(cell, ensure_ascii=False, allow_nan=False) for cell in data.pop("cells")]
    head = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
    return head + ',\n  "cells": [\n' + ",\n".join(cells) + "\n  ]\n}\n"
