"""Sums of everything that a section says, shows and stores, held against those of a file.

Sentences and tables are reduced to their numbers, columns and arrays to sums. Wording, captions and
looks may change without failing a test.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PathCollection

FILES = Path(__file__).parent / "sums"
NUMBER = re.compile(r"(?<![A-Za-z])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def check_sections(sections, name):
    """Compare sections with the file of this name, numbers to half a percent.

    If WRITE_SUMS is set, the file is written anew, to be read.
    """
    for section in sections:
        json.dumps(section.numbers, allow_nan=False)
        names = [picture.name for picture in section.pictures]
        assert len(set(names)) == len(names)
    path, sums = FILES / f"{name}.json", {section.key: _sums(section) for section in sections}
    if os.environ.get("WRITE_SUMS"):
        path.write_text(_lines(sums), encoding="utf-8")
    flat, expected = (dict(_flat(tree)) for tree in (sums, json.loads(path.read_text("utf-8"))))
    assert list(flat) == list(expected)
    assert flat == pytest.approx(expected, rel=5e-3, abs=5e-5, nan_ok=True)


def _sums(section):
    pictures = {}
    for picture in section.pictures:
        rows = list(picture.rows)
        assert picture.caption
        assert rows
        assert all(len(row) == len(picture.header) for row in rows)
        columns = zip(picture.header, zip(*rows, strict=True), strict=True)
        pictures[picture.name] = {name: _of_column(column) for name, column in columns}
        pictures[picture.name]["drawn"] = [_of_panel(axes) for axes in picture.figure.axes]
    return {
        "findings": [_numbers(finding) for finding in section.findings],
        "tables": [[_numbers(" ".join(map(str, row))) for row in t.rows] for t in section.grids],
        "pictures": pictures,
        "numbers": _of_values(section.numbers),
    }


def _numbers(text):
    values = (float(n.replace("−", "-").replace(",", "")) for n in NUMBER.findall(text))
    return [float(f"{value:.4g}") for value in values]


def _sum(values):
    """Return the number of finite values and their mean, each weighted by its place from 1 to 2 so
    that a change of order shows."""
    values = np.ma.filled(np.ma.asarray(values, dtype=float), math.nan).ravel()
    weighted = (values * np.linspace(1, 2, len(values)))[np.isfinite(values)]
    return [len(weighted), float(f"{weighted.mean():.4g}") if len(weighted) else 0.0]


def _of_column(column):
    if all(isinstance(value, int | float | np.number) for value in column):
        return _sum(column)
    return _sum([list(dict.fromkeys(column)).index(value) for value in column])


def _of_panel(axes):
    """Sum lines, points, bands and images, and note the logarithmic axes: 1 for x, 2 for y.

    Reference lines and legends are a matter of taste.
    """
    data = [np.concatenate(line.get_data()) for line in axes.lines if len(line.get_xdata()) > 2]
    data += [image.get_array().ravel() for image in axes.images]
    for drawn in axes.collections:
        if isinstance(drawn, PathCollection):
            data.append(drawn.get_offsets().ravel())
        else:
            data += [path.vertices.ravel() for path in drawn.get_paths()]
    logarithmic = (axes.get_xscale() == "log") + 2 * (axes.get_yscale() == "log")
    return [*_sum(np.ma.concatenate(data)), logarithmic] if data else []


def _of_values(value):
    if isinstance(value, dict):
        return {key: _of_values(inner) for key, inner in value.items()}
    try:
        return _sum(np.array(value, dtype=float))
    except (TypeError, ValueError):
        return _numbers(str(value))


def _lines(sums):
    """Return JSON with a line for each finding, table, picture and number."""
    text = json.dumps(sums, indent=1, ensure_ascii=False)
    inner = re.compile(r"\n {4,}|\n {3}(?=[\]}])")
    return re.sub(r",(?=\S)", ", ", inner.sub("", text)) + "\n"


def _flat(value, name=""):
    """Yield every number with the path to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            yield from _flat(inner, f"{name}.{key}")
        else:
            yield f"{name}.{key}", inner
