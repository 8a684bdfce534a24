"""What takes most of the time of many tests and is the same in all is done once for them."""

from __future__ import annotations

import base64

import pytest

from trainer.plotting import style

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"/>'
BLANK = {"png": base64.b64decode(f"{PNG}=="), "svg": SVG.encode()}


def blank(figure, suffix, **_):
    """In the place of a figure, which is made: to render it takes most of a report's time."""
    return BLANK[suffix]


@pytest.fixture(autouse=True)
def blank_figures(request, monkeypatch):
    """But in tests of reports."""
    if not {"report", "plotting"} & {*request.path.parts}:
        monkeypatch.setattr(style, "_rendered", blank)
