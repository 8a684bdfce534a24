"""Figures of how far a run reached in training, from measurements of which some are missing."""

from __future__ import annotations

import csv

import pytest

from tests.report.examples import report
from trainer.report.figures import write_figures
from trainer.report.html import write_html
from trainer.report.reach import reach_figures
from trainer.report.results import Drop, Reach

EDGES = tuple(range(0, 257, 32))


def reach(step, dropped, retrieval=(1.0, 0.5, 0.25), losses=(4.0,) * 8):
    return Reach(step, dropped, 64, (64, 128, 256), (4.0, 4.1, None), retrieval, EDGES, losses)


def drawn(directory, history, **others):
    made = report(drop=Drop(8, 4.0, 5.0), reach={"DroPE": history, **others})
    figures = write_figures(made, directory)
    write_html(made, figures, directory / "report.html")
    return [figure.path.stem for figure in figures]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_lie_beside_the_figures(tmp_path):
    history = (reach(4, False), reach(8, False), reach(8, True, losses=(*EDGES[:7], None)))
    figures = drawn(tmp_path, history, RoPE=history[:2], NoPE=())
    assert figures == ["reach", "reach_by_position"]
    rows = rows_of(tmp_path / "reach.csv")
    assert len(rows) == 3 * 3 + 2 * 3
    last = rows[8]
    assert last == {
        "arm": "DroPE",
        "step": "8",
        "dropped": "True",
        "length": "256",
        "loss": "",
        "retrieval": "0.25",
    }
    rows = rows_of(tmp_path / "reach_by_position.csv")
    assert [row["loss"] for row in rows[16:24]] == [*map(str, EDGES[:7]), ""]
    assert (rows[23]["from_position"], rows[23]["to_position"]) == ("224", "256")
    page = (tmp_path / "report.html").read_text()
    assert "How far models reach while they train" in page


def test_the_heat_map_shows_losses_less_the_mean_within_the_training_length():
    """Of each measurement by itself; the training length is 64 tokens, two parts of eight."""
    losses = ((5.0, 3.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0), (3.0, 2.0, 2.5, 2.5, 3.0, 3.0, 4.0, 4.0))
    history = tuple(reach(4 * i, False, losses=of_one) for i, of_one in enumerate(losses))
    _, plan = reach_figures(report(reach={"DroPE": history}), {"DroPE": 0})
    axes, _ = plan.draw().axes
    drawn_values = axes.collections[0].get_array().reshape(8, 2).T.tolist()
    for values, (first, second, *rest) in zip(drawn_values, losses, strict=True):
        base = (first + second) / 2
        assert values == pytest.approx([x - base for x in (first, second, *rest)])


def test_one_measurement_without_retrieval_is_drawn(tmp_path):
    assert len(drawn(tmp_path, (reach(4, False, retrieval=()),))) == 2
    assert {row["retrieval"] for row in rows_of(tmp_path / "reach.csv")} == {""}


def test_other_lengths_after_a_resume_are_drawn(tmp_path):
    short = Reach(2, False, 64, (64,), (4.0,), (1.0,), (0, 32, 64), (4.0, 4.0))
    assert len(drawn(tmp_path, (short, reach(4, False), reach(8, True)))) == 2


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert drawn(tmp_path, ()) == []
