"""What a sweep keeps of its runs and of their failures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer.common.errors import PreemptedError, UserError
from trainer.runs.sweep import RECORD, Swept, failure, noting_failure, open_sweep, read_sweep


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("out of memory\nand more"), "RuntimeError: out of memory"),
        (RuntimeError(), "RuntimeError:"),
        (UserError.at("trainer", "too large."), "trainer: too large."),
        (PreemptedError("Stopped."), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_a_job_failed_with_is_kept_until_it_is_tried_again(error, message, place):
    with pytest.raises(type(error)), noting_failure(place, "runs/a"):
        raise error
    assert (failure(place, "runs/a"), failure(place, "runs/b")) == (message, None)
    with noting_failure(place, "runs/a"):
        pass
    assert failure(place, "runs/a") is None


@pytest.mark.parametrize(("age", "counts"), [(-10, True), (0, True), (10, False)])
def test_a_failure_counts_until_the_run_is_finished(place, age, counts):
    with pytest.raises(ValueError, match="x"), noting_failure(place, "runs/a"):
        raise ValueError("x")
    (note,) = (place / "failed").iterdir()
    assert note.name.startswith("a-")
    report = Path("runs/a/report.json")
    report.parent.mkdir(parents=True)
    report.write_text("{}")
    os.utime(note, (1000, 1000))
    os.utime(report, (1000 + age, 1000 + age))
    assert failure(place, "runs/a") == ("ValueError: x" if counts else None)


def test_runs_of_one_name_in_two_places_fail_apart(place):
    with pytest.raises(ValueError, match="x"), noting_failure(place, "one/a"):
        raise ValueError("x")
    assert failure(place, "two/a") is None


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (("rate_0.1", "rate_0.2"), "rate"),
        (("wd_1", "wd_10"), "wd"),
        (("m64", "m96"), "m"),
        (("a", "b"), "a"),
        (("_1", "_2"), "_"),
    ],
)
def test_a_sweep_is_called_by_what_its_runs_begin_with(names, called, place):
    runs = [Swept(f"runs/{name}") for name in names]
    assert open_sweep(place, runs) == open_sweep(place, runs) == place / called
    assert open_sweep(place, [*runs, Swept(f"runs/{names[0]}c")]) == place / f"{called}-2"


def test_its_record_says_what_was_set_in_each_run(place):
    runs = [Swept("runs/ä_1", {"optimizer.lr": "0.1"}), Swept("runs/ä_2")]
    made = open_sweep(place, runs)
    assert json.loads((made / RECORD).read_text(encoding="utf-8")) == {
        "runs": [
            {"run_dir": "runs/ä_1", "settings": {"optimizer.lr": "0.1"}},
            {"run_dir": "runs/ä_2", "settings": {}},
        ],
        "format": 1,
    }
    assert "ä_1" in (made / RECORD).read_text(encoding="utf-8")
    assert read_sweep(made) == runs
    elsewhere = [Swept(str(Path(run.run_dir).absolute())) for run in runs]
    assert open_sweep(place, elsewhere) == made  # the same runs in other words


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[", "is damaged: Invalid JSON"),
        ("{}", "is damaged: runs: Field required."),
        ('{"runs": [], "format": 2}', "has format 2, .* or name the runs themselves."),
    ],
)
def test_a_record_that_is_none_is_named(place, record, message):
    (place / RECORD).write_text(record)
    with pytest.raises(UserError, match=f"^runs: .*sweep.json' {message}"):
        read_sweep(place)
