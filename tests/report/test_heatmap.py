"""Heat maps of success by depth and length."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.report.described import check
from tests.report.examples import cell
from trainer.plotting.style import paper_style
from trainer.report.figures import Depths, draw_heatmaps


def test_a_depth_is_a_row_until_there_are_more_than_eleven():
    ends = [n / 10 for n in range(11)]
    few = Depths.of([cell([1.0] * 5, depths=ends[:5]), cell([1.0] * 6, depths=ends[5:])])
    assert few == Depths((*ends, math.inf), tuple(str(10 * n) for n in range(11)))
    many = Depths.of([cell([1.0] * 12, depths=[*ends, 0.55])])
    tenths = tuple(f"{10 * n}–{10 * n + 10}" for n in range(10))
    assert many == Depths((*ends[:10], math.inf), tenths)


def test_a_row_is_the_mean_of_its_trials():
    depths = Depths((0.0, 0.5, 1.0, math.inf), ("0", "50", "100"))
    made = cell([1.0, 0.5, 0.0, 0.25], depths=(0.0, 0.49, 0.5, 0.9))
    assert depths.means(made)[:2] == [0.75, 0.125]
    assert math.isnan(depths.means(made)[2])


def test_heat_maps_as_a_whole():
    """White on dark cells, of up to 55%, and black on bright ones and where nothing is known."""
    panels = {
        "RoPE": np.array([[0.1, 0.2], [0.55, 0.56]]),
        "DroPE + a method with a long name": np.array([[1.0, math.nan], [0.0, 0.125]]),
    }
    depths = Depths((0.0, 1.0, math.inf), ("0", "100"))
    with paper_style():
        check(
            draw_heatmaps(panels, depths, {64: "1×", 256: "4×"}),
            """
            panel 1,1 of 1x2 'RoPE'
              x linear
              y linear
              image 0..100, from -0.5 1.5 1.5 -0.5: 10 20 / 55 56
              text '10': 0 0
              text '20': 1 0
              text '55': 0 1
              text '56': 1 1
            panel 1,2 of 1x2 'DroPE + a method with a\\nlong name'
              x linear
              y linear
              image 0..100, from -0.5 1.5 1.5 -0.5: 100 nan / 0 12.5
              text '100': 0 0
              text '·': 1 0
              text '0': 0 1
              text '12': 1 1
            bar 'success (%)' 0..100
            below 'sequence length (multiple of the training length)'
            left 'depth (% of the text)'
            """,
        )


@pytest.mark.parametrize(
    ("panels", "rows", "shape", "height"),
    [(1, 2, (1, 1), 1.29), (5, 2, (1, 5), 1.29), (6, 2, (2, 5), 2.08), (1, 12, (1, 1), 2.7)],
)
def test_maps_stand_five_in_a_row_and_are_as_high_as_their_rows(panels, rows, shape, height):
    """Of many rows no higher than 2.2 inches."""
    depths = Depths((*range(rows), math.inf), tuple(map(str, range(rows))))
    made = {str(number): np.zeros((rows, 1)) for number in range(panels)}
    figure = draw_heatmaps(made, depths, {64: "1×"})
    spec = figure.axes[0].get_subplotspec()
    assert spec.get_gridspec().get_geometry() == shape
    assert figure.get_figheight() == pytest.approx(height)
    labelled = [
        axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes[: min(panels, 5)]
    ]
    assert labelled == [panels <= 5, *[True] * (len(labelled) - 1)]
