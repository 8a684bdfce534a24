"""Figures of analyses: what is drawn is what was given."""

import numpy as np
import pytest

from tests.report.described import check
from trainer.plotting.lines import Frame, Panel, Series, by_length, over_heads
from trainer.plotting.points import GroupCloud, group_clouds, histogram


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
        assert 64 in [one.get_xdata()[0] for one in axes.lines]
        # The band, and eight thin lines as one picture.
        band, thin = axes.collections[::-1]
        assert thin.get_rasterized()
        assert len(thin.get_segments()) == 8
        low, high = band.get_datalim(axes.transData).intervaly
        assert (low, high) == pytest.approx((min(line.low), max(line.high)))
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["heads", "training length (64 tokens)"]


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


def test_panels_by_length_as_a_whole():
    """The second has no band and no thin lines, the fourth stands below; the rest is empty."""
    band = Series("mean", 1, [1024, 1536, 4096], [2, 3, 4], low=[1, 2, 3], high=[3, 4, 5])
    plain = Series("other", 2, [1024, 4096], [1, 1], low=None, high=[2, 2], marked=False)
    faint = np.array([[1, 1, 1], [5, 5, 5]])
    panels = [
        Panel("a", [band, plain], Frame("", "norm", lambda axes: axes.set_ylim(0, 8)), faint),
        *(Panel(title, [plain], Frame("", "share")) for title in "bcd"),
    ]
    check(
        by_length(panels, x_label="length", trained=2048),
        """
        panel 1,1 of 2x3 'a'
          x log
          y linear 'norm'
          lines: 1024 1, 1536 1, 4096 1; 1024 5, 1536 5, 4096 5
          area: 1024 3, 1024 1, 1536 2, 4096 3, 4096 5, 4096 5, 1536 4, 1024 3, 1024 3
          line: x 1024 1536 4096; y 2 3 4
          line: x 1024 4096; y 1 1
          line: upright at 2048
        panel 1,2 of 2x3 'b'
          x log
          y linear 'share'
          line: x 1024 4096; y 1 1
          line: upright at 2048
        panel 1,3 of 2x3 'c'
          x log
          y linear 'share'
          line: x 1024 4096; y 1 1
          line: upright at 2048
        panel 2,1 of 2x3 'd'
          x log
          y linear 'share'
          line: x 1024 4096; y 1 1
          line: upright at 2048
        below 'length'
        legend 'mean', 'other', 'training length (2,048 tokens)'
        """,
    )


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
