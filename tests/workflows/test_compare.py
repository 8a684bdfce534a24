"""Runs beside each other, from their result tables."""

from __future__ import annotations

import io

import pytest
import yaml
from rich.console import Console

from trainer.common.errors import UserError
from trainer.evaluation.results import table, write_csv
from trainer.report.tables import terminal_tables
from trainer.workflows.compare import compare, missing_control

ROW = {"run": "x", "model": "RoPE", "method": "none", "task": "statements", "length": 64,
       "factor": 1.0, "metric": "score", "value": 0.5, "low": 0.25, "high": 0.75}  # fmt: skip


def run(place, *rows, evaluation=False, drop=None):
    place.mkdir(parents=True)
    values = {"name": place.name, "drop": drop or {}}
    (place / "config.yaml").write_text(yaml.safe_dump(values))
    results = place / "evaluation" if evaluation else place
    results.mkdir(exist_ok=True)
    write_csv(results / "results.csv", table([ROW | row for row in rows]))
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
    out = Console(file=io.StringIO(), width=100)
    out.print(terminal_tables([scores, losses]))
    assert max(map(len, out.file.getvalue().splitlines())) <= 100


def test_runs_whose_directories_have_one_name_have_their_paths(tmp_path):
    runs = [run(tmp_path / place / "a", {}) for place in "xy"]
    (scores,) = compare(runs)
    assert [name for _, name, _ in scores.rows] == [f"{path}: RoPE" for path in runs]


def test_the_control_of_a_drop_with_its_schedule_is_missed(tmp_path):
    dropped = run(tmp_path / "dropped", {}, drop={"at": 0.8})
    never, same = (run(tmp_path / to, {}, drop={"at": at, "to": to})
                   for to, at in (("nope", None), ("same", 0.8)))  # fmt: skip
    assert "drop.to=same" in missing_control([dropped, never])
    assert [missing_control(runs) for runs in ([dropped], [dropped, never, same])] == [None, None]


def test_a_run_that_was_evaluated_later_has_the_rows_of_its_evaluation(tmp_path):
    place = run(tmp_path / "a", {}, evaluation=True)
    write_csv(tmp_path / "a" / "results.csv", table([]))
    (scores,) = compare([place])
    assert scores.rows[0][1] == "a: RoPE"


def test_a_directory_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"runs: expected directories with rows in results\.csv"):
        compare([str(tmp_path)])
