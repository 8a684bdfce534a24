"""Base of all analyses: model and text, one shared forward pass, figures and rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from trainer.analysis.capture import Heads, NeedlePrompt, capture
from trainer.config import USUAL, AttenuationSettings, NeedleSettings, ShortTime
from trainer.model.language_model import LanguageModel
from trainer.plotting.style import Plot

COLUMNS = (*("topic", "model", "variant", "layer", "head", "pair", "length", "metric", "value"),)
"""Columns of results. ``variant``: the state of queries and keys, the side, or the method.
``length``: tokens of the prefix, position or distance. Cells that mean nothing are empty."""


@dataclass(frozen=True)
class Target:
    """A model and the text that it reads.

    ``ids``: ``[B, T]`` tokens on the model's device, each row after a beginning-of-text token.
    ``chosen``: (layer, query head) pairs that figures of single heads show; empty: the analysis
    chooses. ``prompt``: needle prompts within the training length, if there are any. ``pairs``:
    rotary pairs that figures of single pairs show; empty: all, or the analysis chooses. ``frames``:
    frames of the short-time transform. ``prefixes``: shorter lengths at which frequency entropies
    are measured too. ``attenuation``: settings of the attenuation of pairs; ``choice`` ``[B, T]``:
    texts whose entropies select these pairs (None: ``ids``). ``needle``: how heads of extreme
    matrix entropy are shown; ``question``: a prompt as long as a text (None: copy the end of a
    text).
    """

    name: str
    model: LanguageModel
    ids: Tensor
    chosen: tuple[tuple[int, int], ...] = ()
    prompt: NeedlePrompt | None = None
    pairs: tuple[int, ...] = ()
    frames: ShortTime = USUAL
    prefixes: tuple[int, ...] = ()
    attenuation: AttenuationSettings = field(default_factory=AttenuationSettings)
    choice: Tensor | None = None
    needle: NeedleSettings = field(default_factory=NeedleSettings)
    question: NeedlePrompt | None = None

    @property
    def length(self) -> int:
        """Number of tokens of a text."""
        return self.ids.shape[1]

    @property
    def rotates(self) -> bool:
        """Whether any head rotates."""
        return self.model.layout.rotates

    @property
    def training_length(self) -> int:
        """The model's training length C."""
        return self.model.layout.training_length

    @property
    def prefix(self) -> Tensor | None:
        """First C tokens of the texts if the model reads them differently without the later ones,
        because its temperatures or frequencies follow the length."""
        C, layout = self.training_length, self.model.layout
        differs = self.length > C and layout.at(C) != layout.at(self.length)
        return self.ids[:, :C] if differs else None


class Results(NamedTuple):
    """Figures of an analysis, and its numbers as rows with the columns :data:`COLUMNS`."""

    key: str
    title: str
    plots: list[Plot]
    rows: pd.DataFrame


