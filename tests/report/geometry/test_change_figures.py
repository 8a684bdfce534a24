"""Figures of rotary pairs in two models, as wholes."""

import math

import numpy as np

from tests.report.described import check
from trainer.analysis.studies.offset_figures import Changes, OnePair, changes_by_pair, pairs_in_both


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
