"""Runs beside each other, from their result tables."""

from __future__ import annotations

import io

import pytest
import yaml
from rich.console import Console

from trainer.common.errors import UserError
from trainer.evaluation.results import table, write_csv
from trainer.report.tables import terminal_tables
from trainer.workflows.compare import compare, names_of

ROW = {"run": "x", "model": "RoPE", "method": "none", "task": "statements", "length": 64,
       "factor": 1.0, "metric": "score", "value": 0.5, "low": 0.25, "high": 0.75}  # fmt: skip


def run(place, rate, *rows, evaluation=False):
    place.mkdir()
    values = {"name": place.name, "optimizer": {"lr": rate, "betas": [0.9, 0.95]}}
    (place / "config.yaml").write_text(yaml.safe_dump(values))
    results = place / "evaluation" if evaluation else place
    results.mkdir(exist_ok=True)
    write_csv(results / "results.csv", table([ROW | row for row in rows]))
    return str(place)


def test_runs_are_named_by_what_differs_and_have_a_column_for_each_length(tmp_path):
    loss = {"task": "perplexity", "metric": "loss", "value": 3.25, "low": None, "high": None}
    a = run(tmp_path / "a", 1e-3, {}, {"length": 128, "factor": 2.0, "value": 0.125})
    b = run(tmp_path / "b", 3e-3, {"value": 1.0, "high": 1.0}, loss, evaluation=True)
    scores, losses = compare([a, b])
    assert (scores.title, losses.title) == ("statements, score", "perplexity, loss")
    assert scores.columns == (("64 tokens", "1×"), ("128 tokens", "2×"))
    assert [(name, [e and e.value for e in entries]) for _, name, entries in scores.rows] == [
        ("optimizer.lr=0.001: RoPE", ["50.0", "12.5"]),
        ("optimizer.lr=0.003: RoPE", ["100.0", None]),
    ]
    assert scores.rows[0][2][0].interval == "25.0–75.0"
    assert losses.rows[0][2] == (("3.250", "", "", False, ""),)
    out = Console(file=io.StringIO(), width=100)
    out.print(terminal_tables([scores, losses]))
    assert max(map(len, out.file.getvalue().splitlines())) <= 100


def test_runs_that_differ_in_nothing_or_much_have_their_paths(tmp_path):
    a, b = run(tmp_path / "a", 1e-3, {}), run(tmp_path / "b", 1e-3, {})
    assert names_of([a, b]) == [a, b]


def test_a_directory_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"runs: expected directories with results\.csv"):
        compare([str(tmp_path)])
