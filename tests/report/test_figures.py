"""Figures of a report, with the numbers beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.report.described import check, check_csv, described
from tests.report.examples import EXPERIMENT, cell, example, report, statements
from trainer.evaluation.outcomes import Outcomes
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell
from trainer.plotting import lines
from trainer.plotting.lines import Frame, Series
from trainer.plotting.style import paper_style
from trainer.report import files
from trainer.report.figures import (
    Depths,
    _grey,
    apart,
    draw_heatmaps,
    draw_rows,
    perplexity_axis,
    write_figures,
)

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
            where = {"model": model, "method": method, "length": int(64 * factor), "factor": factor}
            yield Cell(task=STATEMENTS, scores=scores, depths=(0.0, 0.0, 1.0, 1.0), **where)
            if method != "yarn":
                first = math.log(10 * factor)
                yield Cell(
                    task=PERPLEXITY,
                    edges=(0, 32, where["length"]),
                    losses=(first, None if model == "DroPE" else first + math.log(2)),
                    last_loss=first,
                    **where,
                )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By name what was drawn, its words, and its numbers."""
    figures = {}

    def keep(figure, path):
        figures[path.stem] = figure
        return path

    small = report(
        *cells(),
        methods=METHODS,
        tasks={STATEMENTS: "Statements", PERPLEXITY: "Perplexity"},
        training_length=64,
        task={"chance": 0.015, "chance_listed": 0.25},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "save", keep)
        written = write_figures(small, tmp_path_factory.mktemp("figures"))
    return {drawn.path.stem: (figures[drawn.path.stem], drawn) for drawn in written}


def test_figures_come_in_the_order_of_the_page(made):
    assert list(made) == [
        "perplexity_and_retrieval",
        "success_statements",
        "perplexity_by_position",
        "depth_statements",
    ]
    assert not any(drawn.detail for _, drawn in made.values())


def test_the_caption_tells_of_cropping_only_where_it_was_measured(made, tmp_path):
    _, drawn = made["perplexity_and_retrieval"]
    assert "read: reading only the last 64 tokens (cropped) keeps it low too." in drawn.caption
    rest = report(
        *(each for each in cells() if each.method != "crop"),
        methods=METHODS,
        tasks={STATEMENTS: "Statements", PERPLEXITY: "Perplexity"},
        training_length=64,
    )
    contrast, *_ = write_figures(rest, tmp_path)
    assert "does not show that distant text is read. " in contrast.caption


def test_perplexity_against_retrieval(made):
    """The first model as is and with what keeps perplexity, others as they are."""
    figure, drawn = made["perplexity_and_retrieval"]
    check(
        figure,
        """
        panel 1,1 of 1x2
          x log
          y linear 'perplexity'
          line: x 64 256; y 10 40
          line: x 256; y 40
          line: x 64 256; y 10 40
          line: upright at 64
        panel 1,2 of 1x2
          x log
          y linear 'success (%)'
          line: x 62.68 250.7; y 100 25
          line: x 256; y 50
          line: x 65.34 261.4; y 75 75
          line: upright at 64
          bars: 62.68 51.01, 62.68 100; 250.7 4.559, 250.7 69.94
          bars: 256 15, 256 85
          bars: 65.34 30.06, 65.34 95.44; 261.4 30.06, 261.4 95.44
        below 'sequence length (multiple of the training length; tokens)'
        legend 'RoPE', 'RoPE + cropped', 'DroPE', 'training length'
        """,
    )
    assert "on the last 64 tokens of held-out" in drawn.caption
    check_csv(
        drawn.path.with_suffix(".csv"),
        """
            model, method, length, factor, perplexity, success, low, high
            RoPE, none, 64, 1, 10, 1, 0.5101, 1
            RoPE, none, 256, 4, 40, 0.25, 0.04559, 0.6994
            RoPE, crop, 64, 1, , , ,
            RoPE, crop, 256, 4, 40, 0.5, 0.15, 0.85
            DroPE, none, 64, 1, 10, 0.75, 0.3006, 0.9544
            DroPE, none, 256, 4, 40, 0.75, 0.3006, 0.9544
            """,
    )


