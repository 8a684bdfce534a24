"""A run directory is never taken from another run, and never deleted with what is not its own."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.common.errors import UserError
from trainer.common.files import write_atomically
from trainer.data.config import DataConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.model.config import ModelConfig
from trainer.runs.config import OptimizerConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.directory import (
    MARK,
    LogFile,
    check_run_directory,
    check_writable,
    differences,
    free_place,
    log_to_file,
    open_run_directory,
    overwrite_problems,
    saved_run,
)


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


def test_overwriting_replaces_all_that_a_run_leaves(place, run):
    """A trained run with its checkpoints, a measured temperature and interrupted writes."""
    opened(place)
    run()
    for leftover in ("evaluation-2/report.json", f"evaluation/cells/claims-{'a' * 32}/worked-1",
                 f"evaluation-2/cells/claims-{'a' * 32}/{'0' * 20}"):  # fmt: skip
        write_atomically(place / leftover, "{}")
    (place / "checkpoints" / "step-000012" / "temperature.json").write_text("{}")
    (place / "checkpoints" / ".step-000015.partial").mkdir()
    (place / "checkpoints" / ".step-000015.partial" / "__0_0.distcp").write_text("")
    (place / ".report.json.77.tmp").write_text("")
    opened(place, overwrite=True)
    assert not (place / "checkpoints").exists()


def test_overwriting_does_not_follow_a_link(place, tmp_path):
    opened(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        opened(place, overwrite=True)
    assert (tmp_path / "elsewhere" / MARK).exists()


def test_a_run_from_before_there_were_marks_is_reopened_and_marked(place):
    opened(place)
    (place / MARK).unlink()
    opened(place)
    assert json.loads((place / MARK).read_text())["format"] == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('{"program": "unrope", "format": 99}', "format 99.*newer"),
        ('{"program": "other", "format": 1}', "of another program, 'other'"),
        ("[", "damaged"),
        ("{}", "damaged"),
    ],
)
def test_a_directory_of_another_format_or_program_is_left_alone(place, mark, message, overwrite):
    opened(place)
    (place / MARK).write_text(mark)
    before = contents(place)
    with pytest.raises(UserError, match=message):
        opened(place, overwrite=overwrite)
    assert contents(place) == before


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
    message = capsys.readouterr().err
    assert message == "/dev/full: No space left on device; the run goes on\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((text, ".*") for text in ("\1", "", "a: [", "\tx: 1", "a: !!python/object:os.system {}")),
        ("7", "it holds no configuration"),
        ("trainer: 7", "trainer: .*"),
        ("sead: 7\nmodel: {hidden_size: x}", "model.hidden_size: .*"),
        ("seed: -1", "seed: expected 0 or more, .*"),
        ("trainer: {batch_size: 0}", r"trainer\.batch_size: expected 1 or more, got 0"),
        ("data: {sequence_length: 0}", r"data\.sequence_length: .*"),
    ],
)
def test_a_record_says_what_is_wrong_in_it(place, content, why):
    place.mkdir()
    (place / "config.yaml").write_text(content)
    reason = rf"^run_dir: '.*config\.yaml' is damaged: {why}\.$"
    with pytest.raises(UserError, match=reason):
        saved_run(place)


def test_groups_that_say_nothing_of_training_may_be_of_another_version(place):
    place.mkdir()
    (place / "config.yaml").write_text("seed: 3\nmonitor: 7\nlogger: [1]\nevaluation: {lengths: x}")
    assert saved_run(place) == RunConfig(seed=3)


def test_a_directory_with_other_files_is_no_place_for_a_run(place):
    place.mkdir()
    assert opened(place) == place  # an empty one is
    (place / "config.yaml").rename(place / "mine.yaml")
    with pytest.raises(UserError, match=r"^run_dir: .* holds other files and no run \(no config"):
        opened(place)


def test_what_differs_is_named_but_for_what_trains_nothing(place):
    opened(place)
    free = {
        "name": "other", "label": "l", "evaluation": EvaluationConfig(lengths=[1]),
        "trainer": TrainerConfig(log_every=3), "strategy": StrategyConfig("ddp"),
    }  # fmt: skip
    opened(place, **free)
    changed = OptimizerConfig(lr=1.0, eps=1.0)
    with pytest.raises(UserError) as error:
        check_run_directory(RunConfig(run_dir=str(place), optimizer=changed, **free), finished=True)
    where = f"the run in {str(place)!r} has"
    assert tuple(map(str, error.value.problems)) == (
        f"optimizer.lr: {where} 0.0003, this command 1.0.",
        f"optimizer.eps: {where} 1e-08, this command 1.0.",
        f"Choose another name=; `python -m trainer evaluate checkpoint={place}` evaluates a run "
        "anew; overwrite=true deletes the run and starts again.",
    )
    other = replace(free["evaluation"], lengths=[2])
    opened(place, evaluation=other)
    with pytest.raises(UserError, match=r"^evaluation\.lengths: .* has \[2.0\], this"):
        check_run_directory(RunConfig(run_dir=str(place), **free), finished=True)


def refused(place, finished=False, **changes):
    """Return the keys that a resume of the run in ``place`` refuses."""
    config = RunConfig(run_dir=str(place), **changes)
    try:
        check_run_directory(config, finished=finished)
    except UserError as error:
        return [problem.key for problem in error.problems if problem.key]
    return []


def test_a_resume_may_change_how_the_same_numbers_are_computed(place):
    opened(place)
    assert not refused(
        place,
        trainer=TrainerConfig(compile=True),
        model=ModelConfig(attention_backend="flex"),
        data=DataConfig(num_workers=2),
    )


def test_a_resume_may_change_tf32_only_if_nothing_is_multiplied_in_float32(place):
    for precision, keys in (("bf16", []), ("fp32", ["trainer.tf32"])):
        opened(place / precision, trainer=TrainerConfig(precision=precision))
        changed = TrainerConfig(precision=precision, tf32=False)
        assert refused(place / precision, trainer=changed) == keys


def test_controls_come_and_go_until_there_is_a_report(place):
    opened(place, controls={"a": {"seed": 1}, "b": {"branch": 3}})
    other = {"b": {"branch": 3}, "c": {"seed": 2}}
    assert not refused(place, controls=other)
    assert refused(place, finished=True, controls=other) == ["controls.a", "controls.c"]
    assert refused(place, controls={"b": {"branch": 4}}) == ["controls.b.branch"]


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1, "b": 2}, {"a": 2, "c": 3}, [("a", 1, 2), ("b", 2, None), ("c", None, 3)]),
        ({"g": {"a": 1, "free": 1}}, {"g": {"a": 2, "free": 2}}, [("g.a", 1, 2)]),
        ({"g": {"a": 1}}, {"g": None}, [("g", {"a": 1}, None)]),
        ({"free": 1, "g": {"h": {"a": [1]}}}, {"g": {"h": {"a": [2]}}}, [("g.h.a", [1], [2])]),
    ],
)
def test_differences_are_named_by_their_keys(old, new, result):
    assert differences(old, new, ("free", "g.free")) == result


def test_a_place_that_can_be_is_left_as_it_is(tmp_path):
    check_writable(str(tmp_path / "a" / "b"))
    (tmp_path / "link").symlink_to(tmp_path)
    check_writable(str(tmp_path / "link"))
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("file/run", "'{}/file' is a file; give the name of a directory."),
        ("circle/run", "'{}/circle' is a file; give the name of a directory."),
        ("circle", "'{}/circle' cannot be written (its links go in a circle)."),
        ("nowhere", "'{}/nowhere' cannot be written (No such file or directory)."),
        ("nowhere/run", "'{}/nowhere' is a file; give the name of a directory."),
    ],
)
def test_a_place_that_cannot_be_is_named_with_the_reason(tmp_path, where, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(UserError) as error:
        check_writable(str(tmp_path / where), "to")
    assert str(error.value) == f"to: {message.format(tmp_path)}"


def test_the_program_s_log_goes_into_one_file_at_a_time(tmp_path):
    for name in ("a", "b", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        log_to_file(tmp_path / name)
        logging.getLogger("trainer.some").warning("ä %s", name)
    assert len((tmp_path / "a" / "log.txt").read_text("utf-8").splitlines()) == 1
    lines = (tmp_path / "b" / "log.txt").read_text("utf-8").splitlines()
    assert [line.partition(" WARNING ")[2] for line in lines] == ["ä b", "ä b"]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0])


def test_an_error_of_logging_that_is_no_disk_s_is_shown_as_ever(tmp_path, capsys):
    handler = LogFile(tmp_path / "log.txt")
    handler.handle(logging.LogRecord("trainer", 20, "", 0, "%d", ("x",), None))
    assert "Logging error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("taken", "wanted", "result"),
    [
        ((), "a.html", "a.html"),
        (("a.html",), "a.html", "a-2.html"),
        (("a", "a-2", "a-3"), "a", "a-4"),
    ],
)
def test_a_name_that_is_taken_gets_the_first_free_number(taken, wanted, result):
    assert free_place(Path("x", wanted), lambda path: path.name not in taken) == Path("x", result)


def test_of_many_files_it_does_not_know_five_are_named(place):
    opened(place)
    for name in "gfedcba":
        (place / name).write_text("mine")
    (place / "h").symlink_to(place)
    named = ", ".join(repr(str(place / name)) for name in "abcde")
    assert [*map(str, overwrite_problems(place))] == [
        f"overwrite: not made by this program, so nothing is deleted: {named}, and 3 more; move "
        "what you want to keep elsewhere first."
    ]
    for name in "fgh":
        (place / name).unlink()
    (problem,) = map(str, overwrite_problems(place))
    assert f"deleted: {named}; move" in problem


def test_problems_of_all_controls_and_of_the_run_are_named(place):
    opened(place)
    for control in ("a", "b"):
        opened(place / "controls" / control)
        (place / "controls" / control / "mine").write_text("")
    (place / "deep" / "controls").mkdir(parents=True)
    (place / "deep" / "controls" / "mine").write_text("")
    a, b, of_run = map(str, overwrite_problems(place))
    assert "controls/a/mine'" in a
    assert "controls/b/mine'" in b
    assert "deep/controls/mine'" in of_run
    assert "controls/a" not in of_run


@pytest.mark.parametrize(
    "mark", ['{"program": "unrope", "format": 99}', '{"program": "other", "format": 1}', "["]
)
def test_a_mark_that_cannot_be_trusted_saves_the_directory(place, mark):
    opened(place)
    (place / MARK).write_text(mark)
    (problem,) = map(str, overwrite_problems(place))
    assert problem.startswith("run_dir: ")
