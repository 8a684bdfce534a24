"""Figures of an evaluation and of training: their series, axes and labels."""

from __future__ import annotations

import math

import pytest

from tests.report.examples import cell, change, loss, report
from trainer.evaluation.results import PERPLEXITY, STATEMENTS
from trainer.report.figures import benchmarks, training
from trainer.report.figures import plots as plots_of
from trainer.report.report import RunSummary

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
                yield loss(math.log(10 * factor + (method == "crop")), **where)


@pytest.fixture(scope="module")
def plots():
    """The plots of a small report by name."""
    small = report(
        *cells(),
        methods=METHODS,
        tasks={STATEMENTS: "Statements", PERPLEXITY: "Perplexity"},
        training_length=64,
        config={"evaluation": {"needles": {"needles": 4}}},
    )
    return {plot.name: plot for plot in plots_of(small)}


def test_figures_come_in_the_order_of_the_page(plots):
    assert list(plots) == [
        "answer",
        "success_statements",
        "perplexity",
        "depth_statements",
    ]


def test_the_answer_shows_the_score_of_guesses(plots):
    (axes,) = plots["answer"].figure.axes
    levels = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert levels == [25.0]  # one of the four values in a text
    assert "Dotted: guesses, any listed value (25.0%)." in plots["answer"].caption


def drawn(axes):
    """The lines of a panel that show numbers: x and y, with None for none."""
    return [
        ([*map(float, x)], [None if math.isnan(v) else round(float(v), 3) for v in y])
        for x, y in (line.get_data() for line in axes.lines)
    ]


MARK = "training length (64 tokens)"


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_perplexity_over_length(plots):
    """Of every model and method whose loss was measured."""
    figure = plots["perplexity"].figure
    (axes,) = figure.axes
    both = [64.0, 256.0]
    ours, theirs = (both, [10, 40]), (both, [10, 40])
    assert drawn(axes)[:4] == [ours, ([256.0], [41]), ([64.0], [10]), theirs]
    assert set(labels(figure)) == {"RoPE", "RoPE + cropped", "RoPE + PI", "DroPE", MARK}


def test_many_rows_have_a_panel_for_each_model():
    cells = [
        cell([1.0], model, method, length=length)
        for model in ("RoPE", "DroPE")
        for method in ("none", "pi", "ntk", "yarn", "crop")
        for length in (1024, 2048)
    ]
    _, plot = plots_of(report(*cells))
    rope, drope = plot.figure.axes
    assert (rope.get_title(), drope.get_title()) == ("RoPE", "DroPE")
    assert labels(plot.figure)[:5] == ["as is", "PI", "NTK-aware", "YaRN", "cropped"]
    looks = [
        [(line.get_color(), line.get_marker()) for line in axes.lines[:5]] for axes in (rope, drope)
    ]
    assert looks[0] == looks[1]
    assert len({*looks[0]}) == 5


def test_success_over_length(plots):
    figure = plots["success_statements"].figure
    heights = [y for _, y in drawn(figure.axes[0])]
    assert [100, 25] in heights
    assert [0, 0] in heights
    assert [1.111, 1.111] in heights  # chance of one in 90 numbers
    band = figure.axes[0].collections[1].get_datalim(figure.axes[0].transData)
    assert band.intervaly == pytest.approx([15.0, 85.0], abs=0.01)  # Wilson's
    assert "any listed value (25.0%)" in labels(figure)


def test_success_by_depth(plots):
    axes = plots["depth_statements"].figure.axes[1]
    assert axes.get_title() == "RoPE + cropped"
    assert axes.images[0].get_array().tolist() == [[None, 100], [None, 0]]


def test_many_depths_are_rounded_to_tenths():
    depths = [0.42, 0.44, *(n / 100 for n in range(46, 54)), 0.56, 0.58]
    cells = [cell([float(d < 0.5) for d in depths], depths=depths, length=n) for n in (1024, 2048)]
    *_, plot = plots_of(report(*cells))
    assert plot.figure.axes[0].images[0].get_array().tolist() == [[100, 100], [50, 50], [0, 0]]


