"""A run directory is never taken from another run, and foreign files in it are never deleted."""

from __future__ import annotations

import logging
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from filelock import FileLock, Timeout

from trainer.common.errors import UserError
from trainer.config import (
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
    TrainerConfig,
)
from trainer.model.config import ModelConfig
from trainer.runs.directory import (
    COLUMNS,
    append_metrics,
    check_model,
    check_run_directory,
    check_start,
    locked,
    log_to_file,
    open_run_directory,
    place_of_comparison,
    read_metrics,
    read_record,
    saved_config,
    write_metrics,
)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "run"


def opened(place, **changes):
    """A run that has begun: it has a checkpoint."""
    directory = open_run_directory(RunConfig(run_dir=str(place), **changes))
    (directory / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
    return directory


def refused(place, **changes):
    """Return the keys that a resume of the run in ``place`` refuses."""
    try:
        check_run_directory(RunConfig(run_dir=str(place), **changes))
    except UserError as error:
        return re.findall(r"([a-z_.]+): \S+.*? there", str(error).partition("(")[2])
    return []


def test_a_run_is_read_as_it_was_written(place):
    config = RunConfig(run_dir=str(place), seed=3, model=ModelConfig(hidden_size=96))
    open_run_directory(config)
    saved = yaml.safe_load((place / "config.yaml").read_text())
    saved["evaluation"]["of_another_version"] = 1
    assert saved_config(saved) == config


def test_overwriting_deletes_what_a_run_wrote_and_nothing_else(place, tmp_path):
    opened(place)
    for name in ("metrics.csv", "notes.md", "checkpoints/step-000003/x", "evaluation-2/facts.json",
                 "controls/nope/config.yaml", "paper/thesis.tex"):  # fmt: skip
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (place / "tensorboard").symlink_to(tmp_path / "elsewhere")
    opened(place, overwrite=True, seed=1)
    assert (tmp_path / "elsewhere").is_dir()
    files = {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()}
    assert files == {"config.yaml", "notes.md", "paper/thesis.tex"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_with_other_files_is_no_place_for_a_run(place, overwrite):
    opened(place)
    (place / "config.yaml").rename(place / "mine.yaml")
    with pytest.raises(UserError, match=r"holds other files and no config\.yaml"):
        opened(place, overwrite=overwrite)


def test_another_process_cannot_train_in_a_locked_directory(place):
    with locked(place):
        opened(place)
        opened(place, overwrite=True)
        with pytest.raises(UserError, match="another process is training in"), locked(place):
            pass
    with locked(place):
        pass


def test_what_would_stop_a_run_in_its_first_minute_is_found_at_once(place, tmp_path):
    text = tmp_path / "text.txt"
    config = RunConfig(run_dir=str(place), data=DataConfig(source="files", files=[str(text)]))
    with pytest.raises(FileNotFoundError, match=r"text\.txt"):
        check_start(config)
    text.touch()
    with pytest.raises(UserError, match=r"data\.files: expected files with text"):
        check_start(config)
    with pytest.raises(UserError, match=r"data\.files: expected files"):
        check_start(RunConfig(run_dir=str(place), data=DataConfig(source="files")))
    text.write_text("Words.")
    check_start(config)
    with locked(place), pytest.raises(UserError, match="another process is training"):
        check_start(config)


def test_text_that_is_prepared_or_read_may_be_gone(place, monkeypatch):
    gone = DataConfig(source="files", files=["gone.txt"], prepared="prepared")
    check_start(RunConfig(run_dir=str(place), data=gone))
    monkeypatch.setenv("HOME", str(place.parent))
    (place.parent / "a.txt").write_text("Words.")
    begun = RunConfig(run_dir=str(place), data=DataConfig(source="files", files=["~/a.txt"]))
    check_start(begun)
    open_run_directory(begun)
    (place.parent / "a.txt").unlink()
    check_start(begun)


def test_a_run_that_was_moved_resumes_where_it_is(place, tmp_path, monkeypatch):
    opened(place)
    place.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    opened(Path("moved"), name="again")
    with pytest.raises(
        UserError, match=r"'moved' holds another run \(seed: 0 there, 1 here\); name="
    ):
        opened(Path("moved"), seed=1)


def test_what_does_not_change_the_training_may_differ(place):
    opened(place)
    free = {
        "name": "other", "evaluation": EvaluationConfig(lengths=[1]),
        "trainer": TrainerConfig(log_every=3, compile=True), "strategy": StrategyConfig("ddp"),
        "model": ModelConfig(attention_backend="flex"), "data": DataConfig(num_workers=2),
    }  # fmt: skip
    assert not refused(place, **free)
    assert refused(place, optimizer=OptimizerConfig(lr=1.0)) == ["optimizer.lr"]


@pytest.mark.parametrize("left", ["checkpoints/before-drop", "results.csv"])
def test_a_run_keeps_its_name_as_soon_as_it_has_left_something(place, left):
    open_run_directory(RunConfig(run_dir=str(place)))
    (place / "checkpoints" / ".step-000001.partial").mkdir(parents=True)
    assert not refused(place, seed=1)
    (place / left).mkdir(parents=True)
    assert refused(place, seed=1) == ["seed"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"\x80\xff"),
        ("config.yaml", b"a: [1,"),
        ("config.yaml", b"- 1"),
        ("metrics.csv", b"\x80\xff\n"),
        ("metrics.csv", b"PK\x00\x01\n\x00\n"),
        ("metrics.csv", b"step,loss\n1,2.5\n2,2.5,3\n"),
        ("metrics.csv", b"loss\n2.5\n"),
    ],
)
def test_other_bytes_are_named_by_their_file(place, name, content):
    opened(place)
    (place / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: expected (the|rows)"):
        read_record(place) if name == "config.yaml" else read_metrics(place / name)


def test_checkpoints_that_may_not_be_listed_keep_the_directory_of_their_run(place, monkeypatch):
    opened(place)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(PermissionError):
        opened(place, seed=1)


@pytest.mark.parametrize(("last", "is_whole"), [("state.json", False), ("manifest.json", True)])
def test_a_checkpoint_that_a_kill_left_whole_keeps_the_directory_of_its_run(place, last, is_whole):
    """A resume would rename it, whatever run that is."""
    open_run_directory(RunConfig(run_dir=str(place)))
    partial = place / "checkpoints" / ".step-000003.partial"
    partial.mkdir(parents=True)
    (partial / last).touch()
    assert refused(place, seed=1) == (["seed"] if is_whole else [])


def test_a_lock_inside_a_locked_block_is_not_taken_for_the_block_s_own(place, tmp_path):
    """An error of the work itself stays what it is."""
    other = FileLock(tmp_path / "other", timeout=0)
    with FileLock(tmp_path / "other"), pytest.raises(Timeout), locked(place):
        other.acquire()
    with locked(place):
        pass


def test_a_lock_that_a_dead_process_left_names_the_command_that_removes_it(place):
    with locked(place):
        (place / ".lock").write_text("4242\ngpu07\n")
        with (
            pytest.raises(UserError, match=r"4242 on gpu07; if it has ended, rm \S+/run/\.lock"),
            locked(place),
        ):
            pass


@pytest.mark.parametrize(
    ("reference", "is_refused"), [("run", False), ("no", True), ("hf:no", True), ("A/b", False)]
)
def test_a_model_that_is_not_there_is_refused(tmp_path, monkeypatch, reference, is_refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    expected = pytest.raises(UserError, match="no directory") if is_refused else nullcontext()
    with expected:
        check_model(reference)


def test_controls_come_and_go(place):
    opened(place, controls={"a": {"seed": 1}, "b": {"branch": 3}})
    other = {"b": {"branch": 3}, "c": {"seed": 2}}
    assert not refused(place, controls=other)
    assert refused(place, controls={"b": {"branch": 4}}) == ["controls.b.branch"]


def test_the_program_s_log_goes_into_one_file_at_a_time(tmp_path):
    for name in ("a", "b", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        log_to_file(tmp_path / name)
        logging.getLogger("trainer.some").warning("ä %s", name)
    assert len((tmp_path / "a" / "log.txt").read_text("utf-8").splitlines()) == 1
    lines = (tmp_path / "b" / "log.txt").read_text("utf-8").splitlines()
    assert [line.partition(" WARNING ")[2] for line in lines] == ["ä b", "ä b"]


def test_a_log_of_the_user_goes_on(tmp_path, monkeypatch):
    logger = logging.getLogger("trainer")
    monkeypatch.setattr(logger, "handlers", [logging.FileHandler(tmp_path / "mine.txt")])
    for number in range(2):
        log_to_file(tmp_path)
        logger.warning("%d", number)
    assert (tmp_path / "mine.txt").read_text().splitlines() == ["0", "1"]
    for handler in logger.handlers:
        handler.close()


def keep_until(path, step):
    write_metrics(path, [row for row in read_metrics(path) if row["step"] <= step])


def written(path, steps):
    write_metrics(path, [])
    for step in steps:
        append_metrics(path, {"loss": step / 7, "step": step})
    return path


def test_rows_after_the_checkpoint_are_taken_back(tmp_path):
    path = tmp_path / "metrics.csv"
    written(path, [10, 20, 30])
    keep_until(path, 20)
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


def test_columns_of_what_is_monitored_come_when_they_are_first_measured(tmp_path):
    path = written(tmp_path / "metrics.csv", [10, 20])
    rows = [
        {"loss": 0.1, "benchmark/x": 5.0},
        {"loss": 0.2},
        {"loss": 0.3, "probe/entropy": 1.5},
    ]
    for step, row in zip((30, 40, 50), rows, strict=True):
        append_metrics(path, row | {"step": step})
    keep_until(path, 40)
    # The measurement that was taken back is made again.
    append_metrics(path, rows[2] | {"step": 50})
    assert read_metrics(path)[2:] == [
        {"step": step} | row for step, row in zip((30, 40, 50), rows, strict=True)
    ]
    columns = path.read_text().splitlines()[0].split(",")
    assert columns == [*COLUMNS, "benchmark/x", "probe/entropy"]


def test_rows_keep_their_words_when_a_column_comes(tmp_path):
    path = tmp_path / "metrics.csv"
    write_metrics(path, [])
    append_metrics(path, {"step": 10, "tokens": 2560, "loss": 0.125, "gradient_norm": math.inf})
    before = path.read_text().splitlines()[1]
    append_metrics(path, {"step": 20, "new": 1})
    assert path.read_text().splitlines()[1] == f"{before},"


def test_a_comparison_takes_no_place_of_one_of_other_runs(tmp_path):
    def place(*runs):
        return place_of_comparison(tmp_path / "sweep", runs).name

    assert [place("a", "b"), place("c", "d"), place("e")] == ["sweep", "sweep-2", "sweep-3"]
    assert place("a", "b") == "sweep"
    assert place("c", "more", "d") == "sweep-2"  # of a job that has failed before
    assert place("c", "d") == "sweep-4"
    (tmp_path / "sweep-5").mkdir()
    (tmp_path / "sweep-5" / "config.yaml").touch()  # of a run
    assert place("f") == "sweep-6"
