"""What stands in the tables of a report."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from tests.report.examples import cell, example, loss, report
from trainer.common.errors import UserError
from trainer.report.tables import MISSING, compare, factor_label, legend, perplexity, tables


def test_the_mean_comes_first_and_perplexity_last():
    assert [table.title for table in tables(example())] == [
        "Mean over tasks",
        "Multi-key needles",
        "Multi-value needles",
        "Held-out perplexity",
    ]
    assert tables(report()) == []


def test_a_cell_is_a_mean_its_interval_and_a_mark():
    better = cell([1.0] * 9 + [0.0] * 11, method="yarn")
    (table,) = tables(report(cell([0.0] * 20), better))
    (first, (plain,)), (second, (yarn,)) = table.rows
    assert (first, second) == ("RoPE", "+ YaRN")
    assert (plain.value, plain.interval, plain.mark, plain.best) == ("0.0", "0.0–16.1", "", False)
    # Wilson: 9 of 20 is 25.8 to 65.8; nine discordant pairs in one direction: p = 2 / 2^9.
    assert (yarn.value, yarn.interval, yarn.mark, yarn.best) == ("45.0", "25.8–65.8", "↑", True)


def test_a_mark_is_against_the_model_as_it_is_and_that_against_the_first_one():
    """At the same length, of the same trials."""
    rates = {
        ("RoPE", "none"): (10, 20), ("RoPE", "yarn"): (10, 10),
        ("DroPE", "none"): (20, 20), ("DroPE", "yarn"): (10, 20), ("DroPE", "pi"): (20, 10),
    }  # fmt: skip
    cells = [
        cell([1.0] * hits + [0.0] * (20 - hits), model, method, length=length)
        for (model, method), of_lengths in rates.items()
        for length, hits in zip((1024, 2048), of_lengths, strict=True)
    ]
    (table,) = tables(report(*cells))
    marks = [[entry.mark for entry in entries] for _, entries in table.rows]
    assert marks == [["", ""], ["", "↓"], ["↑", ""], ["↓", ""], ["", "↓"]]


def test_trials_and_texts_of_a_cell_are_counted():
    one, other = cell([1.0] * 4, groups=(0, 0, 1, 1)), cell([1.0] * 2, "DroPE", groups=(0, 1))
    (table,) = tables(report(one, other))
    assert table.note == "Trials in a cell: 2 to 4, texts: 2."


def test_unmeasured_cells_are_empty_and_unmeasured_rows_left_out():
    made = report(
        cell([1.0], length=1024),
        cell([1.0], "DroPE", length=2048),
        loss(3.0, "NoPE"),
    )
    scores, losses = tables(made)
    assert [(name, [e is None for e in entries]) for name, entries in scores.rows] == [
        ("RoPE", [False, True]),
        ("DroPE", [True, False]),
    ]
    assert [name for name, _ in losses.rows] == ["NoPE"]


def test_perplexity_is_exp_of_the_last_loss_and_the_lowest_is_best():
    losses = {"RoPE": math.log(20), "DroPE": math.log(12.345), "NoPE": math.log(123.4)}
    made = report(*(loss(value, model) for model, value in losses.items()))
    (table,) = tables(made)
    entries = [(e.value, e.best) for _, (e,) in table.rows]
    assert entries == [("20.00", False), ("12.35", True), ("123", False)]
    assert perplexity(1e4) == math.inf


def test_a_loss_that_is_not_finite_was_measured():
    (losses,) = tables(report(loss(3.0), loss([3.0, math.nan], "DroPE")))
    assert [entries[0].value for _, entries in losses.rows] == ["20.09", "not finite"]


def test_perplexities_over_seeds_have_an_interval():
    """Of losses of 3 and 5 nats it is 4 ± 12.706: t with one degree of freedom."""
    made = report(loss(3.0, "A (0)"), loss(5.0, "A (1)"), seeds={"A (0)": "A", "A (1)": "A"})
    (table,) = tables(made.over_seeds())
    ((name, (entry,)),) = table.rows
    assert (name, entry.value) == ("A", f"{math.exp(4):.2f}")
    low, high = map(float, entry.interval.split("–"))
    assert (low, high) == pytest.approx(
        (math.exp(4 - 12.7062), math.exp(4 + 12.7062)), abs=0.01, rel=1e-4
    )


def test_rows_of_equal_means_are_all_best():
    """(4 / 11 + 5 / 11) / 3 and (1 / 11 + 4 / 11 + 4 / 11) / 3 differ as floats."""

    def made(method, *hits):
        scores = [float(depth < n) for n in hits for depth in range(11)]
        groups = tuple(text for text in range(3) for _ in range(11))
        return cell(scores, method=method, groups=groups)

    (table,) = tables(report(made("none", 0, 4, 5), made("yarn", 1, 4, 4), made("pi", 0, 0, 0)))
    assert [(entry.value, entry.best) for _, (entry,) in table.rows] == [
        *(("27.3", True), ("27.3", True), ("0.0", False)),
    ]


def test_a_unit_below_the_training_length_is_not_called_trained():
    """Models of context 8,192 whose lengths count from 1,024."""
    made = report(cell([1.0] * 10), cell([1.0] * 10, length=1024), trained=8192)
    (table,) = tables(made)
    assert [column[1] for column in table.columns] == ["1×", "2×"]


def test_trials_are_counted_in_the_table_of_their_task():
    several = cell([1.0] * 2), cell([1.0] * 4, task="multi_value")
    _, *each = tables(report(*several))
    assert [table.note for table in each] == [
        "Trials in a cell: 2, texts: 2.",
        "Trials in a cell: 4, texts: 4.",
    ]


def test_perplexities_have_titles_of_methods_and_the_trained_length():
    """From 100,000 on, which no digit tells anything of, powers of ten."""
    losses = {"none": math.log(99_999.2), "yarn": math.log(2.4e6)}
    made = report(*(loss(nats, method=name, length=1024) for name, nats in losses.items()))
    (table,) = tables(made)
    assert table.columns == (("1024 tokens", "1× (trained)"),)
    assert [(name, entry.value) for name, (entry,) in table.rows] == [
        ("RoPE", "99999"),
        ("+ YaRN", "2e+06"),
    ]


def test_factors_of_lengths_are_short_and_exact_where_they_are_large():
    labels = {2.0: "2×", 1.5: "1.5×", 100 / 128: "0.781×", 128.0: "128×", 1024.0: "1024×"}
    assert {factor: factor_label(factor) for factor in labels} == labels


def test_marks_are_explained_where_there_are_any():
    plain = report(cell([0.0] * 20))
    marked = report(cell([0.0] * 20, length=1024), cell([1.0] * 20, method="yarn"))
    marked_too = report(cell([1.0] * 20), cell([0.0] * 20, method="yarn"))
    for made, explained in ((plain, ""), (marked, f"Bold {MISSING}"), (marked_too, "Bold ↓")):
        words = legend(tables(made))
        for mark in ("Bold", "↓", MISSING):
            assert (mark in words) == (mark in explained)


ROW = {"run": "x", "model": "RoPE", "method": "none", "task": "statements", "length": 64,
       "factor": 1.0, "metric": "score", "value": 0.5, "low": 0.25, "high": 0.75}  # fmt: skip


FACTS = {"tasks": {"statements": "Numbers"}, "methods": {"none": "as is", "pi": "PI"}}


def run(place, *rows, evaluation=False, text="one", C=64):
    facts = FACTS | {"environment": {"corpus": text}, "training_length": C}
    results = place / "evaluation" if evaluation else place
    results.mkdir(parents=True)
    table = pd.DataFrame([ROW | row for row in rows])
    table.to_csv(results / "results.csv", index=False)
    (results / "facts.json").write_text(json.dumps(facts))
    return str(place)


def test_runs_are_named_by_their_directories_and_have_a_column_for_each_length(tmp_path):
    loss = {"task": "perplexity", "metric": "loss", "value": 3.25, "low": None, "high": None}
    a = run(
        tmp_path / "a", {}, {"length": 128, "factor": 2.0, "value": 0.125}, ROW | {"method": "pi"}
    )
    b = run(tmp_path / "b", {"value": 1.0, "high": 1.0}, loss, evaluation=True)
    scores, losses = compare([a, b])
    assert scores.title == "Numbers, in %"
    assert losses.title == "perplexity, as loss in nats per token"
    assert scores.columns == (("64 tokens", "1×"), ("128 tokens", "2×"))
    assert [(name, [e and e.value for e in entries]) for name, entries in scores.rows] == [
        ("a: RoPE", ["50.0", "12.5"]),
        ("+ PI", ["50.0", None]),
        ("b: RoPE", ["100.0", None]),
    ]
    assert scores.rows[0][1][0].interval == "25.0–75.0"
    assert losses.rows[0][1] == (("3.250", "", "", True),)
    assert [[e and e.best for e in entries] for _, entries in scores.rows] == [
        [False, True],
        [False, None],
        [True, None],
    ]


def test_the_best_of_runs_is_the_highest_score_above_0_and_the_lowest_loss(tmp_path):
    loss = {"task": "perplexity", "metric": "loss", "low": None, "high": None}
    runs = [
        run(
            tmp_path / name, {"value": 0.0}, {"value": score, "length": 128}, loss | {"value": nats}
        )
        for name, score, nats in (("a", 0.25, 3.5), ("b", 0.5, 3.25))
    ]
    scores, losses = compare(runs)
    assert [[entry.best for entry in row] for _, row in scores.rows] == [[False] * 2, [False, True]]
    assert [entry.best for _, (entry,) in losses.rows] == [False, True]


def test_runs_whose_directories_have_one_name_have_their_paths(tmp_path):
    runs = [run(tmp_path / place / "a", {}) for place in "xy"]
    (scores,) = compare(runs)
    assert [name for name, _ in scores.rows] == [f"{path}: RoPE" for path in runs]


def test_a_length_of_runs_of_other_training_lengths_has_a_factor_for_each(tmp_path):
    loss = {"task": "perplexity", "metric": "loss", "value": 3.25, "low": None, "high": None}
    far, near = {"length": 512, "factor": 8.0}, {"length": 512, "factor": 4.0}
    runs = [run(tmp_path / "a", far, loss | far), run(tmp_path / "b", near, loss | near, C=128)]
    scores, *losses = compare(runs)
    assert scores.columns == (("512 tokens", "8× or 4×"),)
    assert [table.columns[0][1] for table in losses] == ["8×", "4×"]  # of other tokens


def test_losses_on_different_texts_stand_in_different_tables(tmp_path):
    loss = {"task": "perplexity", "metric": "loss", "value": 3.25, "low": None, "high": None}
    runs = [run(tmp_path / name, {}, loss, text=name) for name in "ab"]
    scores, *losses = compare(runs)
    assert [[name for name, _ in table.rows] for table in (scores, *losses)] == [
        ["a: RoPE", "b: RoPE"],
        ["a: RoPE"],
        ["b: RoPE"],
    ]
    assert [table.note.partition(". ")[0] for table in losses] == [
        f"Held-out text of corpus {name}, C = 64 tokens" for name in "ab"
    ]
    assert scores.note.startswith("With")


def test_a_run_that_was_evaluated_later_has_the_rows_of_its_evaluation(tmp_path, monkeypatch):
    place = run(tmp_path / "a", {}, evaluation=True)
    (tmp_path / "a" / "results.csv").write_text("model\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (place, "~/a"):
        (scores,) = compare([name])
        assert scores.rows[0][0] == "a: RoPE"


def test_a_directory_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"runs: expected directories with rows in results\.csv"):
        compare([str(tmp_path)])
