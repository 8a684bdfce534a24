"""Results: rows made of trials, and files that are read back."""

from __future__ import annotations

import json
import math
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from tests.report.examples import EXPERIMENT, cell, example, loss, report
from trainer.common.errors import UserError
from trainer.evaluation.results import PERPLEXITY, averaged, by_text
from trainer.evaluation.statistics import estimate
from trainer.report.report import FACTS, Report
from trainer.report.tables import compare


def values(made, task, metric="score"):
    """Value, interval and count of the only row."""
    rows = made.rows[(made.rows.task == task) & (made.rows.metric == metric)]
    ((_, row),) = rows.iterrows()
    return row["value"], row["low"], row["high"], row["n"]


def test_a_report_survives_writing_and_reading(tmp_path):
    made = example(trials=5)
    others = {"notes": ("one",), "unigram_loss": 6.5, "trained": 4 * made.training_length}
    made = Report(**{**vars(made), **EXPERIMENT, **others})
    made.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "trials.parquet", FACTS}
    back = Report.read(tmp_path)
    facts, same = (
        {k: v for k, v in vars(r).items() if k not in ("rows", "trials")} for r in (made, back)
    )
    assert facts == same
    pd.testing.assert_frame_equal(back.rows, made.rows, check_dtype=False, rtol=1e-9)
    pd.testing.assert_frame_equal(back.trials, made.trials, check_dtype=False)
    report().write(tmp_path)
    assert Report.read(tmp_path).rows.empty


@pytest.mark.parametrize(("longest", "trained"), [(None, 1024), (4096, 4096)])
def test_the_longest_context_of_a_report_of_0_3_0_is_found_under_its_name_of_then(
    tmp_path, longest, trained
):
    report(training_length=1024).write(tmp_path)
    facts = json.loads((tmp_path / FACTS).read_bytes())
    del facts["trained"]
    (tmp_path / FACTS).write_text(json.dumps({**facts, "longest_context": longest}))
    assert Report.read(tmp_path).trained == trained


def test_a_report_that_cannot_be_written_leaves_no_facts(tmp_path):
    with pytest.raises(ValueError, match="serialize"):
        report(config={"not json": object()}).write(tmp_path)
    assert not (tmp_path / FACTS).exists()


@pytest.mark.parametrize("facts", ["{}", "[]", '{"training_length": 64}', "{"])
def test_facts_of_something_else_are_refused_by_their_path(tmp_path, facts):
    example(trials=5).write(tmp_path)
    (tmp_path / FACTS).write_text(facts)
    for read in (Report.read, lambda directory: compare([str(directory)])):
        with pytest.raises(UserError, match=rf"{FACTS}: expected the facts") as refusal:
            read(tmp_path)
        assert "\n" not in str(refusal.value)


def test_numbers_that_are_not_finite_are_empty(tmp_path):
    made = report(loss(math.nan), config={"x": math.inf})
    made.write(tmp_path)
    back = Report.read(tmp_path)
    assert back.rows.value.isna().all()
    assert back.config == {"x": None}
    assert back.curve(("RoPE", "none"), PERPLEXITY).empty


def test_a_score_is_the_mean_with_wilsons_interval():
    made = report(cell([1.0] * 9 + [0.0] * 11))
    wanted = binomtest(9, 20).proportion_ci(method="wilson")
    expected = pytest.approx((0.45, wanted.low, wanted.high, 20), abs=1e-6)
    assert values(made, "multi_key") == expected


