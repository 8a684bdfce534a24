"""Run directories: stable, self-contained, and never overwritten silently."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from trainer.common.errors import Problem, UserError, looked_for, os_reason, raise_all
from trainer.common.fields import checked, shown
from trainer.common.files import write_atomically
from trainer.common.formats import check_format, read_content, read_plain
from trainer.runs.config import RunConfig

MARK = "run.json"
LOCK = ".lock"
"""File that the process which trains in a directory has locked."""
FORMAT = 1
PROGRAM = "unrope"


def write_mark(directory: Path) -> None:
    """Mark a directory as a run."""
    write_atomically(directory / MARK, json.dumps({"program": PROGRAM, "format": FORMAT}) + "\n")


def check_mark(directory: Path, key: str = "run_dir") -> None:
    """Check that a run's format is supported; runs without a mark have the first format.

    ``key``: the configuration key that named the directory.

    Raises:
        UserError: a newer version of this program wrote the directory, or the mark is damaged.
    """
    mark = directory / MARK
    if not mark.exists():
        return
    try:
        content = read_plain(mark)
        format_number, program = content["format"], content.get("program")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError.at(
            key, f"{str(mark)!r} is damaged; it should hold a format number."
        ) from None
    if program != PROGRAM:
        raise UserError.at(key, f"{str(mark)!r} is of another program, {program!r}.")
    check_format(format_number, FORMAT, key, repr(str(directory)), "choose another run")


FREE_TO_CHANGE = (
    "name",
    "run_dir",
    "overwrite",
    "logger",
    "evaluation",
    "monitor",
    "callbacks",
    "trainer.threads",
    "trainer.log_every",
    "trainer.checkpoint_every",
    "trainer.checkpoint_minutes",
    "trainer.keep_checkpoints",
    "trainer.keep_every",
    "trainer.keep_best",
    "trainer.async_checkpoint",
    "trainer.max_time",
    "trainer.step_timeout",
    "trainer.profile_steps",
    "trainer.deterministic",
    "trainer.micro_batch_size",
    "trainer.accelerator",
    "trainer.compile",
    "model.attention_backend",
    "strategy",
    "data.num_workers",
    "data.cache_dir",
    "data.prepared",
    "label",
)
"""Keys that do not change what is trained, so that a run may resume with other values."""


def plain(config: RunConfig) -> dict[str, Any]:
    """Convert a configuration to JSON values: lists, dictionaries, numbers, strings."""
    return json.loads(json.dumps(asdict(config)))


def check_run_directory(config: RunConfig, finished: bool = False) -> None:
    """Check that a run may use its directory; changes nothing.

    ``finished``: the run has its report already, so its evaluation must be the same, too.

    Raises:
        UserError: the directory is no run directory, holds another run, or holds files that would
            be overwritten.
    """
    directory = Path(config.run_dir)
    record = directory / "config.yaml"
    is_used = directory.is_dir() and any(path.name != LOCK for path in directory.iterdir())
    if config.overwrite:
        raise_all(overwrite_problems(directory) if is_used else [])
        return
    if is_used and not record.exists():
        raise UserError.at(
            "run_dir",
            f"{config.run_dir!r} holds other files and no run (no config.yaml); choose another "
            "run_dir.",
        )
    if record.exists():
        # Keys added since the run was written have their default values.
        saved = saved_run(directory)
        free = _free_to_change(saved, config, finished)
        changed = [
            Problem(
                key,
                f"the run in {config.run_dir!r} has {shown(old)}, this command {shown(new)}.",
            )
            for key, old, new in differences(plain(saved), plain(config), free)
        ]
        if changed:
            advice = (
                f"Choose another name=; `python -m trainer evaluate checkpoint={config.run_dir}` "
                "evaluates a run anew; overwrite=true deletes the run and starts again."
            )
            raise UserError(*changed, Problem("", advice))


def _free_to_change(saved: RunConfig, config: RunConfig, finished: bool) -> tuple[str, ...]:
    """Return the keys that may differ between a ``saved`` run and the command that resumes it."""
    free = {*FREE_TO_CHANGE}
    if finished:
        return tuple(free - {"evaluation"})
    if config.trainer.precision == "bf16":  # TF32 is for float32 matrices
        free.add("trainer.tf32")
    free |= {f"controls.{name}" for name in saved.controls.keys() ^ config.controls.keys()}
    return tuple(free)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a run's directory; the system releases it when the process ends.

    Raises:
        UserError: another process trains there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / LOCK, timeout=0):
            yield
    except Timeout:
        raise UserError(f"run_dir: another process is training in {str(directory)!r}") from None


def open_run_directory(config: RunConfig) -> Path:
    """Create or reopen a run's directory; write its mark and ``config.yaml``.

    Raises:
        UserError: as for :func:`check_run_directory`.
    """
    check_run_directory(config)
    directory = Path(config.run_dir)
    if config.overwrite and directory.is_dir():
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:  # held by this process
                path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    write_mark(directory)
    write_atomically(directory / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False))
    return directory


def nothing_at(name: str, key: str = "checkpoint") -> Problem:
    """Return the problem of a run or checkpoint that does not exist."""
    message = f"{name!r} is neither a run directory nor a checkpoint."
    return Problem(key, message, looked_for(Path(name)))


def check_runs(names: Sequence[str]) -> None:
    """Check that directories of runs or sweeps exist.

    Raises:
        UserError: there is nothing at a path.
    """
    raise_all(
        Problem("runs", f"there is no directory {name!r}.", looked_for(Path(name), "*/"))
        for name in names
        if not os.path.lexists(name)
    )


def may_be_on_hub(name: str) -> bool:
    """Whether a name has the form OWNER/NAME, and nothing here has that of the owner."""
    has_form = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None
    return has_form and not os.path.lexists(Path(name).parent)


def check_models(checkpoint: str | None, compare: Sequence[str] = ()) -> None:
    """Check that finished models exist, before torch is imported, which takes seconds.

    Raises:
        UserError: there is nothing at a path. ``hf:``, ``.gguf`` and models of the hub are left to
            their readers.
    """
    named = [("checkpoint", checkpoint), *(("compare", name) for name in compare)]
    raise_all(
        nothing_at(name, key)
        for key, name in named
        if name and not os.path.lexists(name) and not name.startswith("hf:")
        if not name.endswith(".gguf") and not may_be_on_hub(name)
    )


def saved_run(directory: Path) -> RunConfig:
    """Read the configuration that a run was written with.

    Raises:
        UserError: the file is damaged or written by a newer version of this program.
    """
    check_mark(directory)
    record = directory / "config.yaml"
    return saved_config(_saved(record), "run_dir", f"{str(record)!r} is damaged")


def _saved(record: Path) -> dict[str, Any]:
    try:
        saved = yaml.safe_load(read_content(record).decode("utf-8"))
        if isinstance(saved, dict):
            return saved
        reason = "it holds no configuration"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
    raise UserError.at("run_dir", f"{str(record)!r} is damaged: {reason}.")


def differences(
    old: dict[str, Any], new: dict[str, Any], free: tuple[str, ...], path: str = ""
) -> list[tuple[str, Any, Any]]:
    """Return keys whose values differ, with both values, except keys that may change."""
    differing: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys([*old, *new]):
        where = f"{path}.{key}" if path else key
        a, b = old.get(key), new.get(key)
        if a == b or where in free:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            differing += differences(a, b, free, where)
        else:
            differing.append((where, a, b))
    return differing


def check_writable(directory: str, key: str = "run_dir") -> None:
    """Check that a directory can be made; leave nothing behind.

    Raises:
        UserError: it cannot.
    """
    place = Path(directory)
    try:
        if place.is_symlink():
            place = place.resolve(strict=True)
        while not place.is_dir():
            if place.exists() or place.is_symlink():
                raise UserError.at(key, f"{str(place)!r} is a file; give the name of a directory.")
            place = place.parent
        with tempfile.TemporaryDirectory(dir=place):
            pass
    except (OSError, RuntimeError) as error:  # a link in a circle is a RuntimeError
        reason = getattr(error, "strerror", None) or "its links go in a circle"
        raise UserError.at(key, f"{directory!r} cannot be written ({reason}).") from error


class LogFile(logging.FileHandler):
    """Log file that survives a full disk: it warns once and tries again with each record."""

    has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  as logging calls it
        """Handle an error within ``emit``."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_warned:
            self.has_warned = True
            with suppress(OSError):  # stderr may be on the same disk
                print(f"{self.baseFilename}: {os_reason(error)}; the run goes on", file=sys.stderr)


