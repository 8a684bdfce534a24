"""A section as one text, and how it is held against the text that it should be.

Of figures it says what is written on them and where, with the number and a sum of all that is drawn
in a panel; of rows the first, the last and sums of their columns; of numbers their names and sums.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib.collections import PathCollection

WHOLES = Path(__file__).parent / "wholes"
NUMBER = re.compile(r"[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?|\bnan\b")
"""In which processors may differ in the last digit that is shown."""


def check_whole(section, name):
    """Hold a section against the file of this name, numbers to half a percent. The files are
    written anew, to be read, where WRITE_WHOLES is set."""
    path, text = WHOLES / f"{name}.txt", "\n".join(told(section)) + "\n"
    if os.environ.get("WRITE_WHOLES"):
        path.write_text(text, encoding="utf-8")
    # Where lines are broken depends on the digits of their numbers.
    found, wanted = (" ".join(t.split()) for t in (text, path.read_text(encoding="utf-8")))
    assert NUMBER.sub("#", found) == NUMBER.sub("#", wanted)
    a, b = (np.array([_value(n) for n in NUMBER.findall(t)]) for t in (found, wanted))
    other = ~np.isclose(a, b, rtol=5e-3, atol=5e-5, equal_nan=True)
    assert not other.any(), [*zip(a[other], b[other], strict=True)]


def _value(number):
    return float(number.replace("−", "-").replace(",", ""))


def told(section):
    """The lines of a section."""
    yield from (section.key, section.title, *wrap(section.text, 96), *section.formula)
    yield from (section.source, "")
    for finding in section.findings:
        yield from wrap(f"- {finding}", 96)
    for grid in section.grids:
        yield from ("", *wrap(f"TABLE {grid.caption}", 96), _line(grid.header))
        yield from map(_line, grid.rows)
    for picture in section.pictures:
        yield from ("", *wrap(f"PICTURE {picture.name}: {picture.caption}", 96))
        yield from _figure(picture.figure)
        yield from (_line(picture.header), *_rows(picture.rows, len(picture.header)))
    yield from ("", "NUMBERS", *_numbers(section.numbers))


def _line(row):
    return " | ".join(map(_cell, row))


def _cell(value):
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        return str(value)
    return f"{value:.4g}"


def _filled(values):
    return np.ma.filled(np.ma.asarray(values, dtype=float), math.nan).ravel()


def _sum(values):
    """Of numbers, each times its place from 1 to 2, so that an order is noticed."""
    values = _filled(values)
    values = np.where(np.isinf(values), np.nan, values)
    places = np.linspace(1, 2, len(values))
    said = f"{len(values)}: {np.nanmean(places * values) if np.isfinite(values).any() else 0:.4g}"
    missing = np.isnan(values).sum()
    return said + (f" ({missing} missing)" if missing else "")


def _rows(rows, columns):
    rows = list(rows)
    assert all(len(row) == columns for row in rows)
    if len(rows) <= 4:
        yield from map(_line, rows)
        return
    yield from (_line(rows[0]), f"... {len(rows)} rows", _line(rows[-1]))
    for column in zip(*rows, strict=True):
        if all(isinstance(value, int | float | np.number) for value in column):
            yield f"    {_sum(column)}"
        else:
            found = dict.fromkeys(map(str, column))
            shown = [f"{name} x {sum(str(v) == name for v in column)}" for name in found]
            yield f"    {', '.join(shown[:8])}"


def _numbers(value, name=""):
    if isinstance(value, dict):
        for key, of in value.items():
            yield from _numbers(of, f"{name}.{key}")
        return
    try:
        numbers = np.array(value, dtype=float)
    except (TypeError, ValueError):
        yield f"{name} {value}" if isinstance(value, str) else f"{name} {_plain(value)}"
        return
    yield f"{name} {' x '.join(map(str, numbers.shape)) or 'one'}, {_sum(numbers)}"


def _plain(value):
    """Lists and words, their numbers to four digits."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_plain(of)}' for key, of in value.items())}}}"
    return _cell(value)


def _figure(figure):
    for axes in figure.axes:
        titles = [axes.get_title(loc) for loc in ("left", "center", "right")]
        said = [" ".join(filter(None, titles)), axes.get_xlabel(), axes.get_ylabel()]
        said += [f"log {s}" for s in "xy" if getattr(axes, f"get_{s}scale")() == "log"]
        said += [text.get_text() for text in axes.texts]
        if legend := axes.get_legend():
            said += [text.get_text() for text in legend.get_texts()]
        yield f"  [{' | '.join(filter(None, said))}] {_drawn(axes)}"
    for label in (figure._supxlabel, figure._supylabel):
        if label is not None:
            yield f"  {label.get_text()}"
    for legend in figure.legends:
        yield f"  legend {', '.join(text.get_text() for text in legend.get_texts())}"


def _drawn(axes):
    """The number of lines, clouds and images, and a sum of each."""
    found = []
    for line in axes.lines:
        mark = "" if line.get_marker() in (None, "None", "") else f" {line.get_marker()}"
        found.append(_sum(np.concatenate(line.get_data())) + mark)
    for one in [*axes.collections, *axes.images]:
        data = [] if one.get_array() is None else [one.get_array()]
        data += [one.get_offsets()] if isinstance(one, PathCollection) else []
        found.append(_sum(np.concatenate([_filled(values) for values in data] or [[]])))
    return "; ".join(found)