def test_success_over_length(made):
    figure, drawn = made["success_statements"]
    check(
        figure,
        """
        panel 1,1 of 1x1
          x log 'sequence length (multiple of the training length; tokens)'
          y linear 'success (%)'
          line: x 61.39 245.6; y 100 25
          line: x 250.7; y 50
          line: x 64; y 75
          line: x 65.34 261.4; y 75 75
          line: x 66.72 266.9; y 0 0
          line: level at 1.5
          line: level at 25
          line: upright at 64
          note 'training length': 64 1
          bars: 61.39 51.01, 61.39 100; 245.6 4.559, 245.6 69.94
          bars: 250.7 15, 250.7 85
          bars: 64 30.06, 64 95.44
          bars: 65.34 30.06, 65.34 95.44; 261.4 30.06, 261.4 95.44
          bars: 66.72 0, 66.72 48.99; 266.9 0, 266.9 48.99
        legend 'RoPE + PI', 'DroPE', 'RoPE + cropped', 'RoPE', 'DroPE + YaRN', 'chance
            (1.5%)', 'any listed value (25.0%)'
        """,
    )
    assert "Grey" not in drawn.caption
    check_csv(
        drawn.path.with_suffix(".csv"),
        """
            model, method, length, factor, success, low, high
            RoPE, none, 64, 1, 1, 0.5101, 1
            RoPE, none, 256, 4, 0.25, 0.04559, 0.6994
            RoPE, crop, 256, 4, 0.5, 0.15, 0.85
            RoPE, pi, 64, 1, 0.75, 0.3006, 0.9544
            DroPE, none, 64, 1, 0.75, 0.3006, 0.9544
            DroPE, none, 256, 4, 0.75, 0.3006, 0.9544
            DroPE, yarn, 64, 1, 0, 0, 0.4899
            DroPE, yarn, 256, 4, 0, 0, 0.4899
            """,
    )


def test_perplexity_by_position(made):
    """Of the longest length that any has."""
    figure, drawn = made["perplexity_by_position"]
    check(
        figure,
        """
        panel 1,1 of 1x1
          x linear 'position in sequences of 256 tokens'
          y linear 'perplexity'
          line: x 16 144; y 40 80
          line: x 16 144; y 40 80
          line: x 16 144; y 40 nan
          line: upright at 64
          note 'training length': 64 1
        legend 'RoPE', 'RoPE + cropped', 'DroPE'
        """,
    )
    check_csv(
        drawn.path.with_suffix(".csv"),
        """
            model, method, length, from_position, to_position, perplexity, loss
            RoPE, none, 256, 0, 32, 40, 3.689
            RoPE, none, 256, 32, 256, 80, 4.382
            RoPE, crop, 256, 0, 32, 40, 3.689
            RoPE, crop, 256, 32, 256, 80, 4.382
            DroPE, none, 256, 0, 32, 40, 3.689
            DroPE, none, 256, 32, 256, ,
            """,
    )


def test_success_by_depth(made, tmp_path):
    figure, drawn = made["depth_statements"]
    assert [axes.get_title() for axes in figure.axes[:5]] == [
        *("RoPE", "RoPE + cropped", "RoPE + PI", "DroPE", "DroPE + YaRN"),
    ]
    check(
        figure,
        """
        panel 1,2 of 1x5 'RoPE + cropped'
          x linear
          y linear
          image 0..100, from -0.5 1.5 1.5 -0.5: nan 100 / nan 0
          text '·': 0 0
          text '100': 1 0
          text '·': 0 1
          text '0': 1 1
        """,
        panel=2,
    )
    assert described(figure).splitlines()[-3:] == [
        "bar 'success (%)' 0..100",
        "below 'sequence length (multiple of the training length)'",
        "left 'depth (% of the text)'",
    ]
    numbers = drawn.path.with_suffix(".csv").read_text().splitlines(keepends=True)
    assert len(numbers) == 1 + 5 * 2 * 2
    (tmp_path / "first_model.csv").write_text("".join(numbers[: 1 + 3 * 2 * 2]))
    check_csv(
        tmp_path / "first_model.csv",
        """
            model, method, length, depth, success
            RoPE, none, 64, 0, 1
            RoPE, none, 64, 100, 1
            RoPE, none, 256, 0, 0.5
            RoPE, none, 256, 100, 0
            RoPE, crop, 64, 0,
            RoPE, crop, 64, 100,
            RoPE, crop, 256, 0, 1
            RoPE, crop, 256, 100, 0
            RoPE, pi, 64, 0, 1
            RoPE, pi, 64, 100, 0.5
            RoPE, pi, 256, 0,
            RoPE, pi, 256, 100,
            """,
    )


