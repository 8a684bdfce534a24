"""Figures of analyses: what is drawn is what was given."""

import numpy as np
import pytest

from trainer.report.geometry.drawing import Cloud, Panel, by_length, clouds, histogram, over_heads


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
    panels = [Panel(title, "y", [line], np.ones((8, 3))) for title in "abcd"]
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
    row = [Cloud(str(i), {"keys": scale * points[0], "queries": points[1] + 3}, origin)
           for i, scale in enumerate((1, 5))]  # fmt: skip
    first, second = clouds({"a head": row}).axes
    assert first.get_xlim() == second.get_xlim()
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
