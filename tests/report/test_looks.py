"""A model with a method looks the same wherever it is drawn."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.report.examples import EXPERIMENT, example, report, statements
from trainer.analysis.drop import indicator_figure
from trainer.plotting import lines
from trainer.plotting.style import STYLE_NUMBERS, style_numbers
from trainer.report import files
from trainer.report.figures import write_figures


def test_what_many_pages_show_has_one_look_and_a_checkpoint_that_of_its_run():
    assert style_numbers(["DroPE", "RoPE"]) == {"DroPE": 4, "RoPE": 0}
    names = ["mine", "RoPE (before-drop)", "DroPE"]
    assert style_numbers(names) == {"mine": 1, "RoPE (before-drop)": 0, "DroPE": 4}
    assert style_numbers(["RoPE (a)", "RoPE (b)", "RoPE"]) == {
        "RoPE": 0,
        "RoPE (a)": 1,
        "RoPE (b)": 2,
    }


def test_looks_of_many_pages_are_the_first_ones_and_each_of_one_model():
    """A control and what it is called alone look alike."""
    by_look = {}
    for name in STYLE_NUMBERS:
        by_look.setdefault(style_numbers([name])[name], []).append(name)
    assert list(by_look) == [*range(16)]
    assert [names for names in by_look.values() if len(names) > 1] == [
        ["NoPE from scratch", "NoPE"],
        ["NoPE from scratch + temperature", "NoPE + temperature"],
        ["High-frequency RoPE", "high frequency"],
    ]


@given(st.lists(st.sampled_from([*STYLE_NUMBERS, "a", "b", "RoPE (a)", "RoPE (b)"]), unique=True))
def test_no_two_names_look_alike(names):
    assert len(set(style_numbers(names).values())) == len(style_numbers(names)) == len(names)


def test_all_figures_of_all_pages_draw_a_name_in_one_colour(monkeypatch, tmp_path):
    """Side by side, in panels of a model, over training steps, and in an analysis."""
    line_style, found = lines.line_style, {}

    def noting(item):
        look = line_style(item)
        found.setdefault(item.label, set()).add(look["color"])
        return look

    monkeypatch.setattr(lines, "line_style", noting)
    monkeypatch.setattr(files, "save", lambda figure, stem: stem)
    models = ("RoPE", "DroPE", "NoPE", "HalfRoPE")
    made = example(models=models, methods=("none", "crop", "yarn"), trials=4)
    write_figures(report(*(replace(cell, depths=()) for cell in made.cells)), tmp_path)
    # The other one first, beside a model that has no look of its own.
    order = ("DroPE", "Mine", "RoPE")
    cells = [cell for name in order for cell in statements(name, (100, 90, 50, 10))]
    write_figures(report(*cells, **EXPERIMENT, training_length=64), tmp_path)
    curves = {"indicator": (np.ones(2), np.ones(2))}
    indicator_figure([64, 128], curves, ("RoPE", "DroPE"), 64)
    assert all(len(colours) == 1 for colours in found.values()), found
    assert found["YaRN"] == found["RoPE + YaRN"]
    assert found["RoPE"] != found["Mine"] != found["DroPE"] != found["RoPE"]
