"""Points of rotary pairs, as wholes."""

import math

import numpy as np

from tests.report.described import check
from trainer.analysis.frequency_entropy.figures import (
    HeadColumn,
    head_columns,
)
from trainer.plotting.points import layer_panels, pair_scatter


def test_pairs_of_heads_by_measure_and_layer():
    values = np.array([[0.1, 0.2], [0.3, 0.4]])
    panels = {
        "queries": {"layer 0": values, "layer 5": values / 2},
        "keys": {"layer 0": np.array([[1.0]])},
    }
    check(
        pair_scatter(panels, {"keys": (0.25, 0.75)}, "pair"),
        """
        panel 1,1 of 2x2 'layer 0'
          x linear
          y linear 'queries'
          points 0..1 of 0 0 1 1: x 0 1 0 1; y 0.1 0.2 0.3 0.4
        panel 1,2 of 2x2 'layer 5'
          x linear
          y linear
          points 0..1 of 0 0 1 1: x 0 1 0 1; y 0.05 0.1 0.15 0.2
        panel 2,1 of 2x2
          x linear
          y linear 'keys'
          points 0..1 of 0: x 0; y 1
          line: level at 0.25
          line: level at 0.75
        panel 2,2 of 2x2
          x linear
          y linear
        bar 'head' 0..1
        below 'pair'
        """,
    )


def test_what_is_no_head_has_names():
    figure = pair_scatter({"m": {"t": np.zeros((2, 1))}}, {}, "pair", ("kind", ("low", "high")))
    (_, bar) = figure.axes
    assert bar.get_ylabel() == "kind"
    assert [text.get_text() for text in bar.get_yticklabels()] == ["low", "high"]


def test_a_bar_of_many_heads_has_at_most_nine_ticks():
    for heads, ticks in ((9, range(9)), (10, range(0, 10, 2)), (28, range(0, 28, 4))):
        figure = pair_scatter({"m": {"t": np.zeros((heads, 1))}}, {}, "pair")
        assert figure.axes[1]._colorbar.get_ticks().tolist() == list(ticks)


def test_a_small_panel_for_every_layer():
    """Five in rows of four: of those above the gap the last have the labels of their columns."""
    panels = {str(layer): np.array([[0.5, layer / 4]]) for layer in range(5)}
    check(
        layer_panels(panels, (0.5,), "pair", "entropy"),
        """
        panel 1,1 of 2x4 '0'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0
          line: level at 0.5
        panel 1,2 of 2x4 '1'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0.25
          line: level at 0.5
        panel 1,3 of 2x4 '2'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0.5
          line: level at 0.5
        panel 1,4 of 2x4 '3'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 0.75
          line: level at 0.5
        panel 2,1 of 2x4 '4'
          x linear
          y linear
          points 0..1 of 0 0: x 0 1; y 0.5 1
          line: level at 0.5
        bar 'head' 0..1
        below 'pair'
        left 'entropy'
        """,
    )


def test_many_layers_stand_six_in_a_row():
    for layers, shape in ((16, (4, 4)), (17, (3, 6))):
        panels = {str(layer): np.zeros((1, 1)) for layer in range(layers)}
        spec = layer_panels(panels, (), "x", "y").axes[0].get_subplotspec()
        assert spec.get_gridspec().get_geometry() == shape


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
