"""Heads with the norms of their pairs."""

import math

import numpy as np

from tests.report.described import check
from trainer.analysis.frequency_entropy.figures import (
    HeadColumn,
    head_columns,
)


def test_heads_with_the_norms_of_their_pairs():
    norms = np.array([[1.0, 10.0], [math.nan, 100.0], [1.0, 1.0]])
    columns = [
        HeadColumn("sink", {"q": np.array([0.1, 0.2, 0.3]), "k": np.array([1.0, 0, 1])}, norms, 4),
        HeadColumn("other", {"q": np.array([0.5, 0.5]), "k": np.array([0.0, 0])}, norms[:2], 4),
    ]
    grid = head_columns(columns, {}).axes[0].get_gridspec()
    assert grid.get_height_ratios() == [1, 1, 1.4]
    check(
        head_columns(columns, {"q": (0.25,)}),
        """
        panel 1,1 of 3x2 'sink'
          x linear
          y linear 'q'
          line: x 0 1 2; y 0.1 0.2 0.3
          line: level at 0.25
        panel 1,2 of 3x2 'other'
          x linear
          y linear
          line: x 0 1; y 0.5 0.5
          line: level at 0.25
        panel 2,1 of 3x2
          x linear 'pair index'
          y linear 'k'
          line: x 0 1 2; y 1 0 1
        panel 2,2 of 3x2
          x linear 'pair index'
          y linear
          line: x 0 1; y 0 0
        panel 3,1 of 3x2
          x linear 'token'
          y linear 'pair index'
          image LogNorm 1..100, from -2 6 2.5 -0.5: 1 10 / nan 100 / 1 1
        panel 3,2 of 3x2
          x linear 'token'
          y linear
          image LogNorm 1..100, from -2 6 1.5 -0.5: 1 10 / nan 100
        bar 'l2 norm of the pair' LogNorm 1..100
        """,
    )
