"""Figures of rotary pairs in two models, as wholes."""

import math

import numpy as np

from tests.report.described import check, described
from trainer.analysis.offset_features import drawing
from trainer.analysis.offset_features.drawing import (
    Changes,
    Contributions,
    Method,
    OnePair,
    PairCloud,
    Radii,
    by_distance,
    changes_by_pair,
    clouds,
    extended_bounds,
    pairs_in_both,
    radius_and_angle,
    radius_and_variance,
    small_clouds,
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
          points #440154-#b0dd2f 0..2 of 0 2 2 0: x -0.3 0.3 1.3 0.7; y 1 3 0 -2 as a
              picture
          line #707070 -: level at 0
          line 'upper bound, before' #000000 --: upright at 0.5
          line #000000 --: upright at 1.5
          line 'upper bound, after' #000000 :: upright at 1.5
          line 'median over heads' #d55e00 -: x 0 1; y 2 -1
        panel 2,1 of 2x1
          x linear 'pair index, from the fastest on'
          y linear 'change of the angle φ (rad)'
          points #440154-#b0dd2f 0..2 of 0 2 nan 0: x -0.3 0.3 nan 0.7; y 0.5 -0.5 nan 0.25
              as a picture
          line #707070 -: level at 0
          line 'upper bound, before' #000000 --: upright at 0.5
          line #000000 --: upright at 1.5
          line 'upper bound, after' #000000 :: upright at 1.5
        bar 'layer' #440154-#b0dd2f 0..2
        legend
          'upper bound, before' #000000 --
          'upper bound, after' #000000 :
          'median over heads' #d55e00 -
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
          lines #707070: 2 1, 4 2 as a picture
          points 'RoPE' #0072b2: x 1 2; y 6 1 as a picture
          line #0072b2 --: level at 4.5
          points 'DroPE' #d55e00: x 3 4; y 0.25 2 as a picture
        panel 1,2 of 1x2 'pair 8'
          x linear 'radius of the mean key'
          y linear
          lines #707070: none as a picture
          points 'RoPE' #0072b2: x 1; y 1 as a picture
          points 'DroPE' #d55e00: x 1; y 4.142 as a picture
          line #d55e00 :: level at 4
        legend
          'RoPE' #0072b2
          'DroPE' #d55e00
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
          points #0072b2: x 0 2 1; y 1 2 4 as a picture
          line #707070 :: level at 0.5
          line #707070 :: level at 1.5
          line #000000 --: upright at 1.5
        panel 1,2 of 2x2
          x log
          y linear
          points #0072b2: x 8 0.5 2; y 1 2 4 as a picture
          line #707070 :: level at 0.5
          line #707070 :: level at 1.5
          line 'upper bound 2π/C' #000000 --: upright at 1
        panel 2,1 of 2x2
          x linear 'pair index, from the fastest on'
          y linear 'angle φ, query to key (rad)'
          points #b0dd2f-#440154 1..4 of 1 2 4: x 0 2 1; y 0 5 3.142; sizes 9.25 15.5 28 as
              a picture
          points #d55e00: x 2 3; y 4.712 4
          line #000000 --: upright at 1.5
        panel 2,2 of 2x2
          x log 'turns within the context, θC/2π (logarithmic)'
          y linear
          points #b0dd2f-#440154 1..4 of 1 2 4: x 8 0.5 2; y 0 5 3.142; sizes 9.25 15.5 28
              as a picture
          line 'lower bound π + θC/2' #d55e00 -: x 200 from 0.5 to 1; y 200 from 4.712 to
              6.283
          line 'upper bound 2π/C' #000000 --: upright at 1
        bar 'radius of the mean key' #b0dd2f-#440154 1..4
        legend
          'lower bound π + θC/2' #d55e00 -
          'upper bound 2π/C' #000000 --
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


def test_variance_by_radius_of_queries_and_keys():
    of_keys = np.array([True, False, True])
    figure = radius_and_variance(np.array([1.0, 2, 3]), np.array([0.1, 0.2, 0.3]), of_keys)
    check(
        figure,
        """
        panel 1,1 of 1x2
          x linear 'radius of the mean, queries'
          y linear 'circular variance of the angle'
          points #0072b2: x 2; y 0.2 as a picture
        panel 1,2 of 1x2
          x linear 'radius of the mean, keys'
          y linear
          points #d55e00: x 1 3; y 0.1 0.3 as a picture
        """,
    )


def test_bounds_of_extensions():
    """Turns of every pair that moves, lower bounds of those under the upper bound."""
    methods = [
        Method("as trained", np.array([8.0, 1.0, 0.5, 0.25]), np.array([0, 0, 4.5, 4.0])),
        Method("dropped", np.array([4.0, 0.5, 0.25, 0.0]), np.array([0, 4.5, 4.0, 3.0])),
    ]
    check(
        extended_bounds(methods, np.array([2, 3]), np.array([5.0, 6.0])),
        """
        panel 1,1 of 1x2
          x linear 'pair index, from the fastest on'
          y log 'turns within the length'
          line 'as trained' #000000 -: x 0 1 2 3; y 8 1 0.5 0.25
          line 'dropped' #0072b2 --: x 0 1 2; y 4 0.5 0.25
          line #707070 --: level at 1
        panel 1,2 of 1x2
          x linear 'pair index, from the fastest on'
          y linear 'angle φ and lower bounds (rad)'
          points 'large keys' #b0b0b0: x 2 3; y 5 6 as a picture
          line 'as trained' #000000 -: x 2 3; y 4.5 4
          line 'dropped' #0072b2 --: x 1 2; y 4.5 4
        legend
          'large keys' #b0b0b0
          'as trained' #000000 -
          'dropped' #0072b2 --
        """,
    )


def test_five_methods_differ_in_dashes_and_colours():
    """And have no points where no feature is large."""
    spectrum = np.array([2.0, 0.5])
    methods = [Method(str(number), spectrum, np.ones(2)) for number in range(5)]
    left, _ = extended_bounds(methods, np.array([]), np.array([])).axes
    looks = [line.split(":")[0] for line in described(left.figure).splitlines() if "line '" in line]
    assert looks[:5] == [
        "  line '0' #000000 -",
        "  line '1' #0072b2 --",
        "  line '2' #d55e00 ",
        "  line '3' #009e73 -.",
        "  line '4' #cc79a7 (5 1 1 1 1 1)",
    ]


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
          x linear 'first channel'
          y linear 'second channel'
          aspect 1 by datalim
          points #0072b2: x 3 3; y 3 5 as a picture
          line 'queries' #0072b2 o alpha 0.6: nothing
          points #d55e00: x -2 0; y 0 0 as a picture
          line 'keys' #d55e00 o alpha 0.6: nothing
          arrow -> #000000: 0 0 to 3 4
          line #0072b2 o edged #000000: x 3; y 4
          arrow -> #000000: 0 0 to -1 0
          line #d55e00 o edged #000000: x -1; y 0
          arc #009e73: 6 x 6 around 0 0, 53.13 to 143.1 degrees
          line 'turn of the query within C' #009e73 -: nothing
          line 'key of the first token' #d55e00 * edged #000000: x -2; y 0
          line #707070 -: level at 0
          line #707070 -: upright at 0
        panel 1,2 of 1x2 'fast'
          x linear 'first channel'
          y linear 'second channel'
          aspect 1 by datalim
          points #0072b2: x 3 3; y 3 5 as a picture
          line 'queries' #0072b2 o alpha 0.6: nothing
          points #d55e00: x -2 0; y 0 0 as a picture
          line 'keys' #d55e00 o alpha 0.6: nothing
          arrow -> #000000: 0 0 to 3 4
          line #0072b2 o edged #000000: x 3; y 4
          arrow -> #000000: 0 0 to -1 0
          line #d55e00 o edged #000000: x -1; y 0
          arc #009e73: 6 x 6 around 0 0, 53.13 to 413.1 degrees
          line 'turn of the query within C' #009e73 -: nothing
          line 'key of the first token' #d55e00 * edged #000000: x -2; y 0
          line #707070 -: level at 0
          line #707070 -: upright at 0
        legend
          'queries' #0072b2 o alpha 0.6
          'keys' #d55e00 o alpha 0.6
          'turn of the query within C' #009e73 -
          'key of the first token' #d55e00 * edged #000000
        """,
    )


def test_clouds_of_all_pairs_of_a_head_are_small():
    """Five in rows of three: the last place stays empty."""
    panels = [PairCloud(f"pair {n}", QUERY, KEY, 1.0) for n in range(5)]
    figure = small_clouds(panels)
    assert [axes.get_title() for axes in figure.axes] == [f"pair {n}" for n in range(5)]
    for axes in figure.axes[1:]:
        axes.remove()
    check(
        figure,
        """
        panel 1,1 of 2x3 'pair 0'
          x linear
          y linear
          aspect 1 by datalim
          points #0072b2: x 3 3; y 3 5 as a picture
          line 'queries' #0072b2 o alpha 0.6: nothing
          points #d55e00: x -2 0; y 0 0 as a picture
          line 'keys' #d55e00 o alpha 0.6: nothing
          line #000000 -: x 0 3; y 0 4
          line #0072b2 o edged #000000: x 3; y 4
          line #000000 -: x 0 -1; y 0 0
          line #d55e00 o edged #000000: x -1; y 0
          arc #009e73: 6 x 6 around 0 0, 53.13 to 110.4 degrees
          line 'turn of the query within C' #009e73 -: nothing
          line 'key of the first token' #d55e00 * edged #000000: x -2; y 0
          line #707070 -: level at 0
          line #707070 -: upright at 0
        below 'first channel'
        left 'second channel'
        legend
          'queries' #0072b2 o alpha 0.6
          'keys' #d55e00 o alpha 0.6
          'turn of the query within C' #009e73 -
          'key of the first token' #d55e00 * edged #000000
        """,
    )


def test_clouds_stand_in_rows(monkeypatch):
    def shape(figure):
        return figure.axes[0].get_subplotspec().get_gridspec().get_geometry()

    one = PairCloud("", QUERY, KEY, 1.0)
    assert shape(clouds([one] * 4)) == (2, 3)
    assert shape(clouds([one])) == shape(small_clouds([one])) == (1, 1)
    assert shape(small_clouds([one] * 3)) == (2, 2)
    monkeypatch.setattr(drawing, "MANY", 1)
    assert shape(small_clouds([one] * 3)) == (3, 1)


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
          lines #440154 #b0dd2f: 1 1, 10 2; 1 4, 10 8 as a picture
          line 'the feature' #000000 :: x 1 10; y 4 8
          line #707070 -: level at 0
          line #707070 --: upright at 4
        panel 1,2 of 2x2
          x log
          y linear
          line 'all pairs' #000000 -: x 1 10; y 5 10
          line 'all but the feature' #0072b2 --: x 1 10; y 1 2
          line #707070 -: level at 0
          line #707070 --: upright at 4
        panel 2,1 of 2x2 'head 2'
          x log
          y linear 'part of the logit'
          lines #440154: 1 0.5, 10 0.5 as a picture
          line 'the feature' #000000 :: x 1 10; y 0.5 0.5
          line #707070 -: level at 0
          line #707070 --: upright at 4
        panel 2,2 of 2x2
          x log
          y linear
          line 'all pairs' #000000 -: x 1 10; y 0.5 0.5
          line 'all but the feature' #0072b2 --: x 1 10; y 0 0
          line #707070 -: level at 0
          line #707070 --: upright at 4
        bar 'pair index' #440154-#b0dd2f 0..1
        below 'distance between query and key + 1 (tokens, logarithmic)'
        legend
          'the feature' #000000 :
          'all pairs' #000000 -
          'all but the feature' #0072b2 --
        """,
    )
