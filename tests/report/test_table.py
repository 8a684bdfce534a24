"""What stands in the tables, before it is written in any format."""

import math

from tests.report.examples import cell, example, report
from trainer.evaluation.longbench import FOURTEEN, KINDS
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
        "LongBench by label",
        "LongBench by label",
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


def test_averages_by_each_part_of_a_label():
    labels = ("qa|8–16K", "qa|0–4K", "code|0–4K")
    made = report(
        cell([0.2, 0.4, 0.6], task="longbench", labels=labels),
        cell([0.1, 0.4, 0.9], task="longbench", labels=labels, method="yarn"),
    )
    kinds, buckets = (t for t in tables(made) if t.detail)
    assert kinds.columns == (("code", "1 trial"), ("qa", "2 trials"))
    assert [e.value for e in kinds.rows[0][2]] == ["60.0", "30.0"]
    assert buckets.columns == (("0–4K", "2 trials"), ("8–16K", "1 trial"))
    assert [e.value for e in buckets.rows[1][2]] == ["65.0", "10.0"]


def test_means_over_tasks_by_label_count_every_task_alike():
    qa, code = ("QA|0–4K", "QA|0–4K", "QA|4–8K"), ("Code|4–8K", "Code|8–16K")
    made = report(
        cell([1, 0, 1], task="a", labels=qa),
        cell([0.5], task="b", labels=("QA|4–8K",)),
        cell([0.2, 0.4], task="c", labels=code),
        tasks={"a": "A", "b": "B", "c": "C"},
    )
    kinds, buckets = (table for table in tables(made) if table.title == "Mean over tasks by label")
    assert kinds.columns == (("Code", "1 task"), ("QA", "2 tasks"))
    assert [e.value for e in kinds.rows[0][2]] == ["30.0", "58.3"]  # (2/3 + 1/2) / 2
    assert [head for head, _ in buckets.columns] == ["0–4K", "4–8K", "8–16K"]
    assert [e.value for e in buckets.rows[0][2]] == ["50.0", "56.7", "40.0"]  # (1 + .5 + .2) / 3


def test_the_mean_over_tasks_is_that_of_rope_id_s_table_7():
    """RoPE at 1B and 4k: 14.61 is the mean over tasks, not over the five categories."""
    printed = {
        "Single-Document QA": 6.65,
        "Multi-Document QA": 4.32,
        "Summarization": 14.22,
        "Few-shot Learning": 27.27,
        "Code Completion": 23.55,
    }
    kinds = {task: KINDS[task].category for task in FOURTEEN}
    made = report(
        *(cell([printed[kind] / 100], task=task, labels=(kind,)) for task, kind in kinds.items()),
        tasks={task: task for task in kinds},
    )
    whole, by_category = (table for table in tables(made) if table.key.startswith("summary"))
    assert [e.value for e in whole.rows[0][2]] == ["14.6"]
    assert [e.value for e in by_category.rows[0][2]] == [
        f"{printed[kind]:.1f}" for kind, _ in by_category.columns
    ]


def test_differences_by_label_are_tested_on_the_pairs_of_trials_with_it():
    """Nine trials of each label, in turns: of one all are better, by less than the trials differ;
    of one all are worse; of the third as many are better as worse."""
    labels = ("a", "b", "c") * 9
    reference = [x for i in range(9) for x in (i / 10, 1.0, float(i % 2))]
    other = [x for i in range(9) for x in (i / 10 + 0.05, 0.0, float(0 < i < 5))]
    made = report(
        cell(reference, task="longbench", labels=labels),
        cell(other, task="longbench", labels=labels, method="yarn"),
    )
    (by_label,) = (t for t in tables(made) if t.detail)
    assert [e.mark for e in by_label.rows[1][2]] == ["↑", "↓", ""]
    assert [e.best for e in by_label.rows[1][2]] == [True, False, True]


def test_labels_may_have_more_parts_than_others_and_not_be_there_at_every_length():
    made = report(
        cell([0.2, 0.4, 0.6], task="longbench", labels=("qa|4K", "code", "qa|8K")),
        cell([0.5], task="longbench", length=4096),
    )
    kinds, buckets = (table for table in tables(made) if table.detail)
    assert kinds.columns == (("code", "1 trial"), ("qa", "2 trials"))
    assert buckets.columns == (("4K", "1 trial"), ("8K", "1 trial"))
    assert [e.value for e in buckets.rows[0][2]] == ["20.0", "60.0"]


def test_two_tasks_with_a_label_are_counted_as_tasks():
    """And trials of one task as trials, also where it is only one."""
    labels = ("a", "b", "b")
    x_task, y_task = (cell([0.5, 0.5, 0.5], task=task, labels=labels) for task in ("x", "y"))
    made = {table.key: table.columns for table in tables(report(x_task, y_task))}
    assert made["summary-2048-label-1"] == (("a", "2 tasks"), ("b", "2 tasks"))
    assert made["x-2048-label-1"] == (("a", "1 trial"), ("b", "2 trials"))


def test_a_label_that_all_trials_share_makes_no_table():
    made = report(cell([0.2, 0.4], task="longbench", labels=("qa", "qa")))
    assert [table.key for table in tables(made)] == ["longbench"]


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