def test_trials_of_one_text_are_one_score():
    scores, groups = [1.0, 0.0, 1.0, 1.0, 0.0, 0.5], (0, 0, 1, 1, 2, 2)
    of_texts = [0.5, 1.0, 0.25]
    expected = estimate(of_texts, 6)
    result = values(report(cell(scores, groups=groups)), "multi_key")
    assert result == pytest.approx((fmean(of_texts), expected.low, expected.high, 3))


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("texts", [8, 20])
def test_texts_that_agree_are_no_more_than_their_trials(texts, tasks):
    """Half of the four trials of every text is right, of a task and of the mean over tasks."""
    groups = np.repeat(np.arange(texts), 4)
    names = ["multi_key", "multi_value"][:tasks]
    made = report(*(cell([1.0, 0.0] * (2 * texts), task=name, groups=groups) for name in names))
    for task, trials in ("multi_key", 4 * texts), ("mean", 4 * texts * tasks):
        if task in {*made.rows.task}:
            wanted = binomtest(trials // 2, trials).proportion_ci(method="wilson")
            expected = pytest.approx((0.5, wanted.low, wanted.high, texts), abs=1e-6)
            assert values(made, task) == expected
    assert ("mean" in {*made.rows.task}) == (tasks == 2)


def test_labels_have_rows_of_their_own():
    made = report(cell([1.0, 0.0, 1.0], labels=("qa", "qa", "code")))
    rows = made.rows.set_index("task").value.to_dict()
    assert rows == {
        "multi_key": pytest.approx(2 / 3), "multi_key|qa": 0.5, "multi_key|code": 1.0,
    }  # fmt: skip


def test_final_losses_are_those_of_models_as_they_are_at_the_training_length():
    further = loss(4.0, length=2048), loss(3.0, method="yarn", length=1024)
    made = report(loss(3.5, length=1024), *further, trained=2048)
    assert made.final_losses == {"RoPE": 3.5}


def test_losses_have_students_interval():
    made = report(loss((4.0, 4.2, 4.4)))
    value, low, high, n = values(made, PERPLEXITY, "loss")
    half = 4.302652729911275 * 0.2 / math.sqrt(3)  # t with two degrees of freedom
    assert (value, low, high, n) == (*map(pytest.approx, (4.2, 4.2 - half, 4.2 + half)), 3)


def test_the_mean_is_over_tasks_and_pairs_their_texts():
    """Two tasks of four texts, which may be the same ones, and one of two others."""
    lengths = (1024, 2048)
    cells = [
        cell(scores, task=task, length=length)
        for length in lengths
        for task, scores in (
            ("a", [1.0, 1.0, 0.0, 0.0]), ("b", [1.0, 0.0, 0.0, 0.0]), ("c", [1.0, 1.0]),
        )
    ]  # fmt: skip
    made = report(*cells, tasks={key: key for key in "abc"})
    assert averaged(made.trials) == ["a", "b", "c"]
    texts = by_text(made.trials)
    assert texts[texts.length == 1024].value.tolist() == [1.0, 0.5, 0.0, 0.0, 1.0, 1.0]
    mean = made.curve(("RoPE", "none"), "mean")
    assert mean.length.tolist() == [*lengths]
    assert mean.value.tolist() == [pytest.approx((0.5 + 0.25 + 1.0) / 3)] * 2


def test_every_task_counts_once_in_the_mean_however_many_texts_it_has():
    """Its interval is that of a sum of independent means (Zou and Donner 2008)."""
    scores = {"a": [1.0, 0.0, 0.0], "b": [0.0] + [1.0] * 7, "c": [1.0, 0.0] * 10}
    made = report(*(cell(each, task=task) for task, each in scores.items()))
    value, low, high, n = values(made, "mean")
    alone = [estimate(each) for each in scores.values()]
    assert (value, n) == (pytest.approx((1 / 3 + 7 / 8 + 1 / 2) / 3), 31)
    assert value - low == pytest.approx(math.hypot(*(e.mean - e.low for e in alone)) / 3)
    assert high - value == pytest.approx(math.hypot(*(e.high - e.mean for e in alone)) / 3)


SEEDS = dict.fromkeys(("DroPE (a)", "DroPE (b)", "DroPE (c)"), "DroPE")
T_2 = 4.302652729911275
"""Student's 97.5% quantile for three numbers."""


def over_seeds():
    """Three seeds of one model with 6, 8 and 10 of 10 right, beside a model of one seed."""
    cells = []
    for name, right, nats in zip(SEEDS, (6, 8, 10), (4.0, 4.1, 4.5), strict=True):
        cells += [cell([1.0] * right + [0.0] * (10 - right), name), loss(nats, name)]
    made = report(*cells, cell([1.0, 0.0]), origins={"DroPE (b)": "RoPE"}, seeds=SEEDS)
    return made, made.over_seeds()


def test_seeds_have_one_row_with_their_mean_and_students_interval():
    """Of 0.6, 0.8 and 1.0 the standard deviation is 0.2; a rate ends at 1."""
    made, means = over_seeds()
    rows = means.rows[means.rows.metric == "score"].set_index("model")
    half = T_2 * 0.2 / math.sqrt(3)
    assert [*rows.index] == ["DroPE", "RoPE"]
    assert rows.loc["DroPE", ["value", "low", "high"]].tolist() == pytest.approx(
        [0.8, 0.8 - half, 1.0]
    )
    alone = made.rows.set_index("model").loc["RoPE"]
    assert rows.loc["RoPE", ["value", "low", "high"]].tolist() == pytest.approx(
        alone[["value", "low", "high"]].tolist()
    )
    mean, deviation = 4.2, math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2)
    half = T_2 * deviation / math.sqrt(3)
    assert values(means, PERPLEXITY, "loss")[:3] == pytest.approx((mean, mean - half, mean + half))
    assert means.origins == {"DroPE": "RoPE"}


