"""Figures of rotary pairs in two models, as wholes."""

import math

import numpy as np

from tests.report.described import check
from trainer.analysis.offset_features import drawing
from trainer.analysis.offset_features.drawing import (
    Changes,
    Contributions,
    OnePair,
    PairCloud,
    Radii,
    by_distance,
    changes_by_pair,
    clouds,
    pairs_in_both,
    radius_and_angle,
)


def test_changes_of_radius_and_angle_by_pair():
    """Of a pair the layers stand beside each other, three tenths of its width to either side."""
    found = Changes(
        layer=np.array([0, 2, 2, 0]),
        pair=np.array([0, 0, 1, 1]),
        radius=np.array([1.0, 3.0, 0.0, -2.0]),
        angle=np.array([0.5, -0.5, math.nan, 0.25]),
    )
    check(
        changes_by_pair(found, {"before": (1, 2), "after": (2,)}),
        """
        panel 1,1 of 2x1
          x linear
          y linear 'change of the radius'
          points 0..2 of 0 2 2 0: x -0.3 0.3 1.3 0.7; y 1 3 0 -2
          line: level at 0
          line 'upper bound, before': upright at 0.5
          line: upright at 1.5
          line 'upper bound, after': upright at 1.5
          line 'median over heads': x 0 1; y 2 -1
        panel 2,1 of 2x1
          x linear 'pair index, from the fastest on'
          y linear 'change of the angle φ (rad)'
          points 0..2 of 0 2 nan 0: x -0.3 0.3 nan 0.7; y 0.5 -0.5 nan 0.25
          line: level at 0
          line 'upper bound, before': upright at 0.5
          line: upright at 1.5
          line 'upper bound, after': upright at 1.5
        bar 'layer' 0..2
        legend 'upper bound, before', 'upper bound, after', 'median over heads'
        """,
    )


def test_a_model_of_one_layer_has_a_scale_too():
    one = np.zeros(1)
    axes = changes_by_pair(Changes(one, one, one, one), {"a": (), "b": ()}).axes[0]
    assert axes.collections[0].norm.vmax == 1
    assert axes.collections[0].get_offsets().tolist() == [[-0.3, 0]]


def test_one_pair_in_both_models():
    """No line where the angle went round: from 6 over 2 pi to 0.25, or the long way."""
    panels = [
        OnePair(7, np.array([[1.0, 2], [3, 4]]), np.array([[6.0, 1], [0.25, 2]]), (4.5, None)),
        OnePair(8, np.array([[1.0], [1.0]]), np.array([[1.0], [1 + math.pi]]), (None, 4.0)),
    ]
    check(
        pairs_in_both(panels, ("RoPE", "DroPE")),
        """
        panel 1,1 of 1x2 'pair 7'
          x linear 'radius of the mean key'
          y linear 'angle φ, query to key (rad)'
          lines: 2 1, 4 2
          points 'RoPE': x 1 2; y 6 1
          line: level at 4.5
          points 'DroPE': x 3 4; y 0.25 2
        panel 1,2 of 1x2 'pair 8'
          x linear 'radius of the mean key'
          y linear
          lines: none
          points 'RoPE': x 1; y 1
          points 'DroPE': x 1; y 4.142
          line: level at 4
        legend 'RoPE', 'DroPE'
        """,
    )


def test_pairs_by_their_index_and_by_their_turns():
    """The largest radius is drawn last, the slowest pairs stand right."""
    found = Radii(
        pair=np.array([0, 1, 2]),
        turns=np.array([8.0, 2.0, 0.5]),
        radius=np.array([1.0, 4.0, 2.0]),
        angle=np.array([0.0, math.pi, 5.0]),
    )
    lower = np.array([2, 3]), np.array([1.5 * math.pi, 4.0])
    check(
        radius_and_angle(found, (0.5, 1.5), (2,), lower),
        """
        panel 1,1 of 2x2
          x linear
          y linear 'radius of the mean key'
          points: x 0 2 1; y 1 2 4
          line: level at 0.5
          line: level at 1.5
          line: upright at 1.5
        panel 1,2 of 2x2
          x log
          y linear
          points: x 8 0.5 2; y 1 2 4
          line: level at 0.5
          line: level at 1.5
          line 'upper bound 2π/C': upright at 1
        panel 2,1 of 2x2
          x linear 'pair index, from the fastest on'
          y linear 'angle φ, query to key (rad)'
          points 1..4 of 1 2 4: x 0 2 1; y 0 5 3.142
          points: x 2 3; y 4.712 4
          line: upright at 1.5
        panel 2,2 of 2x2
          x log 'turns within the context, θC/2π (logarithmic)'
          y linear
          points 1..4 of 1 2 4: x 8 0.5 2; y 0 5 3.142
          line 'lower bound π + θC/2': x 200 from 0.5 to 1; y 200 from 4.712 to 6.283
          line 'upper bound 2π/C': upright at 1
        bar 'radius of the mean key' 1..4
        legend 'lower bound π + θC/2', 'upper bound 2π/C'
        """,
    )


