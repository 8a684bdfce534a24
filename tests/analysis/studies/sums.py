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

    With WRITE_SUMS set, the file is written anew, to be read.
    """
    path, found = FILES / f"{name}.json", {one.key: _sums(one) for one in sections}
    if os.environ.get("WRITE_SUMS"):
        path.write_text(_lines(found), encoding="utf-8")
    found, wanted = (dict(_flat(of)) for of in (found, json.loads(path.read_text("utf-8"))))
    assert list(found) == list(wanted)
    assert found == pytest.approx(wanted, rel=5e-3, abs=5e-5, nan_ok=True)


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
    found = (float(n.replace("−", "-").replace(",", "")) for n in NUMBER.findall(text))
    return [float(f"{value:.4g}") for value in found]


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
    """Sum lines, points and images; reference lines and legends are a matter of taste."""
    data = [np.concatenate(line.get_data()) for line in axes.lines if len(line.get_xdata()) > 2]
    data += [image.get_array().ravel() for image in axes.images]
    for one in axes.collections:
        if isinstance(one, PathCollection):
            data.append(one.get_offsets().ravel())
    return _sum(np.ma.concatenate(data)) if data else []


def _of_values(value):
    if isinstance(value, dict):
        return {key: _of_values(of) for key, of in value.items()}
    try:
        return _sum(np.array(value, dtype=float))
    except (TypeError, ValueError):
        return _numbers(str(value))


def _lines(found):
    """Return JSON with a line for each finding, table, picture and number."""
    text = json.dumps(found, indent=1, ensure_ascii=False)
    inner = re.compile(r"\n {4,}|\n {3}(?=[\]}])")
    return re.sub(r",(?=\S)", ", ", inner.sub("", text)) + "\n"


def _flat(value, name=""):
    """Yield every number with the path to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, of in items:
        if isinstance(of, dict | list):
            yield from _flat(of, f"{name}.{key}")
        else:
            yield f"{name}.{key}", of
