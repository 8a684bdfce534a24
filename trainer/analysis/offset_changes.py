"""Rotary offset features of a model and its extension (Rotary Offset Features, App. C, Fig. 15 and
16)."""

from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from trainer.analysis.attention import capture
from trainer.analysis.frequency_entropy import PAIR_INDEX
from trainer.analysis.offset_features import (
    PLACE,
    angle_axis,
    mark_upper_bound,
    offset_features,
    pair_rows,
    points_by,
    summary,
)
from trainer.analysis.results import Findings, analysis, tidy
from trainer.analysis.target import NotApplicableError, Target
from trainer.plotting import GREY, Grid, Panel, Plot, draw

COMPARED = [*PLACE, "pairs"]
"""What equal pairs share: among more pairs of a head, a pair has other channels."""


@analysis(
    "offset_changes", "Rotary offset features of two models", models=2, kind="offset_features"
)
def offset_changes(before: Target, after: Target) -> Findings:
    """Compare two models that read the same text, up to the shorter training length (App. C, Fig.
    15 and 16)."""
    if not (before.model.layout.rotates and after.model.layout.rotates):
        raise NotApplicableError("compare: expected models that rotate")
    length = min(before.length, before.training_length, after.training_length)

    def read(target: Target) -> pd.DataFrame:
        features = partial(offset_features, context_length=target.context_length)
        layers = capture(target.model, target.ids[:, :length], features)
        table = pd.concat(layers, ignore_index=True)
        return table.assign(pairs=table.groupby(["layer", "head"]).pair.transform("size"))

    by_name = {target.name: read(target) for target in (before, after)}
    tables = [
        tidy(summary(features), variant=f"bounds of {name}", model=name)
        for name, features in by_name.items()
    ]
    plots: list[Plot] = []
    notes = []
    was, now = by_name.values()
    of_both = was[COMPARED].merge(now[COMPARED])
    shapes = set()
    for target in (before, after):
        config = target.model.config
        shapes.add((config.num_hidden_layers, config.num_attention_heads, config.head_size))
    if len(of_both) and len(shapes) == 1:
        common = {before.name: of_both.merge(was), after.name: of_both.merge(now)}
        was, now = common.values()
        plots = [changes_by_pair(common), changes_of_pairs(common, after.config.pairs)]
        crossed = now.assign(possible=was.possible, lower_bound=was.lower_bound)
        tables.append(tidy(summary(crossed), variant=f"bounds of {before.name}", model=after.name))
        for name, features in common.items():
            tables.append(pair_rows(features[[*PLACE, "key_radius", "angle"]]).assign(model=name))
    else:
        notes.append("No figures: the models differ in their layers, heads or pairs.")
    tables = [table.assign(length=length) for table in tables]
    return Findings(plots, tables, notes)


def changes_by_pair(by_name: Mapping[str, pd.DataFrame]) -> Plot:
    """Draw the change of radii, a point for each head, coloured by layer (Fig. 16)."""
    (first, was), (second, now) = by_name.items()
    # Layers side by side within the width of a pair.
    beside = 0.6 * (was.layer / max(int(was.layer.max()), 1) - 0.5)
    table = was.assign(change=now.key_radius - was.key_radius, x=was.pair + beside)

    def prepare(axes: Axes) -> None:
        axes.set_xlim(-0.6, was.pair.max() + 0.6)
        axes.axhline(0, color=GREY, linewidth=0.6)
        axes.locator_params(axis="x", integer=True)
        mark_upper_bound(axes, was, f"upper bound of {first}")
        mark_upper_bound(axes, now, f"upper bound of {second}", ":")

    y = "change of the radius"
    panel = points_by(table, "x", "change", "layer", x=PAIR_INDEX, y=y, prepare=prepare)
    return Plot(
        "offset_changes_by_pair",
        draw([panel], Grid(height=2.0), index="layer"),
        f"From {first} to {second}: change of the radius of every head's mean keys (Rotary Offset "
        "Features, Fig. 16).",
    )


def changes_of_pairs(by_name: Mapping[str, pd.DataFrame], chosen: Sequence[int]) -> Plot:
    """Draw radius and angle of single pairs in every head of both models (Fig. 15).

    Without a chosen pair: the two whose mean radius shrank and grew most, among those under the
    upper bound in the earlier model if there are any.
    """
    was, now = by_name.values()
    shown = [pair for pair in chosen if pair in set(was.pair)]
    if not shown:
        among = was.possible if was.possible.any() else was.pair >= 0
        change = (now.key_radius - was.key_radius)[among].groupby(was.pair).mean()
        shown = sorted({change.idxmin(), change.idxmax()})

    def prepare(axes: Axes) -> None:
        angle_axis(axes)
        axes.set_xlim(left=0)

    panels = []
    for pair in shown:
        points = {}
        bounds = []
        for name, features in by_name.items():
            table = features[features.pair == pair]
            points[name] = table[["key_radius", "angle"]].to_numpy()
            if table.possible.any():
                bound = table.lower_bound[table.possible].iloc[0]
                bounds.append((bound, f"lower bound of {name}"))
        x, y = "radius of the mean key", "angle φ (rad)"
        lower = tuple(bounds)
        panels.append(Panel(f"pair {pair}", (), x, y, prepare, horizontal=lower, points=points))
    return Plot(
        "offset_changes_of_pairs",
        draw(panels),
        "Radius and angle of single pairs in every head of both models (Rotary Offset Features, "
        "Fig. 15).",
    )
