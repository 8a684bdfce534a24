"""metrics.csv has one row a logged step, whatever happened to the process."""

from __future__ import annotations

import errno
import os

import pytest

from trainer.runs import metrics_file
from trainer.runs.metrics_file import COLUMNS, append_metrics, continue_metrics, read_metrics


def written(path, steps):
    continue_metrics(path, 0)
    for step in steps:
        append_metrics(path, {"loss": step / 7, "step": step})
    return path


def test_rows_after_the_checkpoint_are_taken_back(tmp_path):
    path = tmp_path / "metrics.csv"
    written(path, [10, 20, 30])
    continue_metrics(path, 20)
    append_metrics(path, {"loss": 1.0, "step": 30})
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
    path = tmp_path / "metrics.csv"
    continue_metrics(path, 20, tmp_path / "source.csv")
    assert [row["step"] for row in read_metrics(path)] == [10, 20]


def test_columns_of_what_is_monitored_come_when_they_are_first_measured(tmp_path):
    path = written(tmp_path / "metrics.csv", [10, 20])
    rows = [
        {"loss": 0.1, "benchmark/x": 5.0},
        {"loss": 0.2},
        {"loss": 0.3, "probe/entropy": 1.5},
    ]
    for step, row in zip((30, 40, 50), rows, strict=True):
        append_metrics(path, row | {"step": step})
    continue_metrics(path, 40)
    # The measurement that was taken back is made again.
    append_metrics(path, rows[2] | {"step": 50})
    assert read_metrics(path)[2:] == [
        {"step": step} | row for step, row in zip((30, 40, 50), rows, strict=True)
    ]
    columns = path.read_text().splitlines()[0].split(",")
    assert columns == [*COLUMNS, "benchmark/x", "probe/entropy"]


@pytest.fixture
def full(monkeypatch):
    """A disk that takes no row while it is full."""

    class Full:
        is_full = False

    class Writer(metrics_file.csv.DictWriter):
        def writerow(self, row):
            if not Full.is_full:
                return super().writerow(row)
            self.writer.writerow([row["step"], "half"])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics_file.csv, "DictWriter", Writer)
    return Full


def test_a_row_that_a_full_disk_cut_short_is_taken_back(tmp_path, full):
    path = written(tmp_path / "metrics.csv", [10])
    full.is_full = True
    with pytest.raises(OSError, match="No space left"):
        append_metrics(path, {"loss": 1.0, "step": 20})
    full.is_full = False
    append_metrics(path, {"loss": 2.0, "step": 30})
    assert [row["step"] for row in read_metrics(path)] == [10, 30]