def test_losses_over_steps_with_the_drop():
    runs = (
        RunSummary("DroPE", "rope", 1, 4, 3, ((1, 5.0), (2, 4.0), (4, None), (100, 3.0))),
        RunSummary("RoPE", "rope", 1, 2, 3, ((1, 6.0), (2, 5.5))),
        RunSummary("not logged", "rope", 1, 2, 3),
    )
    made = report(runs=runs, drop=change(2, 4.0, 8.5, None))
    (plot,) = training(made)
    (axes,) = plot.figure.axes
    assert drawn(axes)[:3:2] == [([1, 2, 4, 100], [5, 4, None, 3]), ([1, 2], [6, 5.5])]
    assert drawn(axes)[-1][0] == [2, 2]
    assert labels(plot.figure) == ["DroPE", "RoPE", "encoding dropped after step 2 of 4"]


def test_a_thick_line_is_the_mean_over_a_fortieth_of_the_points():
    """Three of 120."""
    losses = [float(step % 3) for step in range(120)]
    run = RunSummary("RoPE", "rope", 1, 120, 3, tuple(enumerate(losses)))
    (plot,) = training(report(runs=(run,)))
    raw, thick = plot.figure.axes[0].lines
    assert list(raw.get_ydata()) == losses
    assert list(thick.get_ydata())[:-1] == pytest.approx([0.5, *[1.0] * 118])


@pytest.mark.parametrize("first", [1, 2])
def test_a_mean_does_not_reach_across_the_drop(first):
    """The loss of the step of the drop is the last one before it."""
    curve = [(step, 1.0 if step <= 80 else 3.0) for step in range(first, 161)]
    run = RunSummary("DroPE", "rope", 1, 160, 3, tuple(curve))
    (plot,) = training(report(runs=(run,), drop=change(80, 1.0, 4.0, None)))
    raw, thick, _ = plot.figure.axes[0].lines
    assert list(thick.get_ydata()) == list(raw.get_ydata()) == [loss for _, loss in curve]


def test_benchmarks_have_every_task_and_the_mean_without_perplexities():
    losses = {"perplexity/1x": 9.0, "loss_of_a_plugin/1x": 1.2}
    scores = ({"a": 0.5, "b": 0.25, **losses}, {"a": 0.75, "b": None, "c": 1.0})
    made = tuple(
        {"step": n, "tokens": 1000 * n, "dropped": n > 1, "scores": measured}
        for n, measured in enumerate((*scores, scores[0]))
    )
    runs = [
        RunSummary(name, "rope", 1, 2, 3, milestones=milestones)
        for name, milestones in (("DroPE", made), ("RoPE", made[:1]), ("NoPE", ()))
    ]
    (plot,) = benchmarks(report(runs=runs))
    mean, a, _, c = plot.figure.axes
    assert [axes.get_title() for axes in plot.figure.axes] == ["mean", "a", "b", "c"]
    assert [y for _, y in drawn(mean)][:2] == [[37.5, 87.5, 37.5], [37.5]]
    assert [y for _, y in drawn(a)][:2] == [[50, 75, 50], [50]]
    assert drawn(c)[0] == ([0, 1000, 2000], [None, 100, None])
    assert labels(plot.figure) == ["DroPE", "RoPE", "encoding dropped"]


def test_lengths_and_depths_stand_beside_a_map(plots):
    maps = plots["depth_statements"].figure.axes[:5]
    x = {tuple(text.get_text() for text in axes.get_xticklabels()) for axes in maps}
    y = {tuple(text.get_text() for text in axes.get_yticklabels()) for axes in maps}
    assert x - {()} == {("1×", "4×")}
    assert y - {()} == {("0", "100")}


def test_the_longest_context_that_was_trained_is_marked():
    cells = [cell([1.0, 0.0], length=length) for length in (1024, 2048)]
    for plot in plots_of(report(*cells, trained=4096)):
        (axes,) = plot.figure.axes
        dashed = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
        assert dashed == [4096]


def test_benchmarks_mark_the_first_one_after_the_drop():
    milestones = tuple(
        {"step": n, "tokens": 100 * n, "dropped": n > 1, "scores": {"a": 0.5}} for n in range(4)
    )
    run = RunSummary("DroPE", "rope", 1, 2, 3, milestones=milestones)
    (plot,) = benchmarks(report(runs=(run,)))
    assert drawn(plot.figure.axes[0])[-1][0] == [200, 200]


def test_one_length_has_no_curve():
    assert [*plots_of(report(cell([1.0, 0.0]), loss(3.0)))] == []
