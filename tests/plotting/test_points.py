"""Scatter plots by group or by number, and histograms."""

from __future__ import annotations

import numpy as np

from trainer.plotting.lines import Frame
from trainer.plotting.points import Points, diagonal, histogram, plane, points


def test_points_of_groups_have_a_legend_and_those_of_an_index_a_bar():
    frame = Frame("x", "y", diagonal, horizontal=((2.0, ""),))
    groups = {"keys": np.array([[0, 1], [2, 3]]), "queries": np.array([[4.0, 5]])}
    figure = points([Points("clouds", groups, frame), Points("more", groups)])
    first = figure.axes[0]
    keys, queries = first.collections
    assert keys.get_offsets().tolist() == [[0, 1], [2, 3]]
    assert queries.get_offsets().tolist() == [[4, 5]]
    assert (first.get_title(), first.get_xlabel(), first.get_ylabel()) == ("clouds", "x", "y")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["keys", "queries"]
    *_, line, level = first.lines
    np.testing.assert_array_equal(line.get_xdata(), line.get_ydata())
    assert list(level.get_ydata()) == [2, 2]

    layer = np.array([[0], [1]])
    graded = Points.graded("", np.array([[1, 2], [3, 4]]), np.ones((2, 2)), layer)
    figure = points([graded], index="layer")
    cloud = figure.axes[0].collections[0]
    assert cloud.get_array().tolist() == [0, 0, 1, 1]
    assert cloud.get_offsets().tolist() == [[1, 1], [2, 1], [3, 1], [4, 1]]
    assert figure.axes[1].get_ylabel() == "layer"


def test_a_plane_has_one_scale_around_its_middle():
    limits = plane(2.0, np.array([1.0, -1.0]))
    panel = Points("", {"keys": np.zeros((1, 2))}, Frame("", "", limits))
    (axes,) = points([panel]).axes
    assert (axes.get_xlim(), axes.get_ylim()) == ((-1, 3), (-3, 1))


def test_a_histogram_has_shares_and_means():
    figure = histogram({"keys": np.array([5.0, 5, 95]), "queries": np.array([50.0])}, "%", low=0,
                       high=100)  # fmt: skip
    (axes,) = figure.axes
    assert [line.get_xdata()[0] for line in axes.lines] == [35, 50]
    tops = axes.patches[0].get_xy()[:, 1]
    assert tops.max() == 100 * 2 / 3