def test_the_lower_bound_begins_at_half_a_turn_or_at_the_slowest_pair():
    for turns, least in (([2.0, 4.0], 0.5), ([0.125, 2.0], 0.125)):
        some = np.zeros(2)
        found = Radii(np.arange(2), np.array(turns), some, some)
        axes = radius_and_angle(found, (), (), (np.array([]), np.array([]))).axes[3]
        (bound,) = (line for line in axes.lines if str(line.get_label()).startswith("lower"))
        assert bound.get_xdata()[0] == least
        assert bound.get_ydata()[0] == math.pi * (1 + least)
        assert bound.get_ydata()[-1] == 2 * math.pi


QUERY, KEY = np.array([[3.0, 3.0], [3.0, 5.0]]), np.array([[-2.0, 0.0], [0.0, 0.0]])
"""Means (3, 4), of length 5, and (-1, 0)."""


def test_a_cloud_has_its_means_and_the_turn_of_the_query():
    """From 53.13 degrees on by a quarter turn; two radians more than a whole turn are one."""
    panels = [
        PairCloud("slow", QUERY, KEY, np.pi / 2),
        PairCloud("fast", QUERY, KEY, 2 * np.pi + 2),
    ]
    check(
        clouds(panels),
        """
        panel 1,1 of 1x2 'slow'
          x linear
          y linear
          points: x 3 3; y 3 5
          points: x -2 0; y 0 0
          arrow: 0 0 to 3 4
          line: x 3; y 4
          arrow: 0 0 to -1 0
          line: x -1; y 0
          arc: 6 x 6 around 0 0, 53.13 to 143.1 degrees
          line 'key of the first token': x -2; y 0
          line: level at 0
          line: upright at 0
        panel 1,2 of 1x2 'fast'
          x linear
          y linear
          points: x 3 3; y 3 5
          points: x -2 0; y 0 0
          arrow: 0 0 to 3 4
          line: x 3; y 4
          arrow: 0 0 to -1 0
          line: x -1; y 0
          arc: 6 x 6 around 0 0, 53.13 to 413.1 degrees
          line 'key of the first token': x -2; y 0
          line: level at 0
          line: upright at 0
        below 'first channel'
        left 'second channel'
        legend 'queries', 'keys', 'turn of the query within C', 'key of the first token'
        """,
    )


def test_clouds_of_all_pairs_of_a_head_are_small():
    """Five in rows of three: the last place stays empty."""
    panels = [PairCloud(f"pair {n}", QUERY, KEY, 1.0) for n in range(5)]
    figure = clouds(panels, small=True)
    assert [axes.get_title() for axes in figure.axes] == [f"pair {n}" for n in range(5)]
    for axes in figure.axes[1:]:
        axes.remove()
    check(
        figure,
        """
        panel 1,1 of 2x3 'pair 0'
          x linear
          y linear
          points: x 3 3; y 3 5
          points: x -2 0; y 0 0
          line: x 0 3; y 0 4
          line: x 3; y 4
          line: x 0 -1; y 0 0
          line: x -1; y 0
          arc: 6 x 6 around 0 0, 53.13 to 110.4 degrees
          line 'key of the first token': x -2; y 0
          line: level at 0
          line: upright at 0
        below 'first channel'
        left 'second channel'
        legend 'queries', 'keys', 'turn of the query within C', 'key of the first token'
        """,
    )


def test_clouds_stand_in_rows(monkeypatch):
    def shape(figure):
        return figure.axes[0].get_subplotspec().get_gridspec().get_geometry()

    one = PairCloud("", QUERY, KEY, 1.0)
    assert shape(clouds([one] * 4)) == (2, 3)
    assert shape(clouds([one])) == shape(clouds([one], small=True)) == (1, 1)
    assert shape(clouds([one] * 3, small=True)) == (2, 2)
    monkeypatch.setattr(drawing, "MANY", 1)
    assert shape(clouds([one] * 3, small=True)) == (3, 1)


def test_what_pairs_add_to_a_logit_by_distance():
    heads = [
        Contributions("head 1", np.array([0, 9]), np.array([[1.0, 2], [4, 8]]), 1),
        Contributions("head 2", np.array([0, 9]), np.array([[0.5, 0.5]]), 0),
    ]
    check(
        by_distance(heads, 4),
        """
        panel 1,1 of 2x2 'head 1'
          x log
          y linear 'part of the logit'
          lines: 1 1, 10 2; 1 4, 10 8
          line 'the feature': x 1 10; y 4 8
          line: level at 0
          line: upright at 4
        panel 1,2 of 2x2
          x log
          y linear
          line 'all pairs': x 1 10; y 5 10
          line 'all but the feature': x 1 10; y 1 2
          line: level at 0
          line: upright at 4
        panel 2,1 of 2x2 'head 2'
          x log
          y linear 'part of the logit'
          lines: 1 0.5, 10 0.5
          line 'the feature': x 1 10; y 0.5 0.5
          line: level at 0
          line: upright at 4
        panel 2,2 of 2x2
          x log
          y linear
          line 'all pairs': x 1 10; y 0.5 0.5
          line 'all but the feature': x 1 10; y 0 0
          line: level at 0
          line: upright at 4
        bar 'pair index' 0..1
        below 'distance between query and key + 1 (tokens, logarithmic)'
        legend 'the feature', 'all pairs', 'all but the feature'
        """,
    )
