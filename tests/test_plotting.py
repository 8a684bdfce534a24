"""Panels of lines and points, heat maps, styles of names, and files of figures."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from trainer.plotting import (
    BLUE,
    DEFAULT_STYLE,
    PALE,
    STYLE_NUMBERS,
    UNKNOWN,
    ColourScale,
    Grid,
    Line,
    Panel,
    diagonal,
    draw,
    graded,
    heat_maps,
    log_if_wide,
    over_heads,
    save,
    style_numbers,
    use_style,
)


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_legend_above_panels_is_no_wider_than_the_figure():
    names = ["RoPE", "DroPE", "NoPE from scratch", "RoPE-ID", "HalfRoPE", "High-frequency RoPE"]
    lines = [Line(name, n, (1, 10), (1, n)) for n, name in enumerate(names)]
    levels = ((0, "chance (1.1%)"), (1, "any listed value (25.0%)"))
    look = {"vertical": (2, "training length"), "horizontal": levels}
    figure = draw([Panel(title, lines, **look) for title in "ab"])
    with mpl.rc_context(DEFAULT_STYLE.settings()):
        figure.draw_without_rendering()
    drawn = figure.legends[0].get_window_extent()
    assert labels(figure) == [
        *names,
        "chance (1.1%)",
        "any listed value (25.0%)",
        "training length",
    ]
    assert drawn.x0 >= figure.bbox.x0
    assert drawn.x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("width", "shown"), [("double", ["a", "", "b", "a"]), ("single", ["a", "a", "b", "a"])]
)
def test_the_first_panel_of_a_row_has_the_label_that_it_shares(width, shown):
    use_style(width)
    panels = [Panel(y=label) for label in "aaba"]
    assert [axes.get_ylabel() for axes in draw(panels, Grid(columns=2)).axes] == shown
    use_style()


def test_lines_intervals_and_references_of_a_panel():
    lines = [
        Line("low", 0, [1, 2], [3, 1]),
        Line("high", 1, [1, 2], [2, 4], low=[1, 3], high=[2.5, 6]),
        Line("ends early", 7, [1, 2], [2, math.nan], raw=[1, 3]),
    ]
    levels = ((0.5, "chance"), (3, "best"))
    figure = draw([Panel("", lines, "step", "loss", vertical=(4, "here"), horizontal=levels)])
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    assert labels(figure) == ["low", "high", "ends early", "chance", "best", "here"]
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert [3, 1] in drawn
    assert [1, 3] in drawn  # unsmoothed
    assert [0.5, 0.5] in drawn
    (band,) = axes.collections
    assert band.get_datalim(axes.transData).get_points().tolist() == [[1, 1], [2, 6]]


@pytest.mark.parametrize(
    ("values", "scale"), [((2, 10), "linear"), ((2, 10.1), "log"), ((0, 10), "linear")]
)
def test_what_spans_more_than_a_factor_of_five_is_logarithmic(values, scale):
    axes = Figure().subplots()
    axes.plot([0, 2], values)
    log_if_wide(axes)
    assert axes.get_yscale() == scale


@pytest.mark.parametrize(
    ("most", "ticks"), [(60, [1, 2, 3, 5, 7]), (300, [1, 2, 5]), (30_000, [1])]
)
def test_ticks_of_a_logarithmic_axis_are_fewer_where_it_is_longer(most, ticks):
    axes = Figure().subplots()
    axes.plot([0, 1], [10, most])
    log_if_wide(axes)
    assert [tick for tick in axes.get_yticks() if 1 <= tick < 10] == ticks
    assert axes.yaxis.get_major_formatter()(10, None) == "10"


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
    panels = [Panel(title, [line], y="y", faint=np.ones((8, 3))) for title in "abcd"]
    figure = draw(panels, Grid(x="tokens"), trained=64)
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


def test_lengths_are_in_multiples_of_1024_from_there_on():
    line = Line("a", 0, [256, 512, 1024, 1500, 4096], [1.0] * 5)
    (axes,) = draw([Panel("", [line])], trained=512).axes
    label = axes.xaxis.get_major_formatter()
    shown = {value: label(value, None) for value in (256, 1000, 1024, 1500, 4096)}
    assert shown == {256: "256", 1000: "1000", 1024: "1k", 1500: "1500", 4096: "4k"}


def test_thin_lines_and_references_of_a_panel():
    line = Line("a", 0, [3, 5], [1, 2])
    levels = ((0.5, "chance"), (3, "best"), (0.7, "chance"))
    look = {"faint": np.array([[1, 2], [3, 4]]), "horizontal": levels}
    (axes,) = draw([Panel("", [line], **look)], Grid(x="tokens")).axes
    (thin,) = axes.collections
    segments = [part.tolist() for part in thin.get_segments()]
    assert segments == [[[3, 1], [5, 2]], [[3, 3], [5, 4]]]
    assert thin.get_array().tolist() == [0, 1]
    dashes = [level.get_linestyle() for level in axes.lines[1:]]
    assert dashes == [":", "-.", ":"]
    assert axes.get_xlabel() == ""


def test_styles_of_one_colour_differ_in_their_dashes():
    """Style 0 alone is black; 1 to 6 have a colour each, which 7 to 12 repeat with dashes."""
    lines = [Line(str(n), n, range(20), range(20)) for n in range(14)]
    (axes,) = draw([Panel("", lines)]).axes
    colours = [line.get_color() for line in axes.lines]
    dashes = [line.get_linestyle() for line in axes.lines]
    assert colours[1:7] == colours[7:13]
    assert len({*colours[:7]}) == 7
    assert colours[13] == colours[1]
    assert dashes[:7] == ["-"] * 7
    assert dashes[7:13] == ["--"] * 6
    assert len({axes.lines[n]._unscaled_dash_pattern for n in (1, 7, 13)}) == 3
    assert "#000000" not in colours[1:]


def test_context_is_one_pale_line_without_a_label():
    context = Line("context", 2, [1, 2], [1, 3], low=[0, 0], high=[4, 4], is_context=True)
    (axes,) = draw([Panel("", [Line("a", 1, [1, 2], [2, 2]), context])]).axes
    assert [line.get_color() for line in axes.lines] == [BLUE, PALE]
    assert not axes.collections
    assert labels(axes.figure) == ["a"]


def test_panels_that_share_have_the_same_axes():
    lines = [Line("a", 0, [0, 1], [0, top]) for top in (1, 9)]
    panels = [Panel("", [line]) for line in lines]
    limits = [
        {axes.get_ylim() for axes in draw(panels, Grid(share=share)).axes}
        for share in (True, False)
    ]
    assert [len(each) for each in limits] == [1, 2]


def test_a_narrow_grid_is_a_column_wide_in_any_style():
    figure = draw([Panel()] * 2, Grid(2, narrow=True))
    assert figure.get_size_inches()[0] == 3.3
    assert len({axes.get_position().y0 for axes in figure.axes}) == 2


def test_points_of_groups_have_a_legend_and_those_of_an_index_a_bar():
    groups = {"keys": np.array([[0, 1], [2, 3]]), "queries": np.array([[4.0, 5]])}
    clouds = Panel("clouds", prepare=diagonal, horizontal=((2.0, ""),), points=groups)
    figure = draw([clouds, Panel("more", points=groups)])
    first = figure.axes[0]
    keys, queries = first.collections
    assert keys.get_offsets().tolist() == [[0, 1], [2, 3]]
    assert queries.get_offsets().tolist() == [[4, 5]]
    assert labels(figure) == ["keys", "queries"]
    *_, line, level = first.lines
    assert list(line.get_xdata()) == list(line.get_ydata()) == [0, 5]
    assert list(level.get_ydata()) == [2, 2]

    layer = np.array([[0], [1]])
    figure = draw([graded("", np.array([[1, 2], [3, 4]]), np.ones((2, 2)), layer)], index="layer")
    cloud = figure.axes[0].collections[0]
    assert (cloud.norm.vmin, cloud.norm.vmax) == (0, 1)
    assert figure.axes[1].get_yticks().tolist() == [0, 1]
    assert cloud.get_array().tolist() == [0, 0, 1, 1]
    assert cloud.get_offsets().tolist() == [[1, 1], [2, 1], [3, 1], [4, 1]]
    assert figure.axes[1].get_ylabel() == "layer"


@pytest.mark.parametrize(
    ("options", "values", "limits"),
    [
        ({}, ([1.0, 2.0], [5.0, math.nan]), (1, 5)),
        ({"low": 0}, ([1.0, 2.0],), (0, 2)),
        ({}, ([math.nan],), (0.1, 1)),
        ({"log": True}, ([0.0, 2.0, 2.0],), (2, 2.002)),
        ({"log": True}, ([-1.0, math.inf],), (0.1009, 1)),
        ({"low": 3, "high": 7, "log": True}, ([2.0, 9.0],), (3, 7)),
        # A thousandth lies below the darkest colour.
        ({"log": True}, (np.geomspace(1, 10, 1001),), (10**0.001, 10)),
        # Zero has the middle colour.
        ({"signed": True}, ([-0.5, 2.0], [-3.0, math.nan]), (-2.998, 2.998)),
        ({"signed": True}, (np.linspace(-100, 20, 1001),), (-99.88, 99.88)),
        ({"signed": True}, ([0.0],), (-1, 1)),
        ({"signed": True, "high": 4}, ([0.0, 9.0],), (-4, 4)),
    ],
)
def test_the_colours_of_maps_hold_what_is_known_of_all_panels(options, values, limits):
    panels = {str(n): np.array([row]) for n, row in enumerate(values)}
    figure = heat_maps(panels, ColourScale("label", **options), Grid(x="x", y="y"))
    norm = figure.axes[0].images[0].norm
    assert (norm.vmin, norm.vmax) == pytest.approx(limits)
    assert ("Log" in type(norm).__name__) == ("log" in options)


def test_only_the_first_group_of_points_has_its_colour():
    """Keys, and then more groups of queries than there are colours."""
    groups = {str(n): np.array([[0.0, n]]) for n in range(15)}
    (axes,) = draw([Panel(points=groups)]).axes
    keys, *queries = (tuple(cloud.get_facecolor()[0]) for cloud in axes.collections)
    assert keys not in queries
    assert queries[:6] == queries[6:12]
    assert len({*queries}) == 6


@pytest.mark.parametrize("name", ["_run", "run"])
def test_every_name_is_in_the_legend(name):
    figure = draw(
        [Panel("", [Line(name, 0, [1, 2], [1, 2])], points={f"{name}s": np.ones((1, 2))})]
    )
    assert [label.strip() for label in labels(figure)] == [name, f"{name}s"]


def test_a_narrow_figure_is_no_taller_than_a_page():
    use_style("single")
    try:
        heights = [draw([Panel()] * n, Grid(2, 1.7)).get_size_inches()[1] for n in (2, 9)]
    finally:
        use_style()
    assert heights == [pytest.approx(3.7), 9]
    wide = draw([Panel()] * 14, Grid(2, 1.7))
    assert wide.get_size_inches().tolist() == pytest.approx([6.75, 12.2])


def test_maps_with_names_have_row_0_at_the_top_and_a_ground_without_numbers():
    names = ["one", "two", "three"], ["first", "second"]
    panel = {"map": np.array([[1, 2, 3], [4, 5, math.nan]])}
    axes, _ = heat_maps(panel, ColourScale("score"), Grid(share=True), names=names).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == names[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == names[1]
    assert axes.get_yticks().tolist() == [0, 1]
    low, high = axes.get_ylim()
    assert low > high
    (image,) = axes.images
    assert image.cmap.get_bad()[3] == 0
    assert mpl.colors.to_hex(axes.get_facecolor()) == UNKNOWN


def test_a_logarithmic_bar_has_ticks_at_1_2_and_5():
    values = np.array([[1.0, 10.0, 100.0]])
    figure = heat_maps({"": values}, ColourScale("norm", log=True), Grid())
    label = figure.axes[-1].yaxis.get_minor_formatter()
    shown = {value: label(value, None) for value in (2.0, 3.0, 5.0, 0.2, 15.0, 50.0)}
    assert shown == {2.0: "2", 3.0: "", 5.0: "5", 0.2: "0.2", 15.0: "", 50.0: "50"}


def test_maps_share_a_bar():
    """A cell covers two positions along x, the first ones being 0 and 1, and four along y."""
    panels = {"one": np.array([[1.0, 2.0, 3.0], [4.0, math.nan, 6.0]]), "two": np.array([[9.0]])}
    figure = heat_maps(panels, ColourScale("entropy"), Grid(x="key", y="query"), cell=(2, 4))
    one, two, bar = figure.axes
    (image,), (other,) = one.images, two.images
    assert (one.get_title(), bar.get_ylabel()) == ("one", "entropy")
    assert image.get_array().tolist() == [[1, 2, 3], [4, None, 6]]
    assert image.get_extent() == [-0.5, 5.5, 7.5, -0.5]
    assert (image.norm.vmin, other.norm.vmax) == (1, 9)
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("key", "query")


def test_titles_of_four_maps_beside_each_other_do_not_touch():
    panels = {f"SmolLM2-135M-Instruct +\n{n}": np.eye(2) for n in range(4)}
    grid = Grid(4, 2.0, x="length", y="depth", share=True)
    names = (["1×", "2×"], ["0", "100"])
    figure = heat_maps(panels, ColourScale("success (%)"), grid, names=names)
    figure.draw_without_rendering()
    boxes = [axes.title.get_window_extent() for axes in figure.axes[:4]]
    assert all(one.x1 + 5 < two.x0 for one, two in pairwise(boxes))


def test_a_picture_is_white_and_fine_and_a_drawing_says_nothing_of_its_making(tmp_path):
    figure = draw([Panel("", [Line("a", 0, [1, 2], [1, 2])])], Grid(height=1.7))
    drawing = save(figure, tmp_path / "a")
    image = Image.open(tmp_path / "a.png")
    assert image.size == (2025, 600)
    assert image.convert("RGB").getpixel((0, 0)) == (255,) * 3
    assert "Software" not in image.info
    text = drawing.read_text()
    assert "<dc:date>" not in text
    assert "<dc:creator>" not in text
    assert ">a</text>" in text
    assert b"/CreationDate" not in (tmp_path / "a.pdf").read_bytes()


def test_figures_have_the_width_font_and_size_that_are_asked_for(tmp_path):
    use_style("single", "serif", 9)
    try:
        figure = draw([Panel(title, [Line("a", 0, [1, 2], [1, 2])]) for title in "ab"])
        drawing = save(figure, tmp_path / "a")
    finally:
        use_style()
    assert figure.get_size_inches()[0] == 3.3
    assert len({axes.get_position().y0 for axes in figure.axes}) == 2  # one below the other
    text = drawing.read_text()
    assert "font-size: 9px; font-family: 'STIXGeneral'" in text


def test_labels_at_the_ends_of_lines_do_not_touch_and_context_has_none():
    lines = [
        Line(name, n, [1, 2], [0, y])
        for n, (name, y) in enumerate(zip("abc", (1, 1, 0.9), strict=True))
    ]
    lines.append(Line("context", 3, [1, 2], [1, 0], is_context=True))
    figure = draw([Panel("", lines)], Grid(narrow=True), label_ends=True)
    (axes,) = figure.axes
    assert figure.legends == []
    assert sorted(text.get_text() for text in axes.texts) == ["a", "b", "c"]
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes))


def test_labels_at_the_ends_leave_the_limits_and_the_room_of_their_rows():
    names = ["a name that needs two rows", "another name of two rows", "b"]
    lines = [Line(name, n, [1, 2], [0, 1]) for n, name in enumerate(names)]
    panel = Panel("", lines, prepare=lambda axes: axes.set_ylim(-1, 2))
    figure = draw([panel], Grid(height=3.0), label_ends=True)
    (axes,) = figure.axes
    assert axes.get_ylim() == (-1, 2)
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes))


def test_a_legend_of_many_rows_makes_the_figure_taller():
    def height(names):
        lines = [Line(f"{n} {'x' * 90}", n, [1, 2], [1, 2]) for n in range(names)]
        return draw([Panel("", lines)]).get_size_inches()[1]

    assert height(1) == height(3)
    assert height(5) == pytest.approx(height(3) + 2 * 0.16)


def test_a_label_stands_at_the_last_number_of_a_line():
    lines = [
        Line("whole", 1, [1, 2, 3], [0, 1, 3]),
        Line("ends early", 2, [1, 2, 3], [0, 2, math.nan]),
        Line("empty", 3, [1, 2, 3], [math.nan] * 3),
    ]
    (axes,) = draw([Panel("", lines)], label_ends=True).axes
    places = {text.get_text(): text.xy[1] for text in axes.texts}
    low, high = axes.get_ylim()
    assert places == {
        "whole": pytest.approx((3 - low) / (high - low)),
        "ends early": pytest.approx((2 - low) / (high - low)),
    }


def test_the_first_panel_may_have_no_points():
    full = graded("full", np.array([[1, 2]]), np.ones((1, 2)), np.array([[3, 5]]))
    figure = draw([Panel("empty"), full], index="layer")
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "layer"
    assert bar.get_ylim() == (0, 5)
    less = graded("less", np.array([[1]]), np.ones((1, 1)), np.array([[2]]))
    assert draw([full, less], index="layer").axes[-1].get_ylim() == (0, 5)


def test_only_short_lines_have_markers():
    lines = [Line(str(n), 1, range(n), range(n)) for n in (16, 17)]
    short, long = draw([Panel("", lines)]).axes[0].lines
    assert (short.get_marker(), long.get_marker()) == ("s", "")


def test_counts_have_integer_ticks():
    figure = draw([Panel("", [Line("a", 0, range(3), [0.1, 0.2, 0.3])], "layer")])
    assert all(tick == round(tick) for tick in figure.axes[0].get_xticks())


NAME = r"costs $\frac$ or \$5"
"""As a formula it has no meaning, and matplotlib would refuse it."""


def test_dollars_in_a_name_begin_no_formula(tmp_path):
    lines = [Line(NAME, 0, (1, 10), (1, 2)), Line("b", 1, (1, 10), (2, 1))]
    figure = draw([Panel("", lines)])
    save(figure, tmp_path / "figure")
    shown = [text.get_text() for text in figure.findobj(Text)]
    assert NAME in shown
    assert (tmp_path / "figure.svg").is_file()


def test_a_logarithmic_axis_of_a_plugin_has_numbers(tmp_path):
    line = Line("a", 0, (1, 1000), (1, 1000))
    figure = draw([Panel("", [line], prepare=lambda axes: axes.set_yscale("log"))])
    for name in ("once", "twice"):
        drawing = re.sub("<!--.*?-->", "", save(figure, tmp_path / name).read_text(), flags=re.S)
        assert "mathdefault" not in drawing
        assert "font-size: 4.9px" in drawing  # exponents


def test_what_many_pages_show_has_one_look_and_a_checkpoint_that_of_its_run():
    assert style_numbers(["DroPE", "RoPE"]) == {"DroPE": 4, "RoPE": 0}
    names = ["mine", "RoPE (before-drop)", "DroPE"]
    assert style_numbers(names) == {"mine": 1, "RoPE (before-drop)": 0, "DroPE": 4}
    before = style_numbers(["RoPE (before its drop)", "RoPE (before its drop) + YaRN"])
    assert before == {"RoPE (before its drop)": 0, "RoPE (before its drop) + YaRN": 3}
    assert style_numbers(["RoPE (a)", "RoPE (b)", "RoPE"]) == {
        "RoPE": 0,
        "RoPE (a)": 1,
        "RoPE (b)": 2,
    }


@given(st.lists(st.sampled_from([*STYLE_NUMBERS, "a", "b", "RoPE (a)", "RoPE (b)"]), unique=True))
def test_no_two_names_look_alike(names):
    assert len(set(style_numbers(names).values())) == len(style_numbers(names)) == len(names)