class Topic:
    """One analysis of one model. A subclass sees every layer of the shared pass, once.

    ``shortest``: number of tokens that it needs.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    shortest: ClassVar[int] = 1

    def __init__(self, target: Target) -> None:
        self.target = target

    @classmethod
    def problem(cls, target: Target) -> str | None:
        """Return why the target cannot be analysed, or None."""
        if target.length >= cls.shortest:
            return None
        return f"expected a text of {cls.shortest} tokens or more, got {target.length}"

    def on_layer(self, heads: Heads) -> None:
        """Process one layer in the shared pass; do not keep its tensors."""

    def on_prefix(self, heads: Heads) -> None:
        """Process one layer in a second pass, over the target's ``prefix``, if it has one.

        Everything measured within the training length must come from this pass, because the first
        one applies the temperatures and frequencies of the whole text.
        """

    def finish(self) -> None:
        """Compute what figures and rows need after the pass; may run the model again."""

    def plots(self) -> list[Plot]:
        """Draw the figures."""
        raise NotImplementedError

    def rows(self) -> pd.DataFrame:
        """Return the numbers, see :func:`tidy`."""
        raise NotImplementedError

    def results(self) -> Results:
        """Return figures and rows after the pass."""
        self.finish()
        return finished(self.key, self.title, self.plots(), self.rows(), self.target.name)


def finished(key: str, title: str, plots: list[Plot], rows: pd.DataFrame, model: str) -> Results:
    """Return results with complete columns; rows that name no model are of ``model``."""
    rows = rows.reindex(columns=COLUMNS)
    rows["topic"], rows["model"] = key, rows["model"].fillna(model)
    return Results(key, title, plots, rows)


@torch.no_grad()
def run(
    topics: Sequence[Topic], target: Target, done: Callable[[], object] = lambda: None
) -> list[Results]:
    """Read the text once for all topics, and its prefix if that is read differently.

    ``done``: called when a topic has read a layer or has its results.
    """

    def on_layer(heads: Heads) -> None:
        for topic in topics:
            topic.on_layer(heads)
            done()

    def on_prefix(heads: Heads) -> None:
        for topic in topics:
            topic.on_prefix(heads)

    capture(target.model, target.ids, on_layer)
    if target.prefix is not None:
        capture(target.model, target.prefix, on_prefix)
    results = []
    for topic in topics:
        results.append(topic.results())
        done()
    return results


def tidy(
    values: Mapping[str, Any],
    *axes: str,
    places: Mapping[str, Sequence[Any]] | None = None,
    **constants: Any,
) -> pd.DataFrame:
    """Return a row for each number of arrays (or numbers) of one shape, by the metric's name.

    ``axes``: column of every axis, with its index or ``places[axis][index]`` as value.
    ``constants``: other columns. NaN, for a head or a pair that a layer does not have, is left
    out.
    """
    shape = np.shape(next(iter(values.values())))
    size = math.prod(shape)
    indices = dict(zip(axes, np.indices(shape).reshape(len(axes), size), strict=True))
    columns = {
        axis: np.asarray((places or {}).get(axis, range(shape[number])))[indices[axis]]
        for number, axis in enumerate(axes)
    }
    tables = [
        pd.DataFrame({**constants, **columns, "metric": name, "value": np.ravel(array)})
        for name, array in values.items()
    ]
    return pd.concat(tables, ignore_index=True).dropna(subset="value")


def summary(rows: pd.DataFrame, trained: int) -> pd.DataFrame:
    """Return means, 10% and 90% quantiles and counts over layers, heads and pairs.

    There is a row for each model, variant and metric, at the longest length up to ``trained`` and
    at the longest of all where lengths were measured.
    """
    groups = ["model", "variant", "metric"]
    length = rows["length"].astype(float)
    keys = [rows[column].fillna("") for column in groups]
    within = length.where(length <= trained).groupby(keys).transform("max")
    beyond = length.groupby(keys).transform("max")
    shown = rows[length.isna() | (length == within) | (length == beyond)]
    table = shown.fillna({"variant": "", "model": ""}).groupby(
        [*groups, "length"], dropna=False, sort=False
    )["value"]
    aggregated = table.agg(
        mean="mean", low=lambda v: v.quantile(0.1), high=lambda v: v.quantile(0.9), n="count"
    )
    return aggregated.reset_index()


Versions = dict[str, tuple[str, int]]
"""Label and style number in figures, by variant."""


def versions(target: Target, *, scores: bool = False) -> Versions:
    """Return ``plain`` and ``rotated``, or only ``rotated`` if the encoding changes at most a
    factor.

    ``scores``: also tell them apart for an ALiBi bias on the scores.
    """
    if target.rotates:
        return {"plain": ("before rotation", 2), "rotated": ("after rotation", 4)}
    if scores and any(spectrum.alibi for spectrum in target.model.layout.spectra):
        return {"plain": ("without the bias", 2), "rotated": ("with ALiBi's bias", 4)}
    return {"rotated": ("as projected, no rotation", 1)}
