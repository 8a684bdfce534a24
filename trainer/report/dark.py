"""Drawings that follow the colour scheme of whoever looks at them."""

from __future__ import annotations

INK = "#e8e6e3"
COLOURS = {
    "#000000": INK,
    "#0072b2": "#2f7ed1",
    "#009e73": "#1fbf92",
    "#d55e00": "#f0802e",
    "#707070": "#a3a09b",
    "#b0b0b0": "#6d6d6d",
    "#bbbbbb": "#666666",
    "#d0d0d0": "#4a4a4a",
    "#dcdcdc": "#444444",
    "#e4e4e4": "#3a3a3a",
}
"""Of a light page, and what stands for each on a dark one; others are clear on both."""

ON_BRIGHT = "#010101"
"""A black that stays black, for what is written on bright cells."""

UNKNOWN = (0.5, 0.5, 0.5, 0.22)
"""A grey that is near the ground of either page, for cells without a number."""

_STYLE = "</style>"


def follows_scheme(svg: str) -> str:
    """A drawing of matplotlib's with a transparent ground, readable on a light page and on a dark
    one; programs that know no colour schemes show it as on a light page."""
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in COLOURS.items()
        for kind in ("fill", "stroke")
    ]
    # Black is what matplotlib fills with where it says nothing.
    dark = f":root{{fill:{INK}}}{''.join(rules)}"
    own = f":root{{color-scheme:light dark}}@media (prefers-color-scheme:dark){{{dark}}}"
    return svg.replace(_STYLE, own + _STYLE, 1)
