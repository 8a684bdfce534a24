"""Heat maps and their scales."""

import math

import numpy as np
import pytest

from trainer.plotting.maps import Scale, heat_maps

NAN = math.nan


@pytest.mark.parametrize(
    ("scale", "values", "limits"),
    [
        (Scale("l"), ([1.0, 2.0], [5.0, NAN]), (1, 5)),
        (Scale("l", low=0), ([1.0, 2.0],), (0, 2)),
        (Scale("l", high=9), ([1.0, 2.0],), (1, 9)),
        (Scale("l"), ([NAN],), (0, 1)),
        (Scale("l", log=True), ([0.0, 2.0, 2.0],), (2, 2.002)),
        (Scale("l", log=True), ([-1.0, math.inf],), (0.1, 1)),
        (Scale("l", low=3, high=7, log=True), ([2.0, 9.0],), (3, 7)),
        # A thousandth lies below the darkest colour.
        (Scale("l", log=True), (np.geomspace(1, 10, 1001),), (10**0.001, 10)),
    ],
)
def test_a_scale_holds_what_is_known_of_all_panels(scale, values, limits):
    norm = scale.norm(list(map(np.array, values)))
    assert (norm.vmin, norm.vmax) == pytest.approx(limits)
    assert ("Log" in type(norm).__name__) == scale.log


def test_maps_of_one_scale_share_a_bar():
    """A cell is two units wide and four high, and in the middle of its place."""
    panels = {"one": np.array([[1.0, 2.0, 3.0], [4.0, NAN, 6.0]]), "two": np.array([[9.0]])}
    figure = heat_maps(panels, Scale("entropy"), x="key", y="query", cell=(2, 4))
    one, two, bar = figure.axes
    (image,), (other,) = one.images, two.images
    assert (one.get_title(), bar.get_ylabel()) == ("one", "entropy")
    assert image.get_array().tolist() == [[1, 2, 3], [4, None, 6]]
    assert image.get_extent() == [-1, 5, 6, -2]
    assert (image.norm.vmin, other.norm.vmax) == (1, 9)
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("key", "query")


def test_named_cells_show_their_numbers():
    names = (["1×", "2×"], ["0", "50", "100"])
    values = np.array([[99.6, NAN], [50.0, 1.0], [0.0, 100.0]])
    figure = heat_maps({"one": values}, Scale("success (%)", 0, 100), x="x", y="y", names=names)
    axes = figure.axes[0]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert [shown[0, 0], shown[1, 0], shown[0, 1]] == ["100", "·", "50"]
    assert [text.get_text() for text in axes.get_yticklabels()] == names[1]