@pytest.mark.parametrize(
    ("values", "scale", "limits", "ticks"),
    [
        # A margin of 6% of what they span, or so much that the axis spans a fifth of the largest.
        ((10.0, 15.0), "linear", (9.7, 15.3), None),
        ((701.0, 704.5), "linear", (632.3, 773.2), None),
        ((10.0, 10.0), "linear", (9.0, 11.0), None),
        ((10.0, math.nan, 400.0), "log", (10 / 1.2, 480), [10, 20, 50, 100, 200]),
        ((10.0, 20_000.0), "log", (10 / 1.2, 24_000), [10, 100, 1000, 10_000]),
        ((), "linear", (0.9, 1.1), None),
    ],
)
def test_the_axis_of_perplexities_holds_them_all(values, scale, limits, ticks):
    axes = Figure().subplots()
    perplexity_axis(values)(axes)
    assert axes.get_yscale() == scale
    assert axes.get_ylim() == pytest.approx(limits)
    if ticks is None:  # matplotlib's own
        return
    low, high = axes.get_ylim()
    assert [y for y in axes.get_yticks() if low <= y <= high] == pytest.approx(ticks)


def test_all_figures_of_a_report_draw_a_name_in_one_colour(monkeypatch, tmp_path):
    """Side by side, in panels of a model, and over training steps."""
    line_style, colours = lines.line_style, {}

    def noting(item):
        look = line_style(item)
        colours.setdefault(item.label, set()).add(look["color"])
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
    assert all(len(used) == 1 for used in colours.values()), colours
    assert colours["YaRN"] == colours["RoPE + YaRN"]
    assert colours["RoPE"] != colours["Mine"] != colours["DroPE"] != colours["RoPE"]


def test_a_depth_is_a_row_until_there_are_more_than_eleven():
    ends = [n / 10 for n in range(11)]
    few = Depths.from_cells([cell([1.0] * 5, depths=ends[:5]), cell([1.0] * 6, depths=ends[5:])])
    assert few == Depths((*ends, math.inf), tuple(str(10 * n) for n in range(11)))
    many = Depths.from_cells([cell([1.0] * 12, depths=[*ends, 0.55])])
    tenths = tuple(f"{10 * n}–{10 * n + 10}" for n in range(10))
    assert many == Depths((*ends[:10], math.inf), tenths)


def test_a_row_is_the_mean_of_its_trials():
    depths = Depths((0.0, 0.5, 1.0, math.inf), ("0", "50", "100"))
    made = cell([1.0, 0.5, 0.0, 0.25], depths=(0.0, 0.49, 0.5, 0.9))
    assert depths.means(made)[:2] == [0.75, 0.125]
    assert math.isnan(depths.means(made)[2])  # a row without trials is not zero
    tenths = Depths.from_cells([cell([1.0] * 31, depths=np.linspace(0, 1, 31).tolist())])
    assert tenths.means(cell([0.5], depths=(1.0,)))[-1] == 0.5  # the end belongs to the last


def test_a_long_title_of_a_heat_map_is_wrapped_and_all_maps_share_a_scale():
    panels = {
        "RoPE": np.array([[0.1, 0.2], [0.55, 0.56]]),
        "DroPE + a method with a long name": np.array([[1.0, math.nan], [0.0, 0.125]]),
    }
    depths = Depths((0.0, 1.0, math.inf), ("0", "100"))
    with paper_style():
        figure = draw_heatmaps(panels, depths, {64: "1×", 256: "4×"})
    first, second, _ = figure.axes
    assert second.get_title() == "DroPE + a method with a\nlong name"
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 100)
    assert [text.get_text() for text in second.texts] == ["100", "·", "0", "12"]


@pytest.mark.parametrize(
    ("panels", "rows", "shape", "height"),
    [(1, 2, (1, 1), 1.29), (5, 2, (1, 5), 1.29), (6, 2, (2, 5), 2.08), (1, 12, (1, 1), 2.7)],
)
def test_maps_stand_five_in_a_row_and_are_as_high_as_their_rows(panels, rows, shape, height):
    """Of many rows no higher than 2.2 inches."""
    depths = Depths((*range(rows), math.inf), tuple(map(str, range(rows))))
    made = {str(number): np.zeros((rows, 1)) for number in range(panels)}
    figure = draw_heatmaps(made, depths, {64: "1×"})
    spec = figure.axes[0].get_subplotspec()
    assert spec.get_gridspec().get_geometry() == shape
    assert figure.get_figheight() == pytest.approx(height)
    labelled = [
        axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes[: min(panels, 5)]
    ]
    assert labelled == [panels <= 5, *[True] * (len(labelled) - 1)]


def plain(axes):
    axes.set_xlim(0, 10)


