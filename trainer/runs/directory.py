"""The run directory: stable, self-contained, and never overwritten in silence."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from trainer.common.errors import Problem, UserError
from trainer.formats import read_content
from trainer.report.atomic import write_atomically
from trainer.runs.config import RunConfig
from trainer.runs.mark import check_mark, write_mark
from trainer.runs.ownership import overwrite_problems
from trainer.runs.saved_config import saved_config

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
    "trainer.rewind_after",
    "trainer.gc_every",
    "trainer.profile_steps",
    "trainer.deterministic",
    "trainer.micro_batch_size",
    "trainer.accelerator",
    "strategy",
    "data.num_workers",
    "data.cache_dir",
    "data.prepared",
    "data.about",
    "label",
)
"""Keys that do not change what is trained, so that a run may resume with other values."""


def plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON has it: lists, dictionaries, numbers, strings."""
    return json.loads(json.dumps(asdict(config)))


def check_run_directory(config: RunConfig, finished: bool = False) -> None:
    """See that a run may have its directory; changes nothing.

    ``finished``: the run is reported on already, so its evaluation may not differ either.

    Raises:
        UserError: it is no run directory, holds another run, or files that overwriting would lose.
    """
    directory = Path(config.run_dir)
    record = directory / "config.yaml"
    is_used = directory.is_dir() and any(directory.iterdir())
    if config.overwrite:
        if is_used and (problems := overwrite_problems(directory)):
            raise UserError(*problems)
        return
    if is_used and not record.exists():
        raise UserError.at(
            "run_dir",
            f"{config.run_dir!r} holds other files and no run (no config.yaml); choose another "
            "run_dir.",
        )
    if record.exists():
        # Keys that are newer than the run have their defaults in it.
        saved = plain(saved_run(directory))
        free = tuple(key for key in FREE_TO_CHANGE if not finished or key != "evaluation")
        if differing := differences(saved, plain(config), free):
            raise UserError(
                *(
                    Problem(
                        key, f"the run in {config.run_dir!r} has {old!r}, this command {new!r}."
                    )
                    for key, old, new in differing
                ),
                Problem(
                    "",
                    "Choose another name=, or overwrite=true to start again; `python -m trainer "
                    f"evaluate checkpoint={config.run_dir}` evaluates a run anew.",
                ),
            )


def open_run_directory(config: RunConfig, finished: bool = False) -> Path:
    """Make or reopen the directory of a run, and write its mark and ``config.yaml``.

    Raises:
        UserError: as :func:`check_run_directory`.
    """
    check_run_directory(config, finished)
    directory = Path(config.run_dir)
    if config.overwrite and directory.is_dir():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_mark(directory)
    write_atomically(directory / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False))
    return directory


def saved_run(directory: Path) -> RunConfig:
    """The configuration that a run was written with.

    Raises:
        UserError: it is damaged, or a newer version of this program wrote it.
    """
    check_mark(directory)
    record = directory / "config.yaml"
    return saved_config(_saved(record), "run_dir", f"{str(record)!r} is damaged")


def _saved(record: Path) -> dict[str, Any]:
    try:
        saved = yaml.safe_load(read_content(record).decode("utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError.at(
            "run_dir", f"{str(record)!r} is damaged{line}: {error.problem}."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError.at(
            "run_dir", f"{str(record)!r} is damaged: {' '.join(str(error).split())}."
        ) from None
    if not isinstance(saved, dict):
        raise UserError.at("run_dir", f"{str(record)!r} is damaged: it holds no configuration.")
    return saved


def differences(
    old: dict[str, Any], new: dict[str, Any], free: tuple[str, ...], path: str = ""
) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with both values, but for those that are free to change."""
    found: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys([*old, *new]):
        where = f"{path}.{key}" if path else key
        a, b = old.get(key), new.get(key)
        if a == b or where in free:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, free, where)
        else:
            found.append((where, a, b))
    return found


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
    """A log that stops no run where the disk is full: it says so once, and tries again."""

    said = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  as logging calls it
        """Called by ``emit`` with the error at hand."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.said:
            self.said = True
            with suppress(OSError):  # of a standard error on the same disk
                print(f"{self.baseFilename}: {error.strerror}; the run goes on", file=sys.stderr)


def log_to_file(directory: Path) -> None:
    """Send the program's log to ``log.txt`` too, appended to at every resume."""
    logger = logging.getLogger("trainer")
    for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()
    handler = LogFile(directory / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def free_place(wanted: Path, may_replace: Callable[[Path], bool]) -> Path:
    """``wanted``, or where that may not be replaced the first of ``NAME-2``, ``NAME-3``, ... that
    may; a suffix stays one."""
    if may_replace(wanted):
        return wanted
    numbered = (wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") for n in count(2))
    return next(filter(may_replace, numbered))
