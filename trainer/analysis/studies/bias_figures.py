"""Figures of positional bias: its growth over layers, and what a rescaling does to heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.plotting.lines import Frame, Panel, Series, log_if_wide, side_by_side, whole_x
from trainer.plotting.points import HeadCloud, head_points
from trainer.plotting.style import STYLE_NUMBERS

Array = np.ndarray
STYLES = {
    "encoded": STYLE_NUMBERS["RoPE"],
    "nope": STYLE_NUMBERS["NoPE from scratch"],
    "model": 1,
    "trained": STYLE_NUMBERS["RoPE"],
    "yarn": STYLE_NUMBERS["RoPE + YaRN"],
    "pi": STYLE_NUMBERS["RoPE + PI"],
    "ntk": STYLE_NUMBERS["RoPE + NTK-aware"],
}
BESIDE = 32
"""Tokens that a profile by distance shows."""


def gradient_figure(gradients: Mapping[str, Array], names: Mapping[str, str]) -> Figure:
    """``gradients``: by version ``[seeds, 2, layers]``."""
    frame = Frame("layer", "gradient norm of Aᶜ", whole_x(log_if_wide))
    titles = ("towards its own token", "towards the previous token")
    return side_by_side(
        [
            Panel(
                title,
                [
                    _over_layers(names[version], STYLES[version], values[:, kind])
                    for version, values in gradients.items()
                ],
                frame,
            )
            for kind, title in enumerate(titles)
        ]
    )


def spread_figure(spreads: Mapping[str, Array], names: Mapping[str, str]) -> Figure:
    """``spreads``: by version ``[seeds, layers + 1]``; on the left as it is, on the right over that
    at the first attention."""
    panels = []
    for title, label, relative in (
        ("prefix spread", "spread (norm, of what enters attention)", False),
        ("growth over the first", "spread / spread at the first attention", True),
    ):
        shown = {
            version: values / values[:, :1] if relative else values
            for version, values in spreads.items()
        }
        series = [
            _over_layers(names[version], STYLES[version], values)
            for version, values in shown.items()
        ]
        panels.append(Panel(title, series, Frame("blocks passed", label, whole_x(log_if_wide))))
    return side_by_side(panels)


def rescaled_figure(
    positional: Mapping[str, Array],
    semantic: Mapping[str, Array],
    names: Mapping[str, str],
    titles: Sequence[str],
) -> Figure:
    """Mean attention of two heads by layout: by distance, and around an earlier occurrence."""
    reach = len(next(iter(semantic.values()))) // 2
    offsets = range(-reach, reach + 1)
    by_distance = Frame("distance (tokens back)", "mean attention")
    around = Frame("key, tokens from the earlier occurrence", "mean attention")
    profiles = {key: values[:BESIDE] for key, values in positional.items()}

    def series(curves: Mapping[str, Array], x: range) -> list[Series]:
        return [
            Series(names[key], STYLES[key], list(x)[: len(values)], values.tolist())
            for key, values in curves.items()
        ]

    return side_by_side(
        [
            Panel(titles[0], series(profiles, range(BESIDE)), by_distance),
            Panel(titles[1], series(semantic, offsets), around),
        ]
    )


def needle_figure(
    around: Mapping[str, Array], first: int, names: Mapping[str, str], title: str
) -> Figure:
    """Attention on the tokens around a needle by layout, from the token ``first`` on."""
    frame = Frame("key, tokens from the needle's first", "attention of the last token")
    series = [
        Series(names[key], STYLES[key], range(first, first + len(values)), values.tolist())
        for key, values in around.items()
    ]
    return side_by_side([Panel(title, series, frame)])


def shift_figure(bias: Array, shift: Array) -> Figure:
    """Both ``[layers, heads]``: Aᶜ, and the attention that YaRN moves."""
    label = "attention on other keys\n(total variation)"
    cloud = HeadCloud.of_layers("", bias, shift, "Aᶜ, the larger of the two", label)
    return head_points([cloud], len(bias))


def factor_figure(
    factors: Mapping[float, Mapping[str, Array]], slow: int | None, names: Mapping[str, str]
) -> Figure:
    """``factors``: gamma ``[pairs]`` by extension factor s and method. ``slow``: the first pair
    that turns less than once in the training length, if there is one."""

    def prepare(axes: Axes) -> None:
        axes.set_ylim(0, 1.05)

    vertical = None if slow is None else (slow - 0.5, "right of it: less than one turn")
    return side_by_side(
        [
            Panel(
                f"s = {factor:g}",
                [
                    Series(names[method], STYLES[method], range(len(gamma)), gamma.tolist())
                    for method, gamma in methods.items()
                ],
                Frame("pair, fastest first", "frequency factor γ", prepare, vertical),
            )
            for factor, methods in factors.items()
        ]
    )


def _over_layers(label: str, style: int, values: Array) -> Series:
    """The mean over seeds ``[seeds, layers]``, with the least and the largest."""
    low, high = (None, None)
    if len(values) > 1:
        low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
    return Series(label, style, range(values.shape[1]), values.mean(axis=0).tolist(), low, high)
