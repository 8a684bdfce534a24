"""Line charts: one panel, small multiples, and panels beside each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from trainer.plotting.lines import (
    Frame,
    Panel,
    Series,
    by_length,
    log_if_wide,
    over_heads,
    side_by_side,
    unscaled,
)
from trainer.plotting.style import paper_style


def test_a_legend_above_panels_is_no_wider_than_the_figure():
    frame = Frame(
        *("x", "y", lambda axes: axes.set_xscale("log")),
        vertical=(2, "training length"),
        horizontal=((0, "chance (1.1%)"), (1, "any listed value (25.0%)")),
    )
    names = ["RoPE", "DroPE", "NoPE from scratch", "RoPE-ID", "HalfRoPE", "High-frequency RoPE"]
    with paper_style():
        lines = [Series(name, n, (1, 10), (1, n)) for n, name in enumerate(names)]
        panels = [Panel(title, lines, frame) for title in "ab"]
        figure = side_by_side(panels)
        figure.canvas.draw()
        (legend,) = figure.legends
        drawn = legend.get_window_extent()
        texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:6] == names
    assert drawn.x0 >= figure.bbox.x0
    assert drawn.x1 <= figure.bbox.x1


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_few_lines_share_a_panel():
    lines = [
        Series("low", 0, [1, 2], [3, 1]),
        Series("high", 1, [1, 2], [2, 4], low=[1, 3], high=[2.5, 6], marked=False),
        Series("ends early", 7, [1, 2], [2, math.nan], raw=[1, 3]),
    ]
    frame = Frame("step", "loss", unscaled, (4, "here or there"), ((0.5, "chance"), (3, "best")))
    figure = side_by_side([Panel("", lines, frame)])
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    assert labels(figure) == ["low", "high", "ends early", "chance", "best", "here or there"]
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert [3, 1] in drawn
    assert [1, 3] in drawn  # unsmoothed
    assert [0.5, 0.5] in drawn
    (bars,) = axes.containers
    segments = bars.lines[2][0].get_segments()
    assert [segment.tolist() for segment in segments] == [[[1, 1], [1, 2.5]], [[2, 3], [2, 6]]]


def test_a_line_and_a_reference_are_named_once_for_all_panels():
    frame = Frame("x", "y", unscaled, (2, "here or so"), ((0.5, "chance"), (0.75, "better")))
    first, second = Series("one", 0, [1, 2, 3], [0, 1, 0]), Series("other", 8, [1, 3], [1, 1])
    panels = [
        Panel("a", [first], frame),
        Panel("b", [second, first], Frame("u", "v", unscaled)),
    ]
    figure = side_by_side(panels)
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["x", "u"]
    assert labels(figure) == ["one", "other", "chance", "better", "here or so"]


@pytest.mark.parametrize(
    ("values", "scale"), [((2, 10), "linear"), ((2, 10.1), "log"), ((0, 10), "linear")]
)
def test_what_spans_more_than_a_factor_of_five_is_logarithmic(values, scale):
    axes = Figure().subplots()
    axes.plot([0, 2], values)
    log_if_wide(axes)
    assert axes.get_yscale() == scale


def test_a_line_is_the_mean_and_its_band_has_four_fifths_of_the_heads():
    values = np.arange(11.0)[None, :, None] * np.array([1.0, 10.0])
    line = over_heads("heads", 0, [1, 2], values)
    assert (line.y, line.low, line.high) == ([5, 50], [1, 10], [9, 90])
    values[0, 0] = np.nan
    assert over_heads("heads", 0, [1, 2], values).y[0] == pytest.approx(np.arange(1, 11).mean())
    values[0, 10] = 1000
    assert over_heads("heads", 0, [1, 2], values, median=True).y[0] == 5.5


def test_the_training_length_is_marked_in_every_panel_and_named_once():
    line = over_heads("heads", 0, [32, 64, 128], np.random.default_rng(0).random((2, 4, 3)))
    panels = [Panel(title, [line], Frame("", "y"), np.ones((8, 3))) for title in "abcd"]
    figure = by_length(panels, x_label="tokens", trained=64)
    assert [axes.get_title() for axes in figure.axes] == list("abcd")
    for axes in figure.axes:
        assert axes.get_xscale() == "log"
        assert 64 in [line.get_xdata()[0] for line in axes.lines]
        # The band, and eight thin lines as one picture.
        band, thin = axes.collections[::-1]
        assert thin.get_rasterized()
        assert len(thin.get_segments()) == 8
        low, high = band.get_datalim(axes.transData).intervaly
        assert (low, high) == pytest.approx((min(line.low), max(line.high)))
    assert labels(figure) == ["heads", "training length (64 tokens)"]
