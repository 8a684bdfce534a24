"""Analyses of a model as files of a directory: figures with their numbers, and one HTML page that
opens anywhere: no network, no scripts, figures inside."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.atomic import write_atomically
from trainer.report.geometry.glance import glance
from trainer.report.geometry.section import Picture, Section
from trainer.report.plotting import WIDTH, paper_style
from trainer.report.rendering import base64, csv_text, render
from trainer.report.saving import save
from trainer.stopping import partial_directory

WIDEST = 52  # rem, of a figure as wide as a text


@dataclass(frozen=True)
class GeometryReport:
    """What was analysed and what came of it.

    ``texts`` of ``length`` tokens were read. ``notes``: what was left out and why. ``settings`` and
    ``environment``: plain values. ``made``: when, by which command and program and of what, in
    words by their terms.
    """

    name: str
    training_length: int
    length: int
    texts: int
    encoding: str
    sections: Sequence[Section]
    notes: Sequence[str] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)


def write_geometry_report(report: GeometryReport, directory: Path) -> Path:
    """Write ``KEY/NAME.svg``, ``.png`` and ``.csv`` of every figure, ``KEY/numbers.json`` of every
    section, and ``report.html``; return its path. They take the place of older ones together, when
    all are there.

    Raises:
        OSError: as the file system does.
    """
    page, directory = directory / "report.html", directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with partial_directory(directory) as partial:
        _write(report, partial)
        directory.mkdir(exist_ok=True)
        for made in sorted(partial.iterdir()):
            place = directory / made.name
            if place.is_dir():
                shutil.rmtree(place)
            made.replace(place)
    return page


def _write(report: GeometryReport, directory: Path) -> None:
    shown = []
    for section in report.sections:
        place = directory / section.key
        shown.append([_write_picture(picture, place) for picture in section.pictures])
        numbers = {"training_length": report.training_length} | section.numbers
        write_atomically(place / "numbers.json", _json(numbers))
    text = render(
        "geometry.html.j2",
        {"number": _number, "thousands": lambda number: f"{number:,}"},
        report=report,
        shown=list(zip(report.sections, shown, strict=True)),
        glance=glance([section.numbers for section in report.sections]),
        factor=report.length / report.training_length,
    )
    write_atomically(directory / "report.html", text)


def _write_picture(picture: Picture, place: Path) -> dict[str, str]:
    """Write a figure's three files; return what the page shows."""
    stem = place / picture.name
    with paper_style():
        svg = save(picture.figure, stem)
    rows = [[f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in picture.rows]
    write_atomically(stem.with_suffix(".csv"), csv_text(picture.header, rows))
    return {
        "source": f"data:image/svg+xml;base64,{base64(svg)}",
        "caption": picture.caption,
        "csv": f"{place.name}/{picture.name}.csv",
        "width": f"{min(picture.figure.get_figwidth() / WIDTH, 1) * WIDEST:.1f}rem",
        "alt": picture.caption.split(". ")[0],
    }


def _json(numbers: dict[str, Any]) -> str:
    """Strict JSON, a key a line; what is no number is null."""
    words = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    lines = [f"  {words(key)}: {words(_strict(value))}" for key, value in numbers.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _strict(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) else "·"
    return f"{value:,}" if isinstance(value, int) else str(value)
