"""Rows, references and means over tasks."""

import math

import pytest

from tests.report.examples import cell, report, statements
from trainer.evaluation.outcomes import Outcomes, Sample
from trainer.evaluation.statistics import wilson_interval
from trainer.report.tables import tables


def samples(cells):
    """The independent scores of cells, each of a task of its own."""
    tasks = [made.task for made in cells]
    return Outcomes(report(*cells)).samples(("RoPE", "none"), tasks, 2048)


def test_rows_follow_the_models_cells_and_the_reports_methods():
    outcomes = Outcomes(
        report(
            cell([1.0], "B", "yarn"),
            cell([1.0], "B", "none"),
            cell([1.0], "A", "none"),
            cell([1.0], "A", "unnamed"),
        )
    )
    assert outcomes.rows == [("B", "none"), ("B", "yarn"), ("A", "none"), ("A", "unnamed")]
    assert [outcomes.name(row) for row in outcomes.rows] == ["B", "B + YaRN", "A", "A + unnamed"]
    assert outcomes.methods == ["none", "yarn", "unnamed"]  # of all that the report knows


def test_a_method_is_held_against_its_model_and_a_model_against_the_first():
    outcomes = Outcomes(report(cell([1.0]), cell([1.0], "DroPE"), cell([1.0], "DroPE", "yarn")))
    assert outcomes.reference(("RoPE", "none")) is None
    assert outcomes.reference(("DroPE", "none")) == ("RoPE", "none")
    assert outcomes.reference(("DroPE", "yarn")) == ("DroPE", "none")


def test_a_comparison_is_of_the_same_trials():
    outcomes = Outcomes(
        report(
            cell([0.0, 0.0, 1.0, 0.5]),
            cell([1.0, 0.0, 1.0, 0.0], method="yarn"),
            cell([1.0] * 5, method="pi"),
        )
    )
    held = outcomes.comparison(("RoPE", "yarn"), ["multi_key"], 2048)
    assert (held.better, held.worse) == (1, 1)
    # Other trials than the reference's cannot be paired with them.
    assert outcomes.comparison(("RoPE", "pi"), ["multi_key"], 2048) is None
    assert outcomes.comparison(("RoPE", "none"), ["multi_key"], 2048) is None
    assert outcomes.comparison(("RoPE", "yarn"), ["multi_key"], 4096) is None


def test_only_tasks_of_the_same_lengths_are_averaged():
    tasks = ("multi_key", "multi_value")
    made = [cell([1.0], task=task, length=n) for task in tasks for n in (1024, 2048)]
    outcomes = Outcomes(report(*made, cell([0.0], task="zero", length=2048)))
    assert outcomes.averaged == list(tasks)
    assert outcomes.estimate(("RoPE", "none"), outcomes.averaged, 2048).mean == 1
    assert Outcomes(report(*made[:2])).averaged == []


def test_a_mean_over_tasks_needs_all_of_them():
    outcomes = Outcomes(report(cell([1.0]), cell([0.0], task="multi_value"), cell([1.0], "DroPE")))
    tasks = ["multi_key", "multi_value"]
    assert outcomes.estimate(("RoPE", "none"), tasks, 2048).mean == pytest.approx(0.5)
    assert outcomes.estimate(("DroPE", "none"), tasks, 2048) is None


def test_the_same_trials_in_two_tasks_count_once():
    """As in standard and noisy: an interval for both together is no narrower than for one."""
    scores, tasks = [1.0] * 30 + [0.0] * 20, ["multi_key", "multi_value"]
    cells = [cell(scores, task=task) for task in tasks]
    better = [cell([1.0] * 35 + [0.0] * 15, task=task, method="yarn") for task in tasks]
    outcomes = Outcomes(report(*cells, *better))
    both = outcomes.estimate(("RoPE", "none"), tasks, 2048)
    low, high = wilson_interval(30, 50)
    assert (both.mean, both.low, both.high) == pytest.approx((0.6, low, high), abs=0.003)
    held = outcomes.comparison(("RoPE", "yarn"), tasks, 2048)
    assert (held.better, held.worse, held.mark) == (5, 0, "")
    note = tables(outcomes.report)[0].note
    assert note.endswith(
        "Differences are tested on one score per text, its mean over the tasks with equally many "
        "texts."
    )


