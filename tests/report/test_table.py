"""What stands in the tables, before it is written in any format."""

import math

from tests.report.examples import cell, example, report
from trainer.evaluation.results import PERPLEXITY
from trainer.report.tables import (
    latex_tables,
    markdown_tables,
    number,
    perplexity,
    tables,
    terminal_cell,
)


def by_key(made):
    return {table.key: table for table in tables(made)}


def test_the_mean_comes_first_and_perplexity_last():
    made = example(models=("RoPE", "DroPE"), methods=("none", "yarn"), trials=18, longbench=True)
    titles = [table.title for table in tables(made)]
    assert titles == [
        "Mean over tasks",
        "Multi-key needles",
        "Multi-value needles",
        "LongBench",
        "Held-out perplexity",
    ]


def test_a_cell_is_a_mean_its_interval_and_a_mark():
    better = cell([1.0] * 9 + [0.0] * 11, method="yarn")
    table = by_key(report(cell([0.0] * 20), better))["multi_key"]
    (_, _, (plain,)), (_, _, (yarn,)) = table.rows
    assert (plain.value, plain.interval, plain.mark, plain.best) == ("0.0", "0.0–16.1", "", False)
    # Wilson: 9 of 20 is 25.8 to 65.8; nine discordant pairs in one direction: p = 2 / 2^9.
    assert (yarn.value, yarn.interval, yarn.mark, yarn.best) == ("45.0", "25.8–65.8", "↑", True)


def test_columns_are_lengths_and_say_which_was_trained():
    table = by_key(report(cell([1.0], length=2048), cell([1.0], length=1024)))["multi_key"]
    lengths = (("1024 tokens", "1× (trained)"), ("2048 tokens", "2×"))
    assert table.columns == (*lengths, ("effective", "≥85% of 1×"))


def test_a_table_without_the_training_length_has_no_effective_length():
    table = by_key(report(cell([1.0], length=2048), cell([1.0], length=4096)))["multi_key"]
    assert [head for head, _ in table.columns] == ["2048 tokens", "4096 tokens"]
    assert "Effective" not in table.legend


def test_unmeasured_cells_are_empty_and_unmeasured_rows_left_out():
    made = report(
        cell([1.0], length=1024),
        cell([1.0], "DroPE", length=2048),
        cell([], "NoPE", task=PERPLEXITY, last_loss=3.0),
    )
    table = by_key(made)["multi_key"]
    assert [(model, [e is None for e in entries]) for model, _, entries in table.rows] == [
        ("RoPE", [False, True]),
        ("DroPE", [True, False]),
    ]
    (row,) = by_key(made)[PERPLEXITY].rows
    assert row[0] == "NoPE"


def test_perplexity_is_exp_of_the_last_loss_and_the_lowest_is_best():
    made = report(
        cell([], task=PERPLEXITY, last_loss=math.log(20)),
        cell([], "DroPE", task=PERPLEXITY, last_loss=math.log(12.345)),
    )
    table = by_key(made)[PERPLEXITY]
    assert [(e.value, e.best) for _, _, (e,) in table.rows] == [("20.00", False), ("12.35", True)]
    assert perplexity(1e4) == math.inf
    assert [number(x) for x in (9.876, 99.99, 100.0, 123.4)] == ["9.88", "99.99", "100", "123"]
    assert [number(x) for x in (99_999.0, 1e5, math.inf)] == ["99999", "1e+05", "inf"]


def test_losses_that_are_all_equal_have_no_best():
    cells = [cell((), model, task="perplexity", last_loss=6.0) for model in ("RoPE", "DroPE")]
    (table,) = tables(report(*cells))
    assert [entry.best for _, _, (entry,) in table.rows] == [False, False]
    (alone,) = tables(report(cells[0]))
    assert [entry.best for _, _, (entry,) in alone.rows] == [True]


def test_a_report_without_cells_has_no_tables():
    assert tables(report()) == []


def test_a_method_that_changes_nothing_is_marked_and_explained():
    made = report(
        cell([1.0], length=1024), cell([1.0], method="yarn", length=1024, unchanged=True),
        cell([0.0], length=2048), cell([1.0], method="yarn", length=2048),
    )  # fmt: skip
    table = by_key(made)["multi_key"]
    assert [entry.mark for entry in table.rows[1][2]] == ["=", "", ""]  # the last: effective length
    assert table.legend.endswith("= the method changes nothing at this length.")
    assert "=" not in by_key(report(cell([1.0])))["multi_key"].legend
    for form in (markdown_tables, latex_tables):
        assert "=" in form(made)
    losses = report(
        cell([], task=PERPLEXITY, last_loss=3.0),
        cell([], method="yarn", task=PERPLEXITY, last_loss=3.0, unchanged=True),
    )
    (_, _, (entry,)) = by_key(losses)[PERPLEXITY].rows[1]
    assert terminal_cell(entry).plain == "20.09="
