"""Figures of the rotary pairs of single heads, as wholes."""

import numpy as np

from tests.report.described import check
from trainer.analysis.studies import offset_figures
from trainer.analysis.studies.offset_figures import (
    Contributions,
    PairCloud,
    by_distance,
    clouds,
    small_clouds,
)

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
    monkeypatch.setattr(offset_figures, "MANY", 1)
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
