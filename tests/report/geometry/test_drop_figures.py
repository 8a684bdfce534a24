"""Figures of two models, as wholes."""

import numpy as np

from tests.report.described import check
from trainer.analysis.studies.drop_figures import (
    head_figure,
    indicator_figure,
    position_figure,
    recovery_figure,
)

NAMES = ("RoPE", "DroPE")


def test_heads_before_and_after_lie_on_a_line_where_nothing_changed():
    panels = {"sink": (np.array([[0.0, 1]]), np.array([[0.5, 1]]))}
    check(
        head_figure(panels, NAMES),
        """
        panel 1,1 of 1x1 'sink'
          x linear 'RoPE'
          y linear 'DroPE'
          line #707070 :: x 0 1; y 0 1
          points #440154-#b0dd2f 0..1 of 0 0: x 0 1; y 0.5 1
        bar 'layer' #440154-#b0dd2f 0..1
        """,
    )


def test_predictions_and_losses_by_position():
    middles, losses = np.array([8, 64, 128]), [np.array([5.0, 4, 6]), np.array([5, 4.5, 4.25])]
    figure = position_figure(middles, np.array([0.5, 0.25, 2]), losses, NAMES, 96)
    check(
        figure,
        """
        panel 1,1 of 1x2 'next-token predictions'
          x log 'tokens read'
          y linear 'KL divergence (nats)'
          line #000000 -: x 8 64 128; y 0.5 0.25 2
          line #707070 --: upright at 96
        panel 1,2 of 1x2 'loss'
          x log 'tokens read'
          y linear 'loss (nats/token)'
          line #000000 -: x 8 64 128; y 5 4 6
          line #d55e00 -: x 8 64 128; y 5 4.5 4.25
          line #707070 --: upright at 96
        legend
          'KL(RoPE ‖ DroPE)' #000000 -
          'RoPE' #000000 -
          'DroPE' #d55e00 -
          'training length' #707070 --
        """,
    )


def test_indicators_by_length_the_first_of_which_may_be_logarithmic():
    """Of seven lengths every second one has a tick."""
    lengths = [32 * 2**n for n in range(7)]
    panels = {
        "offset": (np.geomspace(1, 64, 7), np.ones(7)),
        "sink": (np.geomspace(1, 64, 7), np.ones(7)),
    }
    check(
        indicator_figure(lengths, panels, NAMES, 64),
        """
        panel 1,1 of 1x2 'offset'
          x log 'tokens read'
          y log
          line #000000 - o: x 32 64 128 256 512 1024 2048; y 1 2 4 8 16 32 64
          line #d55e00 - v: x 32 64 128 256 512 1024 2048; y 1 1 1 1 1 1 1
          line #707070 --: upright at 64
        panel 1,2 of 1x2 'sink'
          x log 'tokens read'
          y linear
          line #000000 - o: x 32 64 128 256 512 1024 2048; y 1 2 4 8 16 32 64
          line #d55e00 - v: x 32 64 128 256 512 1024 2048; y 1 1 1 1 1 1 1
          line #707070 --: upright at 64
        legend
          'RoPE' #000000 - o
          'DroPE' #d55e00 - v
          'training length' #707070 --
        """,
    )
    few = {"sink": (np.ones(6), np.ones(6))}
    assert (
        indicator_figure(lengths[:6], few, NAMES, 64).axes[0].get_xticks().tolist() == lengths[:6]
    )


def test_the_loss_around_a_drop():
    check(
        recovery_figure([1, 2, 3, 4], [5.0, 4.0, 9.0, 6.0], 2),
        """
        panel 1,1 of 1x1
          x linear 'training step'
          y linear 'loss (nats/token)'
          line #0072b2 -: x 1 2 3 4; y 5 4 9 6
          line #707070 --: upright at 2
          note 'dropped at step 2' #707070 center bottom: 0 3 offset points from 2 1
        legend
          'training loss' #0072b2 -
        """,
    )
