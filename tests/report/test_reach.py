"""Figures of how far a run reached in training, from measurements of which some are missing."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from tests.report.described import check, check_csv
from tests.report.examples import report
from trainer.evaluation.results import Drop, Reach
from trainer.plotting.style import paper_style
from trainer.report.figures import write_figures
from trainer.report.pages import write_html
from trainer.report.training_figures import reach_figures

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


def test_reach_as_a_whole(tmp_path):
    """The run at every length, paler the shorter; others at the longest; a line at the drop."""
    history = (
        Reach(4, False, 64, (64, 128), (4.0, 5.0), (1.0, 0.5), (0, 64, 128), (4.0, 5.0)),
        Reach(8, True, 64, (64, 128), (4.5, None), (0.75,), (0, 64, 128), (4.5, None)),
    )
    other = (Reach(4, False, 64, (64, 128), (3.0, 3.5), (0.25, 0.125), (0, 128), (3.0,)),)
    made = report(drop=Drop(6, 4.0, 5.0), reach={"Mine": history, "RoPE": other})
    with paper_style():
        both, by_position = reach_figures(made, {"Mine": 1, "RoPE": 0})
        check(
            both.draw(),
            """
            panel 1,1 of 1x1
              x linear 'training step'
              y linear 'retrieval (%)'
              line: x 4 8; y 100 75
              line: x 4 8; y 50 nan
              line: x 4; y 12.5
              line: upright at 6
              note 'encoding dropped at step 6': 6 1
            legend 'Mine, 1×', 'Mine, 2×', 'RoPE, 2×'
            """,
        )
        check(
            by_position.draw(),
            """
            panel 1,1 of 1x1
              x linear 'training step of the measurement'
              y linear 'position (tokens)'
              cells CenteredNorm -1..1: x 0 1 2; y 0 64 128; 0 0 / 1 nan
              line: level at 64
              line: upright at 1
            bar 'excess loss (nats/token)' CenteredNorm -1..1
            """,
        )
    history = tuple(replace(one, retrieval=()) for one in history)
    with paper_style():
        loss, by_position = reach_figures(report(reach={"Mine": history}), {"Mine": 1})
        check(
            loss.draw(),
            """
            panel 1,1 of 1x1
              x linear 'training step'
              y linear 'held-out loss (nats/token)'
              line: x 4 8; y 4 4.5
              line: x 4 8; y 5 nan
            legend 'Mine, 2×', 'Mine, 1×'
            """,
        )
    by_position.write(tmp_path / "b")
    check_csv(
        tmp_path / "b.csv",
        """
        arm, step, dropped, from_position, to_position, loss
        Mine, 4, False, 0, 64, 4
        Mine, 4, False, 64, 128, 5
        Mine, 8, True, 0, 64, 4.5
        Mine, 8, True, 64, 128,
        """,
    )


def test_the_drop_is_drawn_in_the_heat_map_and_no_more_than_ten_steps_are_named():
    """Eleven measurements over steps of two; the eighth is the first after the drop."""
    history = tuple(reach(2 * number, number > 6) for number in range(11))
    with paper_style():
        _, plan = reach_figures(report(reach={"DroPE": history}), {"DroPE": 0})
        axes, _ = plan.draw().axes
    assert [line.get_xdata()[0] for line in axes.lines] == [0, 7]  # the first is horizontal
    assert axes.get_xticks().tolist() == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "4", "8", "12", "16", "20"]
    assert axes.get_yticks().tolist() == [0, 64, 128, 192, 256]


def test_one_measurement_without_retrieval_is_drawn(tmp_path):
    assert len(drawn(tmp_path, (reach(4, False, retrieval=()),))) == 2
    assert {row["retrieval"] for row in rows_of(tmp_path / "reach.csv")} == {""}


def test_other_lengths_after_a_resume_are_drawn(tmp_path):
    short = Reach(2, False, 64, (64,), (4.0,), (1.0,), (0, 32, 64), (4.0, 4.0))
    assert len(drawn(tmp_path, (short, reach(4, False), reach(8, True)))) == 2


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert drawn(tmp_path, ()) == []