def test_texts_of_two_tasks_count_once_beside_a_task_with_more_texts():
    """As in standard, noisy and ruler: their mean is that of the first two twice and the third."""

    def made(method, hits):
        shared = [1.0] * hits + [0.0] * (50 - hits)
        yield cell(shared, method=method, task="a")
        yield cell([1.0] * 45 + [0.0] * 45, method=method, task="b")
        yield cell(shared, method=method, task="c")

    tasks = ["a", "b", "c"]
    outcomes = Outcomes(report(*made("none", 30), *made("yarn", 35)))
    held = outcomes.comparison(("RoPE", "yarn"), tasks, 2048)
    assert (held.better, held.worse, held.mark) == (5, 0, "")
    mean = outcomes.estimate(("RoPE", "none"), tasks, 2048)
    (shared_low, shared_high), (low, high) = wilson_interval(30, 50), wilson_interval(45, 90)
    assert mean.mean == pytest.approx((0.6 + 0.5 + 0.6) / 3)
    below, above = math.hypot(2 * (0.6 - shared_low), 0.5 - low), (2 * (shared_high - 0.6))
    assert mean.low == pytest.approx(mean.mean - below / 3, abs=0.003)
    assert mean.high == pytest.approx(mean.mean + math.hypot(above, high - 0.5) / 3, abs=0.003)


def test_tasks_are_paired_by_the_numbers_of_their_texts():
    at_depths = cell([1.0, 0.0, 1.0, 1.0], groups=(0, 0, 1, 1))
    alone, more = cell([0.0, 1.0], task="b"), cell([0.0, 1.0, 1.0], task="c")
    assert samples([at_depths, alone]) == [Sample((0.25, 1.0), 6, tasks=2)]
    assert samples([at_depths, more]) == [Sample((0.5, 1.0), 4), Sample((0.0, 1.0, 1.0), 3)]
    assert samples([at_depths, more, alone]) == [
        *(Sample((0.25, 1.0), 6, tasks=2), Sample((0.0, 1.0, 1.0), 3)),
    ]


def test_means_of_equal_sum_over_tasks_are_a_tie():
    """(3 / 11 + 5 / 11) / 2 and 4 / 11 differ as floats."""

    def made(method, *hits):
        for task, n in zip(("a", "b"), hits, strict=True):
            yield cell([1.0] * n + [0.0] * (11 - n), method=method, task=task, groups=(0,) * 11)

    outcomes = Outcomes(report(*made("none", 3, 5), *made("yarn", 4, 4)))
    held = outcomes.comparison(("RoPE", "yarn"), ["a", "b"], 2048)
    assert (held.better, held.worse) == (0, 0)


def test_depths_of_a_text_make_no_arrow_and_no_narrow_interval():
    """Eight texts at eleven depths, five of them won at every depth and three lost."""
    groups = tuple(text for text in range(8) for _ in range(11))
    won = [float(text < 5) for text in groups]
    lost = [1 - score for score in won]
    cells = cell(lost, groups=groups), cell(won, method="yarn", groups=groups)
    outcomes, row = Outcomes(report(*cells)), ("RoPE", "yarn")
    held = outcomes.comparison(row, ["multi_key"], 2048)
    assert (held.better, held.worse, held.mark) == (5, 3, "")
    mean = outcomes.estimate(row, ["multi_key"], 2048)
    alone = wilson_interval(5, 8)
    assert (mean.mean, mean.low, mean.high) == pytest.approx((5 / 8, *alone), abs=0.005)


def test_equal_sums_of_different_depths_are_a_tie():
    cells = (
        cell([0.1, 0.2, 0.3], groups=(0, 0, 0)),
        cell([0.3, 0.2, 0.1], method="yarn", groups=(0, 0, 0)),
    )
    held = Outcomes(report(*cells)).comparison(("RoPE", "yarn"), ["multi_key"], 2048)
    assert (held.better, held.worse) == (0, 0)


def test_cells_that_count_other_texts_are_not_compared():
    """A report of an earlier version has no groups."""
    cells = cell([0.0, 1.0], groups=(0, 0)), cell([1.0, 1.0], method="yarn")
    assert Outcomes(report(*cells)).comparison(("RoPE", "yarn"), ["multi_key"], 2048) is None


def test_a_score_at_chance_at_every_depth_of_few_texts_has_no_effective_length():
    groups = tuple(text for text in range(4) for _ in range(11))
    scores = [float(text < 2) for text in groups]
    cells = (cell(scores, task="statements", length=n, groups=groups) for n in (1024, 2048))
    outcomes = Outcomes(report(*cells, task={"chance_listed": 0.25}))
    assert outcomes.effective_length(("RoPE", "none"), ["statements"]).text == "none"


def test_a_result_holds_retrieval_and_loss_of_a_row_at_a_length():
    made = report(*statements("RoPE", (100, None, 50, 25), (4.0, 4.1, 4.2, 4.3)))
    results = Outcomes(made).results()
    assert [(r.name, r.length, r.loss) for r in results] == [
        *(("RoPE", 64, 4.0), ("RoPE", 128, 4.1), ("RoPE", 256, 4.2), ("RoPE", 512, 4.3)),
    ]
    assert [r.retrieval and r.retrieval.mean for r in results] == [1.0, None, 0.5, 0.25]
    assert Outcomes(report(cell([1.0]))).results() == []
