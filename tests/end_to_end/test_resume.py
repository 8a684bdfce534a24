"""A run that is killed and started again with the same command is the run that was not."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.program import Started, run, run_ranks
from trainer.evaluation.results import COLUMNS
from trainer.report.report import FACTS, Report
from trainer.runs.directory import read_metrics

WORDS = [
    "+experiment=drope_demo",
    "trainer.max_steps=40",
    "drop.at=20",
    "trainer.checkpoint_every=8",
    "trainer.log_every=2",
    "trainer.threads=1",
    "trainer.batch_size=8",
    "evaluation.needles.trials=4",
    "evaluation.windows=2",
    "evaluation.fit_windows=2",
    "evaluation.lengths=[1,2]",
]


def start(run_dir: Path, *changes: str) -> Started:
    words = (*WORDS, f"run_dir={run_dir}", *changes)
    return Started("-m", "trainer", *words, cwd=run_dir.parent)


def finish(run_dir: Path) -> Report:
    ended = start(run_dir).finish()
    assert ended.returncode == 0, ended.stderr
    return Report.read(run_dir)


def kill_after(run_dir: Path, metrics: Path, step: int) -> None:
    with start(run_dir) as process:
        deadline = time.monotonic() + 120
        while process.running() and time.monotonic() < deadline:
            rows = read_metrics(metrics)
            if rows and rows[-1]["step"] >= step:
                break
            time.sleep(0.01)
        assert process.running()


def without_times(run_dir: Path, report: Report) -> tuple[dict, str, str]:
    """Return facts, rows and trials."""
    facts = json.loads((run_dir / FACTS).read_text().replace(str(run_dir), "RUN"))
    del facts["made"]["Made"]
    for summary in facts["runs"]:
        del summary["tokens_per_second"]
    rows = report.rows.drop(columns="seconds").to_csv()
    return facts, rows, report.trials.to_csv()


def metrics_without_speed(path: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("tokens_per_second", "time/"))}
        for row in read_metrics(path)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, finish(run_dir)


def test_run_killed_before_and_after_the_drop_and_in_a_control_ends_with_the_same_report(
    uninterrupted, tmp_path
):
    whole_dir, whole = uninterrupted
    run_dir = tmp_path / "run"
    for metrics, step in (
        ("metrics.csv", 10),
        ("metrics.csv", 26),
        ("controls/nope/metrics.csv", 14),
    ):
        kill_after(run_dir, run_dir / metrics, step)
    assert not (run_dir / FACTS).exists()
    report = finish(run_dir)
    assert without_times(run_dir, report) == without_times(whole_dir, whole)
    for metrics in ("metrics.csv", "controls/rope/metrics.csv", "controls/nope/metrics.csv"):
        resumed, expected = (metrics_without_speed(d / metrics) for d in (run_dir, whole_dir))
        assert resumed == expected
        steps = [row["step"] for row in resumed]
        assert steps == sorted(set(steps))


def test_finished_run_is_shown_again_and_not_trained_again(uninterrupted):
    run_dir, _ = uninterrupted
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*.safetensors")}
    finish(run_dir)
    assert {p: p.stat().st_mtime_ns for p in run_dir.rglob("*.safetensors")} == before


def test_run_directory_holds_what_is_promised(uninterrupted):
    run_dir, report = uninterrupted
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {
        "config.yaml", "metrics.csv", "checkpoints", "report.html", "figures", "log.txt",
        "evaluation", "results.csv", "trials.parquet", FACTS,
    }  # fmt: skip
    assert report.drop["loss_end"] > 0
    assert tuple(report.rows.columns) == COLUMNS
    assert not list(run_dir.rglob("*.partial"))


@pytest.mark.slow
def test_a_finished_run_is_evaluated_again_in_another_way_and_not_trained(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run_dir)
    ended = start(run_dir, "evaluation.methods=[none]", "evaluation.lengths=[1]").finish()
    assert ended.returncode == 0, ended.stderr
    assert {*Report.read(run_dir).rows.method} == {"none"}
    logs = [(place / "log.txt").read_text() for place in (uninterrupted[0], run_dir)]
    assert logs[0].count("INFO Training") == logs[1].count("INFO Training") == 3


def evaluation(run_dir: Path, output: Path) -> list[str]:
    """Return the words of an evaluation with two cells of six parts each."""
    return [
        "-m", "trainer", "evaluate", f"checkpoint={run_dir}", f"output={output}",
        "evaluation.tasks=[perplexity]", "evaluation.methods=[none,ntk]", "evaluation.lengths=[8]",
        "evaluation.windows=192",
    ]  # fmt: skip


def cells_of(output: Path) -> str:
    """Return rows and trials without their times."""
    report = Report.read(output)
    return report.rows.drop(columns="seconds").to_csv() + report.trials.to_csv()


@pytest.mark.slow
def test_an_evaluation_on_two_processes_has_the_digits_of_one(uninterrupted, tmp_path):
    run_dir = uninterrupted[0] / "controls" / "rope"
    ended = run(*evaluation(run_dir, tmp_path / "one"), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second = run_ranks(2, *evaluation(run_dir, tmp_path / "two"), cwd=tmp_path)
    assert first.returncode == second.returncode == 0, first.stderr
    assert cells_of(tmp_path / "two") == cells_of(tmp_path / "one")
    assert len(Report.read(tmp_path / "one").rows)
