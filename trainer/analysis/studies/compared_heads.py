"""Heads of two models side by side, as a part of a section."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.studies.drop_figures import head_figure
from trainer.analysis.studies.positional_bias import KINDS, STRONG
from trainer.analysis.studies.section import Grid, Part, Picture

SHOWN = 10
MEASURES = {
    "distance": "mean distance (tokens)",
    "entropy": "entropy (1: uniform)",
    "sink_mass": "attention on the first token, all queries",
    "diagonal": "Aᶜ, its own token",
    "previous": "Aᶜ, the previous token",
}
Names = tuple[str, str]
ByMeasure = Mapping[str, Array]


def head_change(was: ByMeasure, now: ByMeasure) -> Array:
    """Changes of a head in all measures together, each over its root mean square among heads."""
    changes = np.stack([now[name] - was[name] for name in MEASURES])
    usual = np.sqrt(np.square(changes).mean(axis=(1, 2), keepdims=True))
    return np.sqrt(np.square(changes / np.where(usual > 0, usual, 1.0)).sum(axis=0))


def heads_part(was: ByMeasure, now: ByMeasure, names: Names) -> Part:
    """:data:`MEASURES` of every head ``[layers, heads]`` of two models with these names."""
    if was["distance"].shape != now["distance"].shape:
        shapes = [f"{x['distance'].shape[0]} x {x['distance'].shape[1]}" for x in (was, now)]
        return Part(
            (
                f"Heads were not compared: the models have {shapes[0]} and {shapes[1]} layers "
                "and heads.",
            )
        )
    change = head_change(was, now)
    order = np.argsort(-change, axis=None, kind="stable")
    ranked = [tuple(map(int, np.unravel_index(i, change.shape))) for i in order]
    rows = [
        (*at, *(float(of[name][at]) for name in MEASURES for of in (was, now)))
        for at in np.ndindex(change.shape)
    ]
    header = (
        "layer",
        "head",
        *(f"{name}_{when}" for name in MEASURES for when in ("before", "after")),
    )
    table = Grid(
        f"The {min(SHOWN, change.size)} heads that changed most, {names[0]} → "
        f"{names[1]}. The order is by the changes in all columns together, each over its "
        "root mean square among heads.",
        ("layer", "head", *MEASURES.values()),
        [
            (*at, *(f"{was[name][at]:.3g} → {now[name][at]:.3g}" for name in MEASURES))
            for at in ranked[:SHOWN]
        ],
    )
    pictures = tuple(
        Picture(
            f"drop_{name}",
            head_figure(
                {MEASURES[measure]: (was[measure], now[measure]) for measure in measures},
                names,
            ),
            f"{what} of every head in {names[0]} (x) and in {names[1]} (y), coloured "
            "by layer. Heads on the dotted line did not change.",
            header,
            rows,
        )
        for name, what, measures in (
            ("positional_heads", "Positional bias Aᶜ", tuple(KINDS)),
            ("attention", "Attention", ("distance", "entropy", "sink_mass")),
        )
    )
    findings = [_most_changed(was, now, ranked[0])]
    findings += [_positional(kind, was[kind], now[kind], names) for kind in KINDS]
    numbers = {
        name: {"before": was[name].tolist(), "after": now[name].tolist()} for name in MEASURES
    }
    return Part(tuple(findings), pictures, (table,), {"heads": numbers})


def _most_changed(was: ByMeasure, now: ByMeasure, at: tuple[int, ...]) -> str:
    return (
        f"Layer {at[0]} head {at[1]} changed most: its mean distance goes from "
        f"{was['distance'][at]:.1f} to {now['distance'][at]:.1f} tokens and the attention "
        f"of all its queries on the first token from {100 * was['sink_mass'][at]:.1f}% to "
        f"{100 * now['sink_mass'][at]:.1f}%. Over all heads the mean distance goes from "
        f"{was['distance'].mean():.1f} to {now['distance'].mean():.1f} tokens and the entropy "
        f"from {was['entropy'].mean():.2f} to {now['entropy'].mean():.2f}."
    )


def _positional(kind: str, was: Array, now: Array, names: Names) -> str:
    had, has = was >= STRONG, now >= STRONG
    at = np.unravel_index(was.argmax(), was.shape)
    kept, gained = int((had & has).sum()), int((has & ~had).sum())
    strong = f"Aᶜ ≥ {STRONG} towards {KINDS[kind]}"
    if had.any():
        count = (
            f"{had.sum()} {'head' if had.sum() == 1 else 'heads'} of {names[0]} "
            f"{'has' if had.sum() == 1 else 'have'} {strong}; {kept} of them still "
            f"{'has' if kept == 1 else 'have'} it in {names[1]}, and {gained} gained it."
        )
    else:
        count = f"No head of {names[0]} has {strong}; {gained} gained it in {names[1]}."
    return (
        f"{count} The strongest, layer {at[0]} head {at[1]}, goes from {was[at]:.3f} to "
        f"{now[at]:.3f}."
    )
