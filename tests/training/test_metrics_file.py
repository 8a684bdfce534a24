"""metrics.csv has one row a logged step, whatever happened to the process."""

from __future__ import annotations

from trainer.training.metrics_file import COLUMNS, read_metrics
from trainer.training.metrics_logger import MetricsFile


def written(path, steps):
    file = MetricsFile(path)
    file.continue_from(0)
    for step in steps:
        file.log_metrics({"loss": step / 7}, step)
    return file


def test_rows_after_the_checkpoint_are_taken_back(tmp_path):
    path = tmp_path / "metrics.csv"
    file = written(path, [10, 20, 30])
    file.continue_from(20)
    file.log_metrics({"loss": 1.0}, 30)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (10, 10 / 7),
        (20, 20 / 7),
        (30, 1.0),
    ]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_row_cut_off_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "metrics.csv"
    written(path, [10, 20])
    text = path.read_text()
    for end in range(len(text) - 1, text.index("\n20,"), -1):
        path.write_text(text[:end])
        assert [row["step"] for row in read_metrics(path)] == [10]


def test_branch_starts_with_the_rows_of_its_source(tmp_path):
    written(tmp_path / "source.csv", [10, 20, 30])
    file = MetricsFile(tmp_path / "metrics.csv")
    file.continue_from(20, tmp_path / "source.csv")
    assert [row["step"] for row in read_metrics(file.path)] == [10, 20]


def test_columns_of_what_is_monitored_come_when_they_are_first_measured(tmp_path):
    file = written(tmp_path / "metrics.csv", [10, 20])
    rows = [
        {"loss": 0.1, "length/loss_4x": 5.0},
        {"loss": 0.2},
        {"loss": 0.3, "probe/entropy": 1.5},
    ]
    for step, row in zip((30, 40, 50), rows, strict=True):
        file.log_metrics(row, step)
    file.continue_from(40)
    # The measurement that was taken back is made again.
    file.log_metrics(rows[2], 50)
    assert read_metrics(file.path)[2:] == [
        {"step": step} | row for step, row in zip((30, 40, 50), rows, strict=True)
    ]
    columns = file.path.read_text().splitlines()[0].split(",")
    assert columns == [*COLUMNS, "length/loss_4x", "probe/entropy"]
