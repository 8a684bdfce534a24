"""Styles of names, and files of figures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from PIL import Image

from trainer.plotting.panels import Line, Panel, draw
from trainer.plotting.style import (
    STYLE_NUMBERS,
    blank,
    paper_style,
    save,
    style_numbers,
)


def test_a_picture_is_white_and_fine_and_a_drawing_says_nothing_of_its_making(tmp_path):
    with paper_style():
        figure = blank(2)
        figure.add_subplot().plot([1, 2], [1, 2])
        drawing = save(figure, tmp_path / "a")
    image = Image.open(tmp_path / "a.png")
    assert image.size == (2025, 600)
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
