"""What stands in the tables of a report."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from rich.console import Console

from tests.report.examples import METHODS, cell, example, loss, report, statements
from trainer.common.errors import UserError
from trainer.evaluation.results import table as table_of
from trainer.evaluation.results import write_csv
from trainer.report import terminal
from trainer.report.tables import compare, perplexity, tables


def lines(monkeypatch, tables, width=100, color=None):
    """The lines of a terminal of that width."""
    shown = io.StringIO()
    look = {"width": width, "color_system": color, "force_terminal": True}
    monkeypatch.setattr(terminal, "Console", partial(Console, file=shown, **look))
    terminal.print_tables(tables)
    return shown.getvalue().splitlines()


def test_the_mean_comes_first_and_perplexity_last():
    made = example(models=("RoPE", "DroPE"), methods=("none", "yarn"), trials=18)
    assert [table.title for table in tables(made)] == [
        "Mean over tasks",
        "Multi-key needles",
        "Multi-value needles",
        "Held-out perplexity",
    ]
    assert tables(report()) == []


def test_a_cell_is_a_mean_its_interval_and_a_mark():
    better = cell([1.0] * 9 + [0.0] * 11, method="yarn")
    (table,) = tables(report(cell([0.0] * 20), better))
    (_, first, (plain,)), (_, second, (yarn,)) = table.rows
    assert (first, second) == ("RoPE", "+ YaRN")
    assert (plain.value, plain.interval, plain.mark, plain.best) == ("0.0", "0.0–16.1", "", False)
    # Wilson: 9 of 20 is 25.8 to 65.8; nine discordant pairs in one direction: p = 2 / 2^9.
    assert (yarn.value, yarn.interval, yarn.mark, yarn.best) == ("45.0", "25.8–65.8", "↑", True)


def test_columns_are_lengths():
    (table,) = tables(report(cell([1.0], length=2048), cell([1.0], length=1024)))
    assert table.columns == (("1024 tokens", "1× (trained)"), ("2048 tokens", "2×"))


def test_unmeasured_cells_are_empty_and_unmeasured_rows_left_out():
    made = report(
        cell([1.0], length=1024),
        cell([1.0], "DroPE", length=2048),
        loss(3.0, "NoPE"),
    )
    scores, losses = tables(made)
    assert [(name, [e is None for e in entries]) for _, name, entries in scores.rows] == [
        ("RoPE", [False, True]),
        ("DroPE", [True, False]),
    ]
    assert [row[1] for row in losses.rows] == ["NoPE"]


def test_perplexity_is_exp_of_the_last_loss_and_the_lowest_is_best():
    losses = {"RoPE": math.log(20), "DroPE": math.log(12.345), "NoPE": math.log(123.4)}
    made = report(*(loss(value, model) for model, value in losses.items()))
    (table,) = tables(made)
    entries = [(e.value, e.best) for _, _, (e,) in table.rows]
    assert entries == [("20.00", False), ("12.35", True), ("123", False)]
    assert perplexity(1e4) == math.inf
    equal = [loss(6.0, model) for model in ("RoPE", "DroPE")]
    (table,) = tables(report(*equal))
    assert [entry.best for _, _, (entry,) in table.rows] == [False, False]


def test_rows_of_equal_means_are_all_best():
    """(4 / 11 + 5 / 11) / 3 and (1 / 11 + 4 / 11 + 4 / 11) / 3 differ as floats."""

    def made(method, *hits):
        scores = [float(depth < n) for n in hits for depth in range(11)]
        groups = tuple(text for text in range(3) for _ in range(11))
        return cell(scores, method=method, groups=groups)

    (table,) = tables(report(made("none", 0, 4, 5), made("yarn", 1, 4, 4), made("pi", 0, 0, 0)))
    assert [(entry.value, entry.best) for *_, (entry,) in table.rows] == [
        *(("27.3", True), ("27.3", True), ("0.0", False)),
    ]


def test_a_unit_below_the_training_length_is_not_called_trained():
    """Models of context 8,192 whose lengths count from 1,024."""
    made = report(cell([1.0] * 10), cell([1.0] * 10, length=1024), longest_context=8192)
    (table,) = tables(made)
    assert [column[1] for column in table.columns] == ["1×", "2×"]


def test_a_table_has_as_many_lengths_as_fit_and_continues_below(monkeypatch):
    names = {key: title * 4 for key, title in METHODS.items()}
    factors = (1, 2, 4, 8, 16, 32, 64, 128)
    made = example(models=("RoPE",), methods=("none", "yarn"), factors=factors, trials=4)
    for width, together in ((80, 4), (100, 5), (240, 5)):
        shown = lines(monkeypatch, tables(replace(made, methods=names)), width)
        assert max(len(line.rstrip()) for line in shown) <= min(width, 100)
        heads = [line for line in shown if "tokens  " in line]
        assert {line.count("tokens") for line in heads} <= {together, 8 - together}
        assert any("(continued)" in line for line in shown)


def test_the_only_task_has_the_losses_beside_its_scores(monkeypatch):
    cells = statements("RoPE", (100, 90, 50, 10), (4.0, 4.1, 4.2, 10.534))
    cells += [({**about, "method": "yarn"}, measured) for about, measured in cells]
    made = report(*cells, statements("DroPE", (90, 80, 70, 60))[0], training_length=64)
    shown = lines(monkeypatch, tables(made))
    rows = [p for p in pairwise(shown) if re.search(r"\d–\d", p[1])]
    assert [row.split() for row in rows[0]] == [
        ["RoPE", "100.0", "4.000", "89.8", "4.100", "50.0", "4.200", "10.2", "10.534"],
        ["98.5–100.0", "85.5–93.0", "43.9–56.1", "7.0–14.5"],  # Wilson's, of 256
    ]
    assert rows[1][0].startswith("  + YaRN ")
    assert rows[2][0].split() == ["DroPE", "89.8↓", "·", "·", "·", "·"]
    assert "perplexity" not in " ".join(shown)  # a detail


def test_the_best_of_a_column_is_bold_and_nothing_else(monkeypatch):
    rates = {("RoPE", 2048): 18, ("RoPE", 4096): 5, ("DroPE", 2048): 6, ("DroPE", 4096): 5}
    cells = [
        cell([1.0] * hits + [0.0] * (20 - hits), model, length=length)
        for (model, length), hits in rates.items()
    ]
    shown = "\n".join(lines(monkeypatch, tables(report(*cells)), color="standard"))
    assert re.findall(r"\x1b\[1m *(\d+\.\d+)", shown) == ["90.0", "25.0", "25.0"]


ROW = {"run": "x", "model": "RoPE", "method": "none", "task": "statements", "length": 64,
       "factor": 1.0, "metric": "score", "value": 0.5, "low": 0.25, "high": 0.75}  # fmt: skip


def run(place, *rows, evaluation=False, text="one"):
    results = place / "evaluation" if evaluation else place
    results.mkdir(parents=True)
    write_csv(results / "results.csv", table_of([ROW | row for row in rows]))
    (results / "facts.json").write_text(json.dumps({"environment": {"corpus": text}}))
    return str(place)


def test_runs_are_named_by_their_directories_and_have_a_column_for_each_length(tmp_path):
    loss = {"task": "perplexity", "metric": "loss", "value": 3.25, "low": None, "high": None}
    a = run(tmp_path / "a", {}, {"length": 128, "factor": 2.0, "value": 0.125})
    b = run(tmp_path / "b", {"value": 1.0, "high": 1.0}, loss, evaluation=True)
    scores, losses = compare([a, b])
    assert (scores.title, losses.title) == ("statements, score", "perplexity, loss")
    assert scores.columns == (("64 tokens", "1×"), ("128 tokens", "2×"))
    assert [(name, [e and e.value for e in entries]) for _, name, entries in scores.rows] == [
        ("a: RoPE", ["50.0", "12.5"]),
        ("b: RoPE", ["100.0", None]),
    ]
    assert scores.rows[0][2][0].interval == "25.0–75.0"
    assert losses.rows[0][2] == (("3.250", "", "", False, ""),)


def test_a_blank_line_stands_between_tables_that_share_a_legend(tmp_path, monkeypatch):
    loss = {"task": "perplexity", "metric": "loss", "value": 3.25}
    shown = lines(monkeypatch, compare([run(tmp_path / "a", {}, loss)]))
    second = next(n for n, line in enumerate(shown) if line.startswith("perplexity, loss"))
    assert not shown[second - 1].strip()
    assert sum("95% intervals" in line for line in shown) == 1


def test_runs_whose_directories_have_one_name_have_their_paths(tmp_path):
    runs = [run(tmp_path / place / "a", {}) for place in "xy"]
    (scores,) = compare(runs)
    assert [name for _, name, _ in scores.rows] == [f"{path}: RoPE" for path in runs]


def test_losses_on_different_texts_stand_in_different_tables(tmp_path):
    loss = {"task": "perplexity", "metric": "loss", "value": 3.25, "low": None, "high": None}
    runs = [run(tmp_path / name, {}, loss, text=name) for name in "ab"]
    scores, *losses = compare(runs)
    assert [[name for _, name, _ in table.rows] for table in (scores, *losses)] == [
        ["a: RoPE", "b: RoPE"],
        ["a: RoPE"],
        ["b: RoPE"],
    ]


def test_a_run_that_was_evaluated_later_has_the_rows_of_its_evaluation(tmp_path):
    place = run(tmp_path / "a", {}, evaluation=True)
    write_csv(tmp_path / "a" / "results.csv", table_of([]))
    (scores,) = compare([place])
    assert scores.rows[0][1] == "a: RoPE"


def test_a_directory_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"runs: expected directories with rows in results\.csv"):
        compare([str(tmp_path)])
