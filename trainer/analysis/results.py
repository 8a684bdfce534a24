"""An analysis returns figures, and its numbers as rows of one table.

Yours is a function with :func:`analysis` in a file that ``plugins`` names: CONTRIBUTING.md has one.
What it reads is in :mod:`trainer.analysis.target`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trainer.analysis.target import Target
from trainer.common.registry import Registry, check_call
from trainer.plotting import Plot

COLUMNS = ("topic", "model", "variant", "layer", "head", "pair", "length", "metric", "value")
"""Columns of results. ``variant``: the state of queries and keys, the side, or the method.
``length``: tokens of the prefix, position or distance. Cells that mean nothing are empty."""


class Findings(NamedTuple):
    """Figures of an analysis, its numbers (:func:`tidy`), and sentences on what was left out."""

    plots: list[Plot]
    tables: list[pd.DataFrame]
    notes: Sequence[str] = ()


class Results(NamedTuple):
    """Findings of an analysis for its page; ``rows``: all numbers under :data:`COLUMNS`."""

    key: str
    title: str
    plots: list[Plot]
    rows: pd.DataFrame
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Topic:
    """A registered analysis: ``function`` takes ``models`` targets, the later model last, and
    ``analysis.arguments`` by keyword. ``kind``: the value of ``analysis.kind`` that includes it."""

    name: str
    title: str
    function: Callable[..., Findings]
    models: int
    kind: str

    def __call__(self, /, *targets: Target, **arguments: Any) -> Results:
        """Make the analysis; rows that name no model are of the last one."""
        check_call(f"analysis.arguments: {self.name}", self.function, *targets, **arguments)
        plots, tables, notes = Findings(*self.function(*targets, **arguments))
        rows = pd.concat(tables) if tables else pd.DataFrame()  # figures alone
        rows = rows.reindex(columns=COLUMNS).astype({"model": object, "variant": object})
        rows["topic"] = self.name
        rows["model"] = rows["model"].fillna(targets[-1].name)
        return Results(self.name, self.title, plots, rows, notes)


TOPICS = Registry[Topic]("analysis")
"""Analyses by name, those of the user's plugins included."""


def analysis(
    name: str, title: str, *, models: int = 1, kind: str | None = None
) -> Callable[[Callable[..., Findings]], Topic]:
    """Register a function as an analysis, see :class:`Topic`; ``title``: heading on the page."""

    def register(function: Callable[..., Findings]) -> Topic:
        topic = Topic(name, title, function, models, kind or name)
        TOPICS.add(name, topic, function)
        return topic

    return register


def kinds() -> list[str]:
    """Return the values of ``analysis.kind``."""
    return ["all", *sorted({topic.kind for topic in TOPICS.values()})]


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
    """Return means, medians, 10% and 90% quantiles and counts over layers, heads and pairs, for
    each model, variant and metric, at the longest length up to ``trained`` and at the longest."""
    groups = ["model", "variant", "metric"]
    rows = rows.fillna({"variant": "", "model": ""}).astype({"length": float})
    rows["within"] = rows.length.where(rows.length <= trained)
    longest = rows.groupby(groups)[["within", "length"]].transform("max")
    is_shown = rows.length.isna() | (rows.length == longest.within)
    shown = rows[is_shown | (rows.length == longest.length)]
    values = shown.groupby([*groups, "length"], dropna=False, sort=False)["value"]
    return values.agg(
        mean="mean",
        median="median",
        low=lambda v: v.quantile(0.1),
        high=lambda v: v.quantile(0.9),
        n="count",
    ).reset_index()


Variants = dict[str, tuple[str, int]]
"""Label and style number in figures, by variant."""


def variants(target: Target) -> Variants:
    """Return ``plain`` and ``rotated``, or only ``rotated`` if no head rotates."""
    if target.model.layout.rotates:
        return {"plain": ("before rotation", 2), "rotated": ("after rotation", 4)}
    return {"rotated": ("as projected, no rotation", 1)}
