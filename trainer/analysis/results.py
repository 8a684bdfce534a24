"""An analysis returns figures, and its numbers as rows of one table.

Put yours in a file that ``plugins`` names (CONTRIBUTING.md has it with a figure)::

    @analysis  # of trainer.workflows.analyze
    def key_norms(target):
        norms = read(target, lambda heads: {"key_norm": heads.k.norm(dim=-1)})
        rows = tidy({"key_norm": norms["key_norm"].mean(axis=-1)}, "layer", "head")
        return results("key_norms", "Norms of keys", target.name, [], [rows])

What it reads is in :mod:`trainer.analysis.target`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trainer.analysis.target import Target
from trainer.plotting import Plot

COLUMNS = ("topic", "model", "variant", "layer", "head", "pair", "length", "metric", "value")
"""Columns of results. ``variant``: the state of queries and keys, the side, or the method.
``length``: tokens of the prefix, position or distance. Cells that mean nothing are empty."""


class Results(NamedTuple):
    """Figures of an analysis, and its numbers as rows with the columns :data:`COLUMNS`."""

    key: str
    title: str
    plots: list[Plot]
    rows: pd.DataFrame


def results(
    key: str, title: str, model: str, plots: list[Plot], tables: Sequence[pd.DataFrame]
) -> Results:
    """Return results with the rows of all tables, see :func:`tidy`; rows that name no model are of
    ``model``."""
    rows = pd.concat(tables).reindex(columns=COLUMNS)
    rows["topic"], rows["model"] = key, rows["model"].fillna(model)
    return Results(key, title, plots, rows)


def tidy(
    values: Mapping[str, Any],
    *axes: str,
    places: Mapping[str, Sequence[Any]] | None = None,
    **constants: Any,
) -> pd.DataFrame:
    """Return a row for each number of arrays (or single numbers), by the metric's name.

    ``axes``: column of every axis, with its index or ``places[axis][index]`` as value.
    ``constants``: other columns. NaN, for a head or a pair that a layer does not have, is left
    out.
    """
    tables = []
    places = places or {}
    for metric, array in values.items():
        shape = np.shape(array)
        indices = np.indices(shape).reshape(len(axes), math.prod(shape))
        table: dict[str, Any] = dict(constants)
        for axis, size, index in zip(axes, shape, indices, strict=True):
            table[axis] = np.asarray(places.get(axis, range(size)))[index]
        tables.append(pd.DataFrame({**table, "metric": metric, "value": np.ravel(array)}))
    return pd.concat(tables, ignore_index=True).dropna(subset="value")


def summary(rows: pd.DataFrame, trained: int) -> pd.DataFrame:
    """Return means, 10% and 90% quantiles and counts over layers, heads and pairs.

    There is a row for each model, variant and metric, at the longest length up to ``trained`` and
    at the longest of all where lengths were measured.
    """
    groups = ["model", "variant", "metric"]
    rows = rows.fillna({"variant": "", "model": ""}).astype({"length": float})
    rows["within"] = rows.length.where(rows.length <= trained)
    longest = rows.groupby(groups)[["within", "length"]].transform("max")
    is_shown = rows.length.isna() | (rows.length == longest.within)
    shown = rows[is_shown | (rows.length == longest.length)]
    values = shown.groupby([*groups, "length"], dropna=False, sort=False)["value"]
    return values.agg(
        mean="mean", low=lambda v: v.quantile(0.1), high=lambda v: v.quantile(0.9), n="count"
    ).reset_index()


Variants = dict[str, tuple[str, int]]
"""Label and style number in figures, by variant."""


def variants(target: Target) -> Variants:
    """Return ``plain`` and ``rotated``, or only ``rotated`` if no head rotates."""
    if target.rotates:
        return {"plain": ("before rotation", 2), "rotated": ("after rotation", 4)}
    return {"rotated": ("as projected, no rotation", 1)}
