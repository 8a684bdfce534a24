"""Benchmarks while training in a report: the figure, and when scores were recovered."""

from __future__ import annotations

import csv

import pytest

from tests.report.described import check
from tests.report.examples import report
from trainer.evaluation.results import Drop, Milestone, Report
from trainer.plotting.style import paper_style
from trainer.report.figures import write_figures
from trainer.report.pages import write_html
from trainer.report.training_figures import recoveries, recovery_figure, value_of


def history(*scores, dropped_at=2, key="piqa/acc"):
    """A measurement every 100 tokens; the one at the drop is there before it and after it."""
    found = []
    for place, value in enumerate(scores):
        tokens = 100 * (place if place < dropped_at else place - 1)
        found.append(Milestone(tokens // 10, tokens, place >= dropped_at, {key: value}))
    return tuple(found)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ((0.1, 0.8, 0.2, 0.75, 0.77), "recovered after 200 tokens"),
        ((0.1, 0.8, 0.2, 0.76, 0.1), "recovered after 100 tokens"),
        ((0.1, 0.8, 0.77, 0.1), "never lost"),
        ((0.1, 0.8, 0.2, None, 0.7), "not recovered within the run"),
    ],
)
def test_when_95_percent_of_the_score_before_the_drop_was_back(scores, said):
    (line,) = recoveries({"DroPE": history(*scores)})
    assert line == f"DroPE: 95% of piqa/acc before the drop (0.800) {said}."


def test_of_a_perplexity_less_is_better():
    """20 / 0.95 = 21.05."""
    (line,) = recoveries({"DroPE": history(30.0, 20.0, 90.0, 21.1, 21.0, key="perplexity/2x")})
    assert line.endswith("95% of perplexity/2x before the drop (20.0) recovered after 200 tokens.")


def test_the_mean_of_several_scores_leaves_perplexities_out():
    scores = {"a": 0.25, "b": 0.75, "perplexity/1x": 9.0, "c": None}
    one = Milestone(1, 10, False, scores)
    assert value_of(one, "mean") == 0.5
    after = Milestone(2, 30, True, {"a": 0.2, "b": 0.8, "perplexity/1x": 9.0, "c": None})
    (line,) = recoveries({"DroPE": (one, after)})
    assert line.startswith(
        "DroPE: 95% of the mean before the drop (0.500) recovered after 20 tokens; "
    )
    assert "95% of a before the drop (0.250) not recovered within the run" in line
    assert "of c " not in line


@pytest.mark.parametrize("place", [0, 9])
def test_without_both_sides_of_a_drop_there_is_nothing_to_say(place):
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


def test_perplexities_are_drawn_where_there_is_nothing_else(tmp_path):
    made = report(milestones={"DroPE": history(30.0, 20.0, 90.0, 21.0, key="perplexity/2x")})
    assert [figure.path.stem for figure in write_figures(made, tmp_path)] == ["benchmarks"]
    assert "perplexity" in (tmp_path / "benchmarks.svg").read_text()


def test_benchmarks_as_a_whole():
    """The run in every task and in their mean, others in the mean alone; perplexities left out."""
    scores = ({"a": 0.5, "b": 0.25, "perplexity/1x": 9.0}, {"a": 0.75, "b": None, "c": 1.0})
    run = tuple(Milestone(n, 1000 * n, n > 1, one) for n, one in enumerate((*scores, scores[0])))
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