FRAME = Frame("step", "loss", plain, (4, "here"), ((0.5, "chance"),))


def rows_of(models, methods):
    """The outcomes of all of them, and a level line for each."""
    outcomes = Outcomes(report(*(cell([1.0], m, k) for m in models for k in methods)))
    lines = {
        row: Series("", 0, [1, 2], [n, n], marked=n > 0) for n, row in enumerate(outcomes.rows)
    }
    return outcomes, lines


def test_up_to_eight_lines_share_a_panel():
    outcomes, lines = rows_of(("DroPE", "RoPE"), ("none", "pi"))
    with paper_style():
        check(
            draw_rows(outcomes, lines, FRAME),
            """
            panel 1,1 of 1x1
              x linear 'step'
              y linear 'loss'
              line: x 1 2; y 0 0
              line: x 1 2; y 1 1
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: level at 0.5
              line: upright at 4
              note 'here': 4 1
            legend 'RoPE + PI', 'RoPE', 'DroPE + PI', 'DroPE', 'chance'
            """,
        )


def test_more_lines_have_a_panel_for_each_model():
    """A method looks in all of them as with the first model that has it."""
    models = ("RoPE", "HoPE", "Mine", "Fourth", "Fifth")
    outcomes, lines = rows_of((*models, "without lines"), ("none", "yarn"))
    del lines["RoPE", "yarn"], lines["without lines", "none"], lines["without lines", "yarn"]
    with paper_style():
        figure = draw_rows(outcomes, lines, FRAME)
        assert [axes.get_title() for axes in figure.axes] == [*models]
        check(
            figure,
            """
            panel 1,2 of 2x3 'HoPE'
              x linear
              y linear
              line: x 1 2; y 0 0
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: x 1 2; y 4 4
              line: x 1 2; y 5 5
              line: x 1 2; y 6 6
              line: x 1 2; y 7 7
              line: x 1 2; y 8 8
              line: x 1 2; y 9 9
              line: x 1 2; y 2 2
              line: x 1 2; y 3 3
              line: level at 0.5
              line: upright at 4
            """,
            panel=2,
        )
    assert described(figure).splitlines()[-3:] == [
        "below 'step'",
        "left 'loss'",
        "legend 'as is', 'YaRN', 'chance', 'here'",
    ]


def test_more_methods_than_models_have_a_panel_for_each_method():
    methods = ("none", "pi", "ntk", "yarn", "longrope", "dope")
    outcomes, lines = rows_of(("RoPE", "Mine"), methods)
    del lines["RoPE", "none"], lines["RoPE", "dope"], lines["Mine", "dope"]
    with paper_style():
        figure = draw_rows(outcomes, lines, FRAME)
    first, second, *_ = figure.axes
    assert [axes.get_title() for axes in figure.axes] == [
        *("as is", "PI", "NTK-aware", "YaRN", "LongRoPE"),
    ]
    # The lines of other panels are grey; the panel's lines are the last before the two marks.
    levels = [[line.get_ydata()[0] for line in axes.lines[9:-2]] for axes in (first, second)]
    assert levels == [[6], [1, 7]]
    assert described(figure).splitlines()[-1] == "legend 'RoPE', 'Mine', 'chance', 'here'"


@pytest.mark.parametrize("count", [8, 9, 40])
def test_many_methods_of_one_model_are_drawn_at_their_lengths(count):
    methods = {str(number): f"method {number}" for number in range(count)}
    outcomes = Outcomes(report(*(cell([1.0], "RoPE", k) for k in methods), methods=methods))
    lines = {row: Series("", 0, [64], [1.0], [0.0], [2.0]) for row in outcomes.rows}
    figure = draw_rows(outcomes, lines, Frame("length", "%"))
    places = {
        float(line.get_xdata()[0])
        for axes in figure.axes
        for line in axes.lines
        if len(line.get_xdata()) == 1
    }
    assert (places == {64.0}) is (count > 8)
    assert bool(_grey(lines)) is (count > 8)


def test_lines_with_intervals_stand_apart_by_three_hundredths_of_an_octave():
    lines = [Series(str(n), n, [64, 128], [1, 1], [0, 0], [2, 2]) for n in range(3)]
    lines.append(Series("none", 0, [64], [1]))
    first, second, third, last = apart(lines)
    for line, octaves in ((first, -0.045), (second, -0.015), (third, 0.015), (last, 0)):
        assert line.x == pytest.approx([x * 2**octaves for x in (64, 128)[: len(line.x)]])
    assert first.y == lines[0].y
