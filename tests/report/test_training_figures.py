"""Figures of training: loss, reach and benchmarks."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from tests.report.described import check
from tests.report.examples import report
from trainer.evaluation.results import Arm, Drop, Milestone, Reach, Report
from trainer.plotting.style import paper_style
from trainer.report.figures import write_figures
from trainer.report.pages import write_html
from trainer.report.training_figures import (
    reach_figures,
    recoveries,
    recovery_figure,
    training_figure,
    value_of,
)


def loss_figure(**fields):
    arms = (
        Arm("DroPE", "rope", 1, 4, 3, None, ((1, 5.0), (2, 4.0), (4, None), (100, 3.0))),
        Arm("RoPE", "rope", 1, 2, 3, None, ((1, 6.0), (2, 5.5))),
        Arm("not logged", "rope", 1, 2, 3),
    )
    (plan,) = training_figure(report(arms=arms, **fields), {"DroPE": 4, "RoPE": 0})
    return plan.draw()


def test_losses_over_steps_with_the_drop():
    with paper_style():
        check(
            loss_figure(drop=Drop(2, 4.0, 8.5, 3.25)),
            """
            panel 1,1 of 1x1
              x linear 'training step'
              y linear 'training loss (nats/token)'
              line: x 1 2 4 100; y 5 4 nan 3
              line: x 1 2 4 100; y 5 4 nan 3
              line: x 1 2; y 6 5.5
              line: x 1 2; y 6 5.5
              line: upright at 2
              note 'encoding dropped at step 2\\nloss 4.00 before, 8.50 after, 3.25 at the end':
                  2 1
            legend 'RoPE', 'DroPE'
            """,
        )


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (Drop(2, 4.0, None), "encoding dropped at step 2\nloss 4.00 before, ? after"),
        (
            Drop(3, None, 8.0, 5.0),
            "encoding dropped at step 3\nloss ? before, 8.00 after, 5.00 at the end",
        ),
        (None, None),
    ],
)
def test_the_losses_of_a_drop_are_noted(drop, message):
    (axes,) = loss_figure(drop=drop).axes
    assert [text.get_text() for text in axes.texts] == ([message] if message else [])


def test_a_thick_line_is_the_mean_over_a_fortieth_of_the_points():
    """Three of 120."""
    losses = [float(step % 3) for step in range(120)]
    arm = Arm("RoPE", "rope", 1, 120, 3, None, tuple(enumerate(losses)))
    (plan,) = training_figure(report(arms=(arm,)), {"RoPE": 0})
    raw, thick = plan.draw().axes[0].lines
    assert list(raw.get_ydata()) == losses
    assert list(thick.get_ydata())[:-1] == pytest.approx([0.5, *[1.0] * 118])


def test_ticks_are_whole_steps():
    arm = Arm("RoPE", "rope", 1, 2, 3, None, ((1, 4.0), (2, 3.0)))
    (plan,) = training_figure(report(arms=(arm,)), {"RoPE": 0})
    assert [place % 1 for place in plan.draw().axes[0].get_xticks()] == [0, 0, 0, 0]


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
    for values, (first, second, *others) in zip(drawn_values, losses, strict=True):
        base = (first + second) / 2
        assert values == pytest.approx([x - base for x in (first, second, *others)])


def test_reach_as_a_whole():
    """The run at every length, paler the shorter; others at their longest; a line at the drop."""
    history = (
        Reach(4, False, 64, (64, 128), (4.0, 5.0), (1.0, 0.5), (0, 64, 128), (4.0, 5.0)),
        Reach(8, True, 64, (64, 128), (4.5, None), (0.75,), (0, 64, 128), (4.5, None)),
    )
    rates = (0.75, 0.5, 0.25)
    other = (Reach(4, False, 64, (64, 128, 192), (3.0, 3.5, 4.0), rates, (0, 192), (3.0,)),)
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
              line: x 4; y 25
              line: upright at 6
              note 'encoding dropped at step 6': 6 1
            legend 'Mine, 1×', 'Mine, 2×', 'RoPE, 3×'
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
    history = tuple(replace(reach_then, retrieval=()) for reach_then in history)
    with paper_style():
        loss, _ = reach_figures(report(reach={"Mine": history}), {"Mine": 1})
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


def history(*scores, dropped_at=2, key="piqa/acc"):
    """A measurement every 100 tokens; the one at the drop is there before it and after it."""
    milestones = []
    for place, value in enumerate(scores):
        tokens = 100 * (place if place < dropped_at else place - 1)
        milestones.append(Milestone(tokens // 10, tokens, place >= dropped_at, {key: value}))
    return tuple(milestones)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ((0.1, 0.8, 0.2, 0.75, 0.77), "recovered after 200 tokens"),
        ((0.1, 0.8, 0.2, 0.76, 0.1), "recovered after 100 tokens"),
        ((0.1, 0.8, 0.77, 0.1), "never lost"),
        ((0.1, 0.8, 0.2, None, 0.7), "not recovered within the run"),
    ],
)
def test_when_95_percent_of_the_score_before_the_drop_was_back(scores, message):
    (line,) = recoveries({"DroPE": history(*scores)})
    assert line == f"DroPE: 95% of piqa/acc before the drop (0.800) {message}."


def test_of_a_perplexity_less_is_better():
    """20 / 0.95 = 21.05."""
    (line,) = recoveries({"DroPE": history(30.0, 20.0, 90.0, 21.1, 21.0, key="perplexity/2x")})
    assert line.endswith("95% of perplexity/2x before the drop (20.0) recovered after 200 tokens.")


def test_the_mean_of_several_scores_leaves_perplexities_out():
    scores = {"a": 0.25, "b": 0.75, "perplexity/1x": 9.0, "c": None}
    before = Milestone(1, 10, False, scores)
    assert value_of(before, "mean") == 0.5
    after = Milestone(2, 30, True, {"a": 0.2, "b": 0.8, "perplexity/1x": 9.0, "c": None})
    (line,) = recoveries({"DroPE": (before, after)})
    assert line.startswith(
        "DroPE: 95% of the mean before the drop (0.500) recovered after 20 tokens; "
    )
    assert "95% of a before the drop (0.250) not recovered within the run" in line
    assert "of c " not in line


@pytest.mark.parametrize("place", [0, 9])
def test_a_recovery_needs_measurements_on_both_sides_of_a_drop(place):
    assert recoveries({"RoPE": history(0.1, 0.2, 0.3, dropped_at=place)}) == []
    assert recoveries({"RoPE": ()}) == []


def test_numbers_lie_beside_the_figure(tmp_path):
    both = history(0.1, 0.8, 0.2, None)
    made = report(drop=Drop(10, 4.0, 5.0), milestones={"DroPE": both, "RoPE": both[:2], "NoPE": ()})
    figures = write_figures(made, tmp_path)
    assert [figure.path.stem for figure in figures] == ["benchmarks"]
    with (tmp_path / "benchmarks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["tokens"], row["value"]) for row in rows] == [
        ("DroPE", "0", "0.1"),
        ("DroPE", "100", "0.8"),
        ("DroPE", "100", "0.2"),
        ("DroPE", "200", ""),
        ("RoPE", "0", "0.1"),
        ("RoPE", "100", "0.8"),
    ]
    assert "encoding dropped" in (tmp_path / "benchmarks.svg").read_text()
    write_html(made, figures, tmp_path / "report.html")
    assert "What models score while they train" in (tmp_path / "report.html").read_text()
    assert Report.from_dict(made.to_dict()).milestones == made.milestones


def test_benchmarks_as_a_whole():
    """The run in every task and in their mean, others in the mean alone; perplexities left out."""
    scores = ({"a": 0.5, "b": 0.25, "perplexity/1x": 9.0}, {"a": 0.75, "b": None, "c": 1.0})
    run = tuple(
        Milestone(n, 1000 * n, n > 1, measured) for n, measured in enumerate((*scores, scores[0]))
    )
    milestones = {"DroPE": run, "RoPE": run[:1], "NoPE": ()}
    with paper_style():
        (plan,) = recovery_figure(report(milestones=milestones))
        check(
            plan.draw(),
            """
            panel 1,1 of 1x1
              x linear 'training tokens'
              y linear 'score (%)'
              line: x 0 1000 2000; y 37.5 87.5 37.5
              line: x 0 1000 2000; y 50 75 50
              line: x 0 1000 2000; y 25 nan 25
              line: x 0; y 37.5
              line: upright at 2000
              note 'encoding dropped': 2000 1
            legend 'DroPE, a', 'DroPE, mean', 'RoPE, mean', 'DroPE, b'
            """,
        )


@pytest.mark.parametrize("key", ["perplexity/1x", "lambada/perplexity", "wiki/bits_per_byte"])
def test_perplexities_as_a_whole(key):
    with paper_style():
        (plan,) = recovery_figure(report(milestones={"DroPE": history(30.0, 20.0, key=key)}))
        (axes,) = plan.draw().axes
    assert axes.get_ylabel() == "perplexity"
    assert [line.get_ydata().tolist() for line in axes.lines] == [[30, 20]]
    assert [text.get_text() for text in axes.texts] == []


def test_one_task_needs_no_mean():
    with paper_style():
        (plan,) = recovery_figure(report(milestones={"DroPE": history(0.5, 0.25)}))
        figure = plan.draw()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["piqa/acc"]


@pytest.mark.parametrize("reference", [0.0, None, -0.5])
def test_a_score_that_was_nothing_cannot_be_recovered(reference):
    assert recoveries({"DroPE": history(0.5, reference, 0.5)}) == []


@pytest.mark.parametrize(
    ("score", "shown"), [(9.9996, "10.000"), (10.0, "10.0"), (1234.5, "1,234.5")]
)
def test_scores_are_named_with_few_digits(score, shown):
    (line,) = recoveries({"DroPE": history(0.0, score, score)})
    assert f"before the drop ({shown}) never lost" in line
