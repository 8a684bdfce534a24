"""Figures of an evaluation and of training: their series, axes and labels."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from tests.report.examples import cell, change, loss, report
from trainer.config import PERPLEXITY, STATEMENTS
from trainer.evaluation.results import RunSummary
from trainer.plotting.panels import Line
from trainer.report.figures import _perplexities, apart, benchmarks, depths_of, training
from trainer.report.figures import plots as plots_of

METHODS = {"none": "as is", "crop": "cropped", "yarn": "YaRN", "pi": "PI"}
SCORES = {
    ("RoPE", "none"): ((1, 1, 1, 1), (1, 0, 0, 0)),
    ("RoPE", "crop"): (None, (1, 1, 0, 0)),
    ("RoPE", "pi"): ((1, 1, 1, 0), None),
    ("DroPE", "none"): ((1, 1, 1, 0), (1, 1, 1, 0)),
    ("DroPE", "yarn"): ((0, 0, 0, 0), (0, 0, 0, 0)),
}


def cells():
    """Two lengths, 64 and 256; of cropping and PI one is missing."""
    for (model, method), both in SCORES.items():
        for factor, scores in zip((1.0, 4.0), both, strict=True):
            if scores is None:
                continue
            where = {"model": model, "method": method, "length": int(64 * factor)}
            yield cell(scores, task=STATEMENTS, depths=(0.0, 0.0, 1.0, 1.0), **where)
            if method != "yarn":
                yield loss(math.log(10 * factor), **where)


@pytest.fixture(scope="module")
def plots():
    """The plots of a small report by name."""
    small = report(
        *cells(),
        methods=METHODS,
        tasks={STATEMENTS: "Statements", PERPLEXITY: "Perplexity"},
        training_length=64,
        task={"chance": 0.015, "chance_listed": 0.25},
    )
    return {plot.name: plot for plot in plots_of(small)}


def test_figures_come_in_the_order_of_the_page(plots):
    assert list(plots) == [
        "success_statements",
        "perplexity_and_retrieval",
        "depth_statements",
    ]


def drawn(axes):
    """The lines of a panel that show numbers: x and y, with None for none."""
    return [
        ([*map(float, x)], [None if math.isnan(v) else round(float(v), 3) for v in y])
        for x, y in (line.get_data() for line in axes.lines)
    ]


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_perplexity_against_retrieval(plots):
    """The first model as is and with what keeps perplexity, others as they are."""
    figure = plots["perplexity_and_retrieval"].figure
    left, right = figure.axes
    both = [64.0, 256.0]
    assert drawn(left)[:3] == [(both, [10, 40]), ([256.0], [40]), (both, [10, 40])]
    assert all(y in [line for _, line in drawn(right)] for y in ([100, 25], [50], [75, 75]))
    bars = right.containers[1].lines[2][0].get_segments()
    assert np.array(bars).ravel() == pytest.approx([256, 15.0, 256, 85.0], abs=0.01)  # Wilson's
    assert set(labels(figure)) == {"RoPE", "RoPE + cropped", "DroPE", "training length"}


def test_many_rows_have_a_panel_for_each_model():
    cells = [
        cell([1.0], model, method, length=length)
        for model in ("RoPE", "DroPE")
        for method in ("none", "pi", "ntk", "yarn", "crop")
        for length in (1024, 2048)
    ]
    (plot,) = plots_of(report(*cells))
    assert [axes.get_title() for axes in plot.figure.axes] == ["RoPE", "DroPE"]


def test_success_over_length(plots):
    figure = plots["success_statements"].figure
    heights = [y for _, y in drawn(figure.axes[0])]
    assert [100, 25] in heights
    assert [0, 0] in heights
    assert [1.5, 1.5] in heights  # chance
    assert "any listed value (25.0%)" in labels(figure)


def test_success_by_depth(plots):
    axes = plots["depth_statements"].figure.axes[1]
    assert axes.get_title() == "RoPE + cropped"
    assert axes.images[0].get_array().tolist() == [[None, 100], [None, 0]]


@pytest.mark.parametrize(
    ("values", "scale", "limits"),
    [
        # A margin of 6% of what they span, or so much that the axis spans a fifth of the largest.
        ((10.0, 15.0), "linear", (9.7, 15.3)),
        ((701.0, 704.5), "linear", (632.3, 773.2)),
        ((10.0, math.nan, 400.0), "log", None),
    ],
)
def test_the_axis_of_perplexities_holds_them_all(values, scale, limits):
    axes = Figure().subplots()
    axes.plot(range(len(values)), values)
    _perplexities(axes)
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    assert low < min(values) < np.nanmax(values) < high
    assert limits is None or (low, high) == pytest.approx(limits)


def test_a_depth_is_a_row_until_there_are_more_than_eleven():
    ends = [n / 10 for n in range(11)]
    names, places = depths_of(pd.Series([1.0, *ends]))
    assert names == [str(10 * n) for n in range(11)]
    assert places.tolist() == [10, *range(11)]
    names, places = depths_of(pd.Series([*ends, 0.55]))
    assert names == [f"{10 * n}–{10 * n + 10}" for n in range(10)]
    assert places.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 5]  # the end belongs to the last


def test_lines_with_intervals_stand_apart_by_three_hundredths_of_an_octave():
    lines = [Line(str(n), n, [64, 128], [1, 1], [0, 0], [2, 2]) for n in range(3)]
    for line, octaves in zip(apart(lines), (-0.03, 0, 0.03), strict=True):
        assert line.x == pytest.approx([x * 2**octaves for x in (64, 128)])


def test_losses_over_steps_with_the_drop():
    runs = (
        RunSummary("DroPE", "rope", 1, 4, 3, None, ((1, 5.0), (2, 4.0), (4, None), (100, 3.0))),
        RunSummary("RoPE", "rope", 1, 2, 3, None, ((1, 6.0), (2, 5.5))),
        RunSummary("not logged", "rope", 1, 2, 3),
    )
    made = report(runs=runs, drop=change(2, 4.0, 8.5, None))
    (plot,) = training(made)
    (axes,) = plot.figure.axes
    assert drawn(axes)[:3:2] == [([1, 2, 4, 100], [5, 4, None, 3]), ([1, 2], [6, 5.5])]
    assert drawn(axes)[-1][0] == [2, 2]
    assert labels(plot.figure) == ["DroPE", "RoPE", "encoding dropped at step 2"]


def test_a_thick_line_is_the_mean_over_a_fortieth_of_the_points():
    """Three of 120."""
    losses = [float(step % 3) for step in range(120)]
    run = RunSummary("RoPE", "rope", 1, 120, 3, None, tuple(enumerate(losses)))
    (plot,) = training(report(runs=(run,)))
    raw, thick = plot.figure.axes[0].lines
    assert list(raw.get_ydata()) == losses
    assert list(thick.get_ydata())[:-1] == pytest.approx([0.5, *[1.0] * 118])


def test_benchmarks_have_every_task_and_the_mean_without_perplexities():
    scores = ({"a": 0.5, "b": 0.25, "perplexity/1x": 9.0}, {"a": 0.75, "b": None, "c": 1.0})
    made = tuple(
        {"step": n, "tokens": 1000 * n, "dropped": n > 1, "scores": measured}
        for n, measured in enumerate((*scores, scores[0]))
    )
    runs = [
        RunSummary(name, "rope", 1, 2, 3, milestones=milestones)
        for name, milestones in (("DroPE", made), ("RoPE", made[:1]), ("NoPE", ()))
    ]
    (plot,) = benchmarks(report(runs=runs))
    heights = [y for _, y in drawn(plot.figure.axes[0])]
    assert heights[:3] == [[37.5, 87.5, 37.5], [50, 75, 50], [25, None, 25]]
    assert heights[3:5] == [[None, 100, None], [37.5]]
    names = ["DroPE, mean", "DroPE, a", "DroPE, b", "DroPE, c", "RoPE, mean", "encoding dropped"]
    assert labels(plot.figure) == names
