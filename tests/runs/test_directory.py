"""A run directory is never taken from another run, and never deleted with what is not its own."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.runs.config import RunConfig
from trainer.runs.directory import LogFile, open_run_directory, writable_problem
from trainer.runs.mark import MARK
from trainer.runs.parsing import parse


@pytest.fixture
def place(tmp_path):
    return tmp_path / "run"


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def opened(place, **changes):
    return open_run_directory(RunConfig(run_dir=str(place), **changes))


def test_overwriting_replaces_a_run(place):
    opened(place)
    (place / "metrics.csv").write_text("step")
    (place / "checkpoints" / "step-000003").mkdir(parents=True)
    opened(place / "controls" / "nope")
    opened(place, overwrite=True)
    assert {path.name for path in place.iterdir()} == {"config.yaml", MARK}


def test_overwriting_leaves_a_directory_alone_that_is_no_run(place):
    place.mkdir()
    (place / "config.yaml").write_text("mine: 1")
    (place / "source.py").write_text("print()")
    before = contents(place)
    with pytest.raises(UserError, match="not marked as a run"):
        opened(place, overwrite=True)
    assert contents(place) == before


@pytest.mark.parametrize(
    "where",
    [
        "notes.md",
        "important.tmp",
        "data.partial",
        "figures/talk.pptx",
        "evaluation/thesis.tex",
        "checkpoints/best.pt",
        "checkpoints/step-000003/mine.txt",
        "controls/nope/paper.pdf",
    ],
)
def test_overwriting_names_files_it_does_not_know_and_deletes_nothing(place, where):
    opened(place)
    opened(place / "controls" / "nope")
    (place / where).parent.mkdir(parents=True, exist_ok=True)
    (place / where).write_text("mine")
    before = contents(place)
    with pytest.raises(UserError, match=Path(where).name):
        opened(place, overwrite=True)
    assert contents(place) == before


def test_overwriting_leaves_a_directory_alone_that_another_program_marked(place):
    place.mkdir()
    (place / MARK).write_text('{"program": "other", "format": 1}')
    before = contents(place)
    with pytest.raises(UserError, match="of another program, 'other'"):
        opened(place, overwrite=True)
    assert contents(place) == before


def test_overwriting_replaces_all_that_a_run_leaves(place, run):
    """A trained run with its checkpoints, a measured temperature and an interrupted write."""
    opened(place)
    run()
    (place / "checkpoints" / "step-000012" / "temperature.json").write_text("{}")
    (place / "checkpoints" / ".step-000015.partial").mkdir()
    (place / "checkpoints" / ".step-000015.partial" / "__0_0.distcp").write_text("")
    (place / ".report.json.77.tmp").write_text("")
    opened(place, overwrite=True)
    assert not (place / "checkpoints").exists()


@pytest.mark.parametrize("damage", ["", "7", "a: [", "\tx: 1", "a: !!python/object:os.system {}"])
def test_a_damaged_record_is_named(place, damage):
    opened(place)
    (place / "config.yaml").write_text(damage)
    with pytest.raises(UserError, match=r"config\.yaml' is damaged"):
        opened(place)


@pytest.mark.parametrize("where", ["file/run", "circle", "circle/run"])
def test_a_place_that_cannot_be_is_named_before_anything_starts(tmp_path, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    problem = writable_problem(str(tmp_path / where))
    assert problem is not None
    assert problem.startswith("run_dir: ")


def test_overwriting_does_not_follow_a_link(place, tmp_path):
    opened(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        opened(place, overwrite=True)
    assert (tmp_path / "elsewhere" / MARK).exists()


def test_an_empty_run_dir_is_an_error():
    with pytest.raises(UserError, match="run_dir: expected a directory"):
        parse(RunConfig, {"run_dir": ""})


def test_a_run_from_before_there_were_marks_is_reopened_and_marked(place):
    opened(place)
    (place / MARK).unlink()
    opened(place)
    assert json.loads((place / MARK).read_text())["format"] == 1


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ('{"program": "unrope", "format": 99}', "format 99.*newer"),
        ("[", "damaged"),
        ("{}", "damaged"),
    ],
)
def test_a_directory_of_another_format_is_refused(place, mark, said):
    opened(place)
    (place / MARK).write_text(mark)
    with pytest.raises(UserError, match=said):
        opened(place)


def test_a_run_that_was_moved_goes_on_where_it_is_now(place, tmp_path, monkeypatch):
    """By another path, under another name, and by a path relative to where the command is given."""
    opened(place)
    moved = place.rename(tmp_path / "moved")
    opened(moved, name="moved")
    monkeypatch.chdir(tmp_path)
    opened(Path("moved"), name="again")
    with pytest.raises(UserError, match=r"seed: the run in 'moved' has 0, this command 1"):
        opened(Path("moved"), seed=1)


def test_a_log_on_a_full_disk_says_so_once_and_stops_nothing(capsys):
    handler = LogFile("/dev/full")
    for number in range(3):
        handler.handle(logging.LogRecord("trainer", 20, "", 0, "line %d", (number,), None))
    said = capsys.readouterr().err
    assert said == "/dev/full: No space left on device; the run goes on\n"