def test_a_model_came_from_the_mean_of_the_seeds_of_its_origin():
    seeds = {"DroPE (a)": "DroPE", "DroPE (b)": "DroPE", "RoPE (a)": "RoPE", "RoPE (b)": "RoPE"}
    came_from = {"DroPE (a)": "RoPE (a)", "DroPE (b)": "RoPE (b)", "alone": "RoPE (a)"}
    cells = [cell([1.0, 0.0], name) for name in (*seeds, "alone")]
    means = report(*cells, origins=came_from, seeds=seeds).over_seeds()
    assert means.origins == {"DroPE": "RoPE", "alone": "RoPE"}


def test_seeds_without_spread_keep_the_interval_over_trials():
    seeds = {"A (0)": "A", "A (1)": "A"}
    made = report(*(cell([1.0] * 10, name) for name in seeds), seeds=seeds)
    (row,) = made.over_seeds().rows.itertuples()
    assert (row.low, row.high) == pytest.approx((made.rows.low[0], 1.0))
    assert row.low < 0.75  # Wilson: of 10 of 10 it is 0.722


def test_a_text_of_several_seeds_has_their_mean_score():
    _, means = over_seeds()
    texts = by_text(means.trials[means.trials.model == "DroPE"].query("metric == 'score'"))
    assert texts.value.tolist() == pytest.approx([1.0] * 6 + [2 / 3] * 2 + [1 / 3] * 2)


def test_seeds_of_a_low_rate_have_an_interval_that_begins_at_0():
    seeds = {"A (0)": "A", "A (1)": "A"}
    cells = (cell([1.0] * n + [0.0] * (10 - n), name) for n, name in enumerate(seeds))
    (row,) = report(*cells, seeds=seeds).over_seeds().rows.itertuples()
    assert (row.value, row.low) == (pytest.approx(0.05), 0)


def test_a_curve_is_in_the_order_of_lengths():
    made = report(*(cell([1.0], length=length) for length in (2048, 512, 1024)))
    assert made.curve(("RoPE", "none"), "multi_key").length.tolist() == [512, 1024, 2048]


@pytest.mark.parametrize("name", ["007", "NA", "None"])
def test_names_that_look_like_numbers_are_read_as_they_were_written(tmp_path, name):
    report(cell([1.0], name)).write(tmp_path)
    assert Report.read(tmp_path).rows.model.tolist() == [name]
