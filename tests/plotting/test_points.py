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
            "kept", np.array([[0.0, 1], [2, 3]]), np.array([[1.0, 1], [4, -1]]), "x", "y", True
        ),
        HeadCloud.of_layers("lost", np.array([[0.0, 1], [2, 4]]), np.ones((2, 2)), "u", "v"),
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


def test_some_heads_of_a_model_of_one_layer_are_one_narrow_panel():
    cloud = HeadCloud("t", np.array([0, 0]), np.array([1.0, 2]), np.array([3.0, 4]), "x", "y")
    check(
        head_points([cloud], 1),
        """
        panel 1,1 of 1x1 't'
          x linear 'x'
          y linear 'y'
          points 0..1 of 0 0: x 1 2; y 3 4
        bar 'layer' 0..1
        """,
    )


def test_panels_of_a_row_of_clouds_share_one_scale():
    points = np.random.default_rng(0).normal(size=(2, 30, 2))
    origin = np.zeros(2)
    row = [GroupCloud(str(i), {"keys": scale * points[0], "queries": points[1] + 3}, origin)
           for i, scale in enumerate((1, 5))]  # fmt: skip
    first, second = group_clouds({"a head": row}).axes
    assert first.get_xlim() == second.get_xlim()
    everything = np.concatenate([5 * points[0], points[0], points[1] + 3])
    for limits, of in zip((first.get_xlim(), first.get_ylim()), everything.T, strict=True):
        assert np.mean(limits) == pytest.approx((of.min() + of.max()) / 2)
    assert np.ptp(first.get_xlim()) == pytest.approx(np.ptp(first.get_ylim()))
    drawn = np.concatenate([c.get_offsets() for axes in (first, second) for c in axes.collections])
    given = np.concatenate([points[0], points[1] + 3, 5 * points[0], points[1] + 3])
    np.testing.assert_allclose(np.sort(np.asarray(drawn), axis=0), np.sort(given, axis=0))
    assert all(c.get_rasterized() for c in first.collections)


def test_a_histogram_shows_shares_of_each_group():
    figure = histogram(
        {"keys": np.full(3, 12.0), "queries": np.full(9, 62.0)}, "x", low=0, high=100
    )
    heights = [patch.get_xy()[:, 1].max() for patch in figure.axes[0].patches]
    assert heights == pytest.approx([100, 100])


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


def test_clouds_as_a_whole():
    """A row has the scale of all its points: 1.1 times the widest extent, around their middle."""
    square = np.array([[0.0, 0.0], [4.0, 10.0]])
    rows = {
        "layer 0": [
            GroupCloud("head 0", {"keys": square, "queries": square + 1}, np.array([1, 2])),
            GroupCloud("head 1", {"keys": square}, np.array([0, 0])),
        ],
        "layer 1": [GroupCloud("head 2", {"keys": square[:1], "q2": square[1:]}, np.array([2, 2]))],
    }
    check(
        group_clouds(rows),
        """
        panel 1,1 of 2x2 'head 0'
          x linear
          y linear 'layer 0'
          points: x 0 4; y 0 10
          points: x 1 5; y 1 11
          line: x 1; y 2
        panel 1,2 of 2x2 'head 1'
          x linear
          y linear
          points: x 0 4; y 0 10
          line: x 0; y 0
        panel 2,1 of 2x2 'head 2'
          x linear
          y linear 'layer 1'
          points: x 0; y 0
          points: x 4; y 10
          line: x 2; y 2
        legend 'keys', 'queries', 'q2', 'origin'
        """,
    )


def test_six_groups_of_queries_have_four_colours_in_turn():
    groups = {str(number): np.ones((2, 2)) * number for number in range(6)}
    figure = group_clouds({"row": [GroupCloud("head", groups, np.zeros(2))]})
    check(
        figure,
        """
        panel 1,1 of 1x1 'head'
          x linear
          y linear 'row'
          points: x 0 0; y 0 0
          points: x 1 1; y 1 1
          points: x 2 2; y 2 2
          points: x 3 3; y 3 3
          points: x 4 4; y 4 4
          points: x 5 5; y 5 5
          line: x 0; y 0
        legend '0', '1', '2', '3', '4', '5', 'origin'
        """,
    )


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
    for heads, ticks in ((9, range(9)), (10, range(0, 10, 2)), (28, range(0, 28, 4))):
        figure = pair_scatter({"m": {"t": np.zeros((heads, 1))}}, {}, "pair")
        assert figure.axes[1]._colorbar.get_ticks().tolist() == list(ticks)


def test_a_small_panel_for_every_layer():
    """Five in rows of four: of those above the gap the last have the labels of their columns."""
    panels = {str(layer): np.array([[0.5, layer / 4]]) for layer in range(5)}
    check(
        layer_panels(panels, (0.5,), "pair", "entropy"),
        """
        panel 1,1 of 2x4 '0'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0
          line: level at 0.5
        panel 1,2 of 2x4 '1'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0.25
          line: level at 0.5
        panel 1,3 of 2x4 '2'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0.5
          line: level at 0.5
        panel 1,4 of 2x4 '3'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0.75
          line: level at 0.5
        panel 2,1 of 2x4 '4'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 1
          line: level at 0.5
        bar 'head' 0..1
        below 'pair'
        left 'entropy'
        """,
    )


def test_many_layers_stand_six_in_a_row():
    for layers, shape in ((16, (4, 4)), (17, (3, 6))):
        panels = {str(layer): np.zeros((1, 1)) for layer in range(layers)}
        spec = layer_panels(panels, (), "x", "y").axes[0].get_subplotspec()
        assert spec.get_gridspec().get_geometry() == shape
