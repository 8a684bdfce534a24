"""Base of all analyses: model and text, figures and rows, and arrays that analyses share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from trainer.analysis.attention import Array, NeedlePrompt
from trainer.config import AnalysisConfig
from trainer.model.language_model import LanguageModel
from trainer.plotting.style import Plot

COLUMNS = (*("topic", "model", "variant", "layer", "head", "pair", "length", "metric", "value"),)
"""Columns of results. ``variant``: the state of queries and keys, the side, or the method.
``length``: tokens of the prefix, position or distance. Cells that mean nothing are empty."""


@dataclass(frozen=True)
class Target:
    """A model and the text that it reads.

    ``ids``: ``[B, T]`` tokens on the model's device, each row after a beginning-of-text token.
    ``config``: which heads, pairs and lengths are shown, and settings of single analyses.
    ``prompt``: needle prompts within the training length, if there are any; ``question``: one as
    long as a text (None: copy the end of a text). ``choice`` ``[B, T]``: texts whose entropies
    select the pairs to attenuate (None: ``ids``).
    """

    name: str
    model: LanguageModel
    ids: Tensor
    config: AnalysisConfig = field(default_factory=AnalysisConfig)
    prompt: NeedlePrompt | None = None
    question: NeedlePrompt | None = None
    choice: Tensor | None = None

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


class Topic(ABC):
    """One analysis of one model: measures, draws figures and makes rows.

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

    def measure(self) -> None:  # noqa: B027  synthetic spectra read no text
        """Read the text, see :func:`~trainer.analysis.attention.capture`, and compute what figures
        and rows need.

        Everything measured within the training length must come from a pass over the target's
        ``prefix``, if it has one: a longer text has other temperatures and frequencies.
        """

    @abstractmethod
    def plots(self) -> list[Plot]:
        """Draw the figures."""

    @abstractmethod
    def rows(self) -> pd.DataFrame:
        """Return the numbers, see :func:`tidy`."""

    @torch.no_grad()
    def results(self) -> Results:
        """Measure; return figures and rows."""
        self.measure()
        return finished(self.key, self.title, self.plots(), self.rows(), self.target.name)


def finished(key: str, title: str, plots: list[Plot], rows: pd.DataFrame, model: str) -> Results:
    """Return results with complete columns; rows that name no model are of ``model``."""
    rows = rows.reindex(columns=COLUMNS)
    rows["topic"], rows["model"] = key, rows["model"].fillna(model)
    return Results(key, title, plots, rows)


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


def stacked(
    layers: Sequence[Mapping[str, Tensor]], within: Sequence[Mapping[str, Tensor]] = ()
) -> dict[str, Array]:
    """Return means over texts ``[layers, ...]``, float64, from the values ``[B, ...]`` of every
    layer.

    ``within``: values of the same texts' first tokens, read without the later ones. They replace
    the first entries of the last axis.
    """
    means = {
        name: np.stack([layer[name].double().mean(dim=0).cpu().numpy() for layer in layers])
        for name in layers[0]
    }
    for name, values in (stacked(within) if within else {}).items():
        means[name][..., : values.shape[-1]] = values
    return means


def prefix_lengths(length: int) -> list[int]:
    """Return 32, 64, 128 and so on below ``length``, and ``length`` itself."""
    lengths = []
    n = 32
    while n < length:
        lengths.append(n)
        n *= 2
    return [*lengths, length]


def position_edges(length: int, per_octave: int = 16) -> list[int]:
    """Return the edges of buckets of positions.

    The first ``per_octave`` positions have a bucket each; after that, every doubling of the
    position has ``per_octave`` buckets. The first key stays alone, and a long text stays a short
    list.
    """
    edges = list(range(min(per_octave, length) + 1))
    step = 1
    while edges[-1] < length:
        edge = round(per_octave * 2 ** (step / per_octave))
        if edge > edges[-1]:
            edges.append(min(edge, length))
        step += 1
    return edges


def bucket_means(values: Tensor, edges: list[int]) -> Tensor:
    """Return the means ``[..., len(edges) - 1]`` of ``values`` ``[..., T]`` between the edges,
    float64."""
    bounds = torch.tensor(edges, device=values.device)
    sums = torch.nn.functional.pad(values.double().cumsum(dim=-1), (1, 0))[..., bounds]
    return sums.diff(dim=-1) / bounds.diff()
