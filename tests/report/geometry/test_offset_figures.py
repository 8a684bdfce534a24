"""Figures of rotary offset features, as wholes."""

import math

import numpy as np

from tests.report.described import check, described
from trainer.analysis.studies.offset_figures import (
    Method,
    Radii,
    extended_bounds,
    radius_and_angle,
    radius_and_variance,
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
            6.75 x 4.40 inches
            panel 1,1 of 2x2
              x linear -0.15..3.15 ticks 0 1 2 3 unlabelled
              y linear 0.325..4.175 'radius of the mean key' ticks 1 2 3 4 grid
              points #0072b2: x 0 2 1; y 1 2 4 as a picture
              line #707070 :: level at 0.5
              line #707070 :: level at 1.5
              line #000000 --: upright at 1.5
            panel 1,2 of 2x2
              x log 9.19..0.4353 ticks 1 unlabelled and between
              y linear 0.325..4.175 ticks 1 2 3 4 unlabelled grid
              points #0072b2: x 8 0.5 2; y 1 2 4 as a picture
              line #707070 :: level at 0.5
              line #707070 :: level at 1.5
              line 'upper bound 2π/C' #000000 --: upright at 1
            panel 2,1 of 2x2
              x linear -0.15..3.15 'pair index, from the fastest on' ticks 0 1 2 3
              y linear 0..6.283 'angle φ, query to key (rad)' ticks 0='0' 1.571='π/2' 3.142='π'
                  4.712='3π/2' 6.283='2π' grid
              points #b0dd2f-#440154 1..4 of 1 2 4: x 0 2 1; y 0 5 3.142; sizes 9.25 15.5 28 as
                  a picture
              points #d55e00: x 2 3; y 4.712 4
              line #000000 --: upright at 1.5
            panel 2,2 of 2x2
              x log 9.19..0.4353 'turns within the context, θC/2π (logarithmic)' ticks
                  1='10^{0}' and between
              y linear 0..6.283 ticks 0 1.571 3.142 4.712 6.283 unlabelled grid
              points #b0dd2f-#440154 1..4 of 1 2 4: x 8 0.5 2; y 0 5 3.142; sizes 9.25 15.5 28
                  as a picture
              line 'lower bound π + θC/2' #d55e00 -: x 200 from 0.5 to 1; y 200 from 4.712 to
                  6.283
              line 'upper bound 2π/C' #000000 --: upright at 1
            bar 'radius of the mean key' #b0dd2f-#440154 1..4 ticks 1 1.5 2 2.5 3 3.5 4 beside 1
                2 3 4
            legend upper, upper right, columns: 2
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
        6.75 x 2.60 inches
        panel 1,1 of 1x2
          x linear 1.89..2.11 'radius of the mean, queries' ticks 1.9 1.95 2 2.05 2.1
          y linear 0..1 'circular variance of the angle' ticks 0 0.2 0.4 0.6 0.8 1 grid
          points #0072b2: x 2; y 0.2 as a picture
        panel 1,2 of 1x2
          x linear 0.9..3.1 'radius of the mean, keys' ticks 1 1.5 2 2.5 3
          y linear 0..1 ticks 0 0.2 0.4 0.6 0.8 1 unlabelled grid
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
        6.75 x 2.90 inches
        panel 1,1 of 1x2
          x linear -0.5..3.5 'pair index, from the fastest on' ticks 0 1 2 3
          y log 0.2102..9.514 'turns within the length' ticks 1='10^{0}' and between grid
          line 'as trained' #000000 -: x 0 1 2 3; y 8 1 0.5 0.25
          line 'dropped' #0072b2 --: x 0 1 2; y 4 0.5 0.25
          line #707070 --: level at 1
        panel 1,2 of 1x2
          x linear -0.5..3.5 'pair index, from the fastest on' ticks 0 1 2 3
          y linear 0..6.283 'angle φ and lower bounds (rad)' ticks 0='0' 1.571='π/2'
              3.142='π' 4.712='3π/2' 6.283='2π' grid
          points 'large keys' #b0b0b0: x 2 3; y 5 6 as a picture
          line 'as trained' #000000 -: x 2 3; y 4.5 4
          line 'dropped' #0072b2 --: x 1 2; y 4.5 4
        legend upper, upper center, columns: 3
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
