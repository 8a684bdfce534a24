"""Drawings on a light page and on a dark one."""

import re

import numpy as np
import pytest
from PIL import Image

from trainer.plotting import style
from trainer.plotting.lines import Frame, Series, draw
from trainer.plotting.style import DARK_COLOURS, ON_BRIGHT, blank, follow_scheme, paper_style, save


def luminance(colour):
    """Relative, from 0 to 1 (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture
def drawing(tmp_path):
    series = [Series(str(i), i, [1, 2, 3], [i, i + 1, i]) for i in range(7)]
    with paper_style():
        return save(draw(series, Frame("x", "y", lambda axes: None)), tmp_path / "a").read_text()


def test_the_ground_is_the_page_s(drawing):
    assert "#ffffff" not in drawing


def test_every_colour_that_is_drawn_stands_out_from_a_dark_page(drawing):
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing))
    assert len(drawn) > 8
    for colour in drawn:
        if contrast(colour, "#ffffff") < 2:  # the grid, which stands out from neither
            continue
        assert contrast(DARK_COLOURS.get(colour, colour), "#181818") > 3, colour
    assert ON_BRIGHT not in DARK_COLOURS


def test_every_element_of_a_colour_gets_its_counterpart(drawing):
    for light in ("#000000", "#0072b2"):
        assert f'[style*="stroke: {light}"]{{stroke:{DARK_COLOURS[light]}!important}}' in drawing
    assert drawing.count("@media (prefers-color-scheme:dark)") == 1
    assert follow_scheme("<svg></svg>") == "<svg></svg>"  # not one of matplotlib's


def test_a_large_picture_within_a_drawing_is_a_coarse_one(tmp_path, monkeypatch):
    sizes = []
    for limit in (10**6, 100):
        monkeypatch.setattr(style, "LARGEST_SVG", limit)
        with paper_style():
            figure = blank(2)
            points = np.random.default_rng(0).random((2, 500))
            figure.add_subplot().scatter(*points, rasterized=True)
            sizes.append(save(figure, tmp_path / "a").stat().st_size)
    assert sizes[1] < 0.8 * sizes[0]


def test_a_cloud_of_many_points_is_one_picture_and_the_rest_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "LARGEST_SVG", 10_000)
    with paper_style():
        figure = blank(2)
        figure.add_subplot().scatter(*np.random.default_rng(0).random((2, 500)))
        text = save(figure, tmp_path / "a").read_text()
    assert text.count("<image ") == 1
    assert "data:image/png;base64," in text
    assert "text_1" in text


def test_a_picture_is_white_and_fine_and_a_drawing_says_nothing_of_its_making(tmp_path):
    with paper_style():
        figure = blank(2, width=3)
        figure.add_subplot().plot([1, 2], [1, 2])
        drawing = save(figure, tmp_path / "a")
    image = Image.open(tmp_path / "a.png")
    assert image.size == (900, 600)
    assert image.convert("RGB").getpixel((0, 0)) == (255,) * 3
    assert "Software" not in image.info
    text = drawing.read_text()
    assert "<dc:date>" not in text
    assert "<dc:creator>" not in text
