"""Figures of positional bias, as wholes."""

import numpy as np

from tests.report.described import check
from trainer.analysis.positional_bias.rescaling import needle_figure, rescaled_figure, shift_figure
from trainer.analysis.positional_bias.study import factor_figure, gradient_figure, spread_figure

NAMES = {"encoded": "with RoPE", "nope": "without", "trained": "as trained", "yarn": "YaRN"}


def test_gradients_are_means_over_seeds_between_their_extremes():
    """``[seeds, kind, layers]``; the first spans a factor of ten, the second only one of three."""
    gradients = {
        "encoded": np.array([[[1, 2, 10], [1, 2, 3]], [[3, 4, 12], [1, 2, 3]]]),
        "nope": np.array([[[1, 1, 1], [2, 2, 2]]]),
    }
    check(
        gradient_figure(gradients, NAMES),
        """
        panel 1,1 of 1x2 'towards its own token'
          x linear 'layer'
          y log 'gradient norm of Aᶜ'
          line: x 0 1 2; y 2 3 11
          line: x 0 1 2; y 1 1 1
          bars: 0 1, 0 3; 1 2, 1 4; 2 10, 2 12
        panel 1,2 of 1x2 'towards the previous token'
          x linear 'layer'
          y linear 'gradient norm of Aᶜ'
          line: x 0 1 2; y 1 2 3
          line: x 0 1 2; y 2 2 2
          bars: 0 1, 0 1; 1 2, 1 2; 2 3, 2 3
        legend 'with RoPE', 'without'
        """,
    )


def test_growth_is_over_the_spread_at_the_first_attention():
    spreads = {"encoded": np.array([[2.0, 4, 6]]), "nope": np.array([[1.0, 8, 40], [3, 12, 36]])}
    check(
        spread_figure(spreads, NAMES),
        """
        panel 1,1 of 1x2 'prefix spread'
          x linear 'blocks passed'
          y log 'spread (norm, of what enters attention)'
          line: x 0 1 2; y 2 4 6
          line: x 0 1 2; y 2 10 38
          bars: 0 1, 0 3; 1 8, 1 12; 2 36, 2 40
        panel 1,2 of 1x2 'growth over the first'
          x linear 'blocks passed'
          y log 'spread / spread at the first attention'
          line: x 0 1 2; y 1 2 3
          line: x 0 1 2; y 1 6 26
          bars: 0 1, 0 1; 1 4, 1 8; 2 12, 2 40
        legend 'with RoPE', 'without'
        """,
    )


def test_two_heads_by_layout():
    """By distance as far as 32 tokens; around a key, which is in the middle."""
    positional = {"trained": np.arange(40.0) / 40, "yarn": np.array([0.5, 0.25])}
    semantic = {"trained": np.array([0, 0.1, 0.5, 0.2, 0]), "yarn": np.array([0, 0, 0.4, 0, 0])}
    figure = rescaled_figure(positional, semantic, NAMES, ("layer 0", "layer 1"))
    check(
        figure,
        """
        panel 1,1 of 1x2 'layer 0'
          x linear 'distance (tokens back)'
          y linear 'mean attention'
          line: x 32 from 0 to 31; y 32 from 0 to 0.775
          line: x 0 1; y 0.5 0.25
        panel 1,2 of 1x2 'layer 1'
          x linear 'key, tokens from the earlier occurrence'
          y linear 'mean attention'
          line: x -2 -1 0 1 2; y 0 0.1 0.5 0.2 0
          line: x -2 -1 0 1 2; y 0 0 0.4 0 0
        legend 'as trained', 'YaRN'
        """,
    )


def test_attention_around_a_needle():
    around = {"trained": np.array([0.0, 0.25, 0.5]), "yarn": np.array([0.0, 0.125, 0.0])}
    check(
        needle_figure(around, -1, NAMES, "layer 2"),
        """
        panel 1,1 of 1x1 'layer 2'
          x linear "key, tokens from the needle's first"
          y linear 'attention of the last token'
          line: x -1 0 1; y 0 0.25 0.5
          line: x -1 0 1; y 0 0.125 0
        legend 'as trained', 'YaRN'
        """,
    )


def test_what_moves_by_bias():
    bias, shift = np.array([[0.1, 0.2], [0.3, 0.4]]), np.array([[1, 2], [3, 4]])
    check(
        shift_figure(bias, shift),
        """
        panel 1,1 of 1x1
          x linear 'Aᶜ, the larger of the two'
          y linear 'attention on other keys\\n(total variation)'
          points 0..1 of 0 0 1 1: x 0.1 0.2 0.3 0.4; y 1 2 3 4
        bar 'layer' 0..1
        """,
    )


def test_factors_of_frequencies():
    factors = {2.0: {"yarn": np.array([1, 0.75, 0.5])}, 8.0: {"yarn": np.array([1, 0.5, 0.125])}}
    check(
        factor_figure(factors, 2, NAMES),
        """
        panel 1,1 of 1x2 's = 2'
          x linear 'pair, fastest first'
          y linear 'frequency factor γ'
          line: x 0 1 2; y 1 0.75 0.5
          line: upright at 1.5
        panel 1,2 of 1x2 's = 8'
          x linear 'pair, fastest first'
          y linear 'frequency factor γ'
          line: x 0 1 2; y 1 0.5 0.125
          line: upright at 1.5
        legend 'YaRN', 'right of it: less than one turn'
        """,
    )
    (axes, _) = factor_figure(factors, None, NAMES).axes
    assert len(axes.lines) == 1
