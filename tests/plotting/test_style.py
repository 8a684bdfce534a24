"""Styles of names, light and dark pages, and files of figures."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from PIL import Image

from trainer.plotting.panels import Line, Panel, draw
from trainer.plotting.style import (
    DARK_COLOURS,
    ON_BRIGHT,
    STYLE_NUMBERS,
    blank,
    paper_style,
    save,
    style_numbers,
)


def luminance(colour):
    """Relative, from 0 to 1 (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture
def drawing(tmp_path):
    series = [Line(str(i), i, [1, 2, 3], [i, i + 1, i]) for i in range(7)]
    with paper_style():
        return save(draw([Panel("", series, "x", "y")]), tmp_path / "a").read_text()


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


NAME = r"costs $\frac$ or \$5"
"""As a formula it has no meaning, and matplotlib would refuse it."""


def test_dollars_in_a_name_begin_no_formula(tmp_path):
    with paper_style():
        lines = [Line(NAME, 0, (1, 10), (1, 2)), Line("b", 1, (1, 10), (2, 1))]
        figure = draw([Panel("", lines)])
        save(figure, tmp_path / "figure")
        shown = [text.get_text() for text in figure.findobj(Text)]
    assert NAME in shown
    assert (tmp_path / "figure.svg").is_file()


def test_what_many_pages_show_has_one_look_and_a_checkpoint_that_of_its_run():
    assert style_numbers(["DroPE", "RoPE"]) == {"DroPE": 4, "RoPE": 0}
    names = ["mine", "RoPE (before-drop)", "DroPE"]
    assert style_numbers(names) == {"mine": 1, "RoPE (before-drop)": 0, "DroPE": 4}
    assert style_numbers(["RoPE (a)", "RoPE (b)", "RoPE"]) == {
        "RoPE": 0,
        "RoPE (a)": 1,
        "RoPE (b)": 2,
    }


@given(st.lists(st.sampled_from([*STYLE_NUMBERS, "a", "b", "RoPE (a)", "RoPE (b)"]), unique=True))
def test_no_two_names_look_alike(names):
    assert len(set(style_numbers(names).values())) == len(style_numbers(names)) == len(names)
