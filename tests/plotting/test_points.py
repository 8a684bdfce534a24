"""Points of heads, pairs and clouds, and histograms."""

import numpy as np
import pytest

from tests.report.described import check
from trainer.plotting.points import (
    GroupCloud,
    HeadCloud,
    group_clouds,
    head_points,
    histogram,
    layer_panels,
    pair_scatter,
)


def test_points_of_heads_have_the_colour_of_their_layer():
    clouds = [
        HeadCloud.of_layers(
            *(np.array([[0.0, 1], [2, 3]]), np.array([[1.0, 1], [4, -1]])),
            *("x", "y", "kept"),
            diagonal=True,
        ),
        HeadCloud.of_layers(np.array([[0.0, 1], [2, 4]]), np.ones((2, 2)), "u", "v", "lost"),
    ]
    check(
        head_points(clouds, 2),
        """
        panel 1,1 of 1x2 'kept'
          x linear 'x'
          y linear 'y'
          line: x -1 4; y -1 4
          points 0..1 of 0 0 1 1: x 0 1 2 3; y 1 1 4 -1
        panel 1,2 of 1x2 'lost'
          x linear 'u'
          y linear 'v'
          points 0..1 of 0 0 1 1: x 0 1 2 4; y 1 1 1 1
        bar 'layer' 0..1
        """,
    )


def test_heads_of_a_model_of_one_layer_have_a_scale_too():
    cloud = HeadCloud(np.array([0, 0]), np.array([1.0, 2]), np.array([3.0, 4]), "x", "y")
    assert head_points([cloud], 1).axes[0].collections[0].norm.vmax == 1


def test_panels_of_a_row_of_clouds_share_one_scale():
    points = np.random.default_rng(0).normal(size=(2, 30, 2))
    origin = np.zeros(2)
    row = [GroupCloud(str(i), {"keys": scale * points[0], "queries": points[1] + 3}, origin)
           for i, scale in enumerate((1, 5))]  # fmt: skip
    first, second = group_clouds({"a head": row}).axes
    assert first.get_xlim() == second.get_xlim()
    everything = np.concatenate([5 * points[0], points[0], points[1] + 3])
    for limits, values in zip((first.get_xlim(), first.get_ylim()), everything.T, strict=True):
        assert np.mean(limits) == pytest.approx((values.min() + values.max()) / 2)
    assert np.ptp(first.get_xlim()) == pytest.approx(np.ptp(first.get_ylim()))
    drawn = np.concatenate([c.get_offsets() for axes in (first, second) for c in axes.collections])
    expected = np.concatenate([points[0], points[1] + 3, 5 * points[0], points[1] + 3])
    np.testing.assert_allclose(np.sort(np.asarray(drawn), axis=0), np.sort(expected, axis=0))
    assert all(c.get_rasterized() for c in first.collections)


def test_a_histogram_as_a_whole():
    """Twenty bins, of five each; the last of three groups has no colour left and is not drawn."""
    groups = {"keys": np.array([0.0, 100.0]), "queries": np.array([52.0]), "more": np.zeros(1)}
    check(
        histogram(groups, "angle", low=0, high=100),
        """
        panel 1,1 of 1x1
          x linear 'angle'
          y linear 'heads (%)'
          area 'keys': 0 50, 5 50, 95 50, 100 50
          line: upright at 50
          area 'queries': 50 100, 55 100
          line: upright at 52
        legend 'keys', 'queries'
        """,
    )


def test_six_groups_of_queries_have_four_colours_in_turn():
    groups = {str(number): np.ones((2, 2)) * number for number in range(6)}
    figure = group_clouds({"row": [GroupCloud("head", groups, np.zeros(2))]})
    handles = figure.legends[0].legend_handles
    assert [handle.get_label() for handle in handles] == [*groups, "origin"]
    colours = [handle.get_color() for handle in handles]
    assert len({*colours[:5]}) == 5
    assert colours[5] == colours[1]


def test_pairs_of_heads_by_measure_and_layer():
    values = np.array([[0.1, 0.2], [0.3, 0.4]])
    panels = {
        "queries": {"layer 0": values, "layer 5": values / 2},
        "keys": {"layer 0": np.array([[1.0]])},
    }
    check(
        pair_scatter(panels, {"keys": (0.25, 0.75)}, "pair"),
        """
        panel 1,1 of 2x2 'layer 0'
          x linear
          y linear 'queries'
          points 0..1 of 0 0 1 1: x 0 1 0 1; y 0.1 0.2 0.3 0.4
        panel 1,2 of 2x2 'layer 5'
          x linear
          y linear
          points 0..1 of 0 0 1 1: x 0 1 0 1; y 0.05 0.1 0.15 0.2
        panel 2,1 of 2x2
          x linear
          y linear 'keys'
          points 0..1 of 0: x 0; y 1
          line: level at 0.25
          line: level at 0.75
        panel 2,2 of 2x2
          x linear
          y linear
        bar 'head' 0..1
        below 'pair'
        """,
    )


def test_what_is_no_head_has_names():
    figure = pair_scatter({"m": {"t": np.zeros((2, 1))}}, {}, "pair", ("kind", ("low", "high")))
    (_, bar) = figure.axes
    assert bar.get_ylabel() == "kind"
    assert [text.get_text() for text in bar.get_yticklabels()] == ["low", "high"]


def test_a_bar_of_many_heads_has_at_most_nine_ticks():
    for heads in (2, 9, 10, 28):
        figure = pair_scatter({"m": {"t": np.zeros((heads, 1))}}, {}, "pair")
        ticks = figure.axes[1]._colorbar.get_ticks()
        assert len(ticks) <= 9
        assert (ticks == ticks.round()).all()


def test_many_layers_stand_six_in_a_row():
    for layers, shape in ((16, (4, 4)), (17, (3, 6))):
        panels = {str(layer): np.zeros((1, 1)) for layer in range(layers)}
        first = layer_panels(panels, (0.5,), "x", "y").axes[0]
        assert first.get_subplotspec().get_gridspec().get_geometry() == shape
        assert first.get_ylim() == (0, 1.02)
        assert first.lines[0].get_ydata() == [0.5, 0.5]