def log_to_file(directory: Path) -> None:
    """Append the program's log to ``log.txt``, also after a resume."""
    logger = logging.getLogger("trainer")
    for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()
    handler = LogFile(directory / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def free_place(wanted: Path, may_replace: Callable[[Path], bool]) -> Path:
    """Return ``wanted``, or the first of ``NAME-2``, ``NAME-3``, ... that may be replaced.

    The file's suffix is kept.
    """
    if may_replace(wanted):
        return wanted
    numbered = (wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") for n in count(2))
    return next(filter(may_replace, numbered))


CHANGED_SINCE = ("evaluation", "monitor", "logger")
"""Groups that earlier versions had in other forms; they do not affect what is trained."""


def saved_config(values: dict[str, Any], key: str, file: str) -> RunConfig:
    """Parse the configuration that a run was written with, even by another version or with other
    plugins; unknown keys are ignored.

    ``key``, ``file``: the configuration key and the file that errors name.

    Raises:
        UserError: the configuration is damaged.
    """
    config, _, wrong = checked(RunConfig, values)
    damaged = [problem for problem in wrong if problem.key.split(".")[0] not in CHANGED_SINCE]
    if problems := [*damaged, *config.trainer.problems(), *config.data.problems()]:
        raise UserError.at(key, f"{file}: {problems[0]}")
    return config


_CHECKPOINT = r"(unused-)?(step-\d+|before-drop)|\.[^/]+\.(partial|removed)"
_SAVED = r"(manifest\.json|state\.json|\.metadata|temperature\.json|__\w+\.distcp)"
_TABLE = r"(report\.(json|html)|table\.(md|tex|csv)|[\w.-]+\.json)"
_PICTURE = r"[\w.,+ -]+\.(svg|png|csv|json)"
_CELL = r"cells/([a-z]+-[0-9a-f]{20}\.json|claims-\w+/(\w{20}|worked-\d+))"
_EVALUATION = rf"({_TABLE}|{_CELL}|figures/{_PICTURE})"
_FILES_OF_A_RUN = re.compile(
    rf"""
    config\.yaml | {re.escape(MARK)} | metrics\.csv | log\.txt | failures\.txt
    | wandb_id | \.lock
    | (config\.yaml|metrics\.csv)\.partial
    | (.*/)?\.[^/]+\.\d+\.tmp
    | {_TABLE} | figures/{_PICTURE}
    | profile/steps-\d+-\d+-rank-\d+\.(json\.gz|txt) | flight_recorder/rank_\d+
    | checkpoints/({_CHECKPOINT})/{_SAVED}
    | (evaluation(-\d+)?|lengths/[^/]+)/{_EVALUATION}
    | analysis/\.[^/]+\.partial-.*
    | analysis/[^/]+/(report\.html|{_PICTURE}|figures/{_PICTURE})
    | (wandb|tensorboard|export)/.*
    """,
    re.VERBOSE,
)
"""Paths within a run, except those of its controls, which are runs too."""
MOST_NAMED = 5


def overwrite_problems(directory: Path) -> list[Problem]:
    """Return why a directory may not be replaced, one problem per reason.

    Reasons are a directory of another origin, and files that someone added to it.
    """
    if directory.is_symlink():
        reason = f"{str(directory)!r} is a link; give the directory that it names."
        return [Problem("overwrite", reason)]
    if not (directory / MARK).is_file():
        reason = (
            f"{str(directory)!r} is not marked as a run of this program (it has no {MARK}), so "
            "nothing is deleted. Remove it yourself or choose another run_dir; a run of an older "
            "version is marked when it is resumed."
        )
        return [Problem("overwrite", reason)]
    try:
        check_mark(directory)
    except UserError as error:
        return list(error.problems)
    foreign, problems = [], []
    for place, folders, files in os.walk(directory):
        path = Path(place)
        if path == directory and "controls" in folders:
            folders.remove("controls")
            controls = sorted((directory / "controls").iterdir())
            problems = [p for control in controls for p in overwrite_problems(control)]
        names = [*files, *(name for name in folders if (path / name).is_symlink())]
        paths = ((path / name).relative_to(directory).as_posix() for name in names)
        foreign += [name for name in paths if not _FILES_OF_A_RUN.fullmatch(name)]
    if foreign:
        named = ", ".join(repr(str(directory / name)) for name in sorted(foreign)[:MOST_NAMED])
        named += f", and {len(foreign) - MOST_NAMED} more" if len(foreign) > MOST_NAMED else ""
        reason = (
            f"not made by this program, so nothing is deleted: {named}; move what you want to keep "
            "elsewhere first."
        )
        problems.append(Problem("overwrite", reason))
    return problems
