"""Run directories: stable, self-contained, and never overwritten silently; their metrics."""

import csv
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import StringIO
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.common.files import expecting, visible_names, write_atomically
from trainer.config import RunConfig

log = logging.getLogger(__name__)

RECORD = "config.yaml"
COMPARED = "runs.json"
"""File with the runs that the page beside it compares."""
LOG = "log.txt"
LOCK = ".lock"
"""File that the process which trains in a directory has locked."""
WRITTEN = (
    *("metrics.csv", LOG, "wandb_id"),
    *("report.*", "results.csv", "trials.parquet", "facts.json"),
    *("checkpoints", "controls", "figures", "tables"),
    *("evaluation*", "lengths", "analysis", "export", "tensorboard", "wandb"),
    RECORD,  # last: a directory with it is a run's
)
"""What a run and its evaluations write, and ``overwrite=true`` deletes, in this order."""
FREE_TO_CHANGE = (
    *("name", "run_dir", "overwrite", "logger", "evaluation", "benchmarks", "plots", "callbacks"),
    *("strategy", "model.attention_backend"),
    *("data.num_workers", "data.cache_dir", "data.prepared"),
    *("trainer.checkpoint_every", "trainer.checkpoint_minutes"),
    *("trainer.keep_checkpoints", "trainer.keep_every"),
    *("trainer.threads", "trainer.accelerator", "trainer.compile", "trainer.deterministic"),
    *("trainer.log_every", "trainer.max_time", "trainer.micro_batch_size"),
)
"""Keys that do not change what is trained, so that a run may resume with other values."""


def plain(config: RunConfig) -> dict[str, Any]:
    """Convert a configuration to JSON values: lists, dictionaries, numbers, strings."""
    return json.loads(json.dumps(asdict(config)))


def saved_config(values: dict[str, Any]) -> RunConfig:
    """Return the configuration that a run or a checkpoint holds, without running its plugins.

    Its evaluation, which another version may have written with other keys, gets the defaults.
    """
    return adapter(RunConfig).validate_python(values | {"evaluation": {}})


def read_record(directory: Path) -> dict[str, Any]:
    """Return the plain configuration of the run in a directory."""
    path = directory / RECORD
    with expecting("the configuration of a run", path):
        values = yaml.safe_load(path.read_text("utf-8"))
        values["controls"].keys()  # raises if the file holds something else
    return values


def is_published(reference: str) -> bool:
    """Whether a model is published weights, in a directory or on the hub, and not a run.

    OWNER/NAME is looked for on the hub if there is no directory OWNER here; ``runs/NAME`` is a run.
    """
    path = Path(reference).expanduser()
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return True
    is_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", reference) is not None
    return is_id and not path.parent.exists() and str(path.parent) != "runs"


def check_model(reference: str) -> None:
    """Raise a UserError unless a model is a directory or a name of the hub; imports no torch."""
    path = Path(reference.removeprefix("hf:")).expanduser()
    if not is_published(reference) and not path.is_dir():
        raise UserError(f"checkpoint: {reference!r} is no directory, and no OWNER/NAME of the hub")


def check_run_directory(config: RunConfig) -> None:
    """Raise a UserError if a run's directory holds another run, or other files and no run.

    A run that ended before its first checkpoint does not keep its directory.
    """
    directory = Path(config.run_dir)
    if not (directory / RECORD).exists():
        if visible_names(directory):  # hidden: the lock, and what an interrupted write leaves
            raise UserError(f"run_dir: {str(directory)!r} holds other files and no {RECORD}")
        return
    checkpoints = directory / "checkpoints"
    is_saved = visible_names(checkpoints) or any(checkpoints.glob(".*/manifest.json"))
    if config.overwrite or not (is_saved or (directory / "results.csv").exists()):
        return
    saved = read_record(directory)
    controls = {f"controls.{name}" for name in saved["controls"].keys() ^ config.controls.keys()}
    changed = differences(saved, plain(config), {*FREE_TO_CHANGE} | controls)
    if changed:
        text = f"run_dir: {config.run_dir!r} holds another run ({changed})"
        raise UserError(f"{text}; name=OTHER trains beside it, overwrite=true deletes it")


def differences(
    old: dict[str, Any], new: dict[str, Any], free: Collection[str], prefix: str = ""
) -> str:
    """Return the keys whose values differ, with both values, except ``free`` ones; or nothing."""
    changes = []
    for name in dict.fromkeys([*old, *new]):
        key = f"{prefix}{name}"
        there = old.get(name)
        here = new.get(name)
        if there == here or key in free:
            continue
        if isinstance(there, dict) and isinstance(here, dict):
            changes.append(differences(there, here, free, f"{key}."))
        else:
            changes.append(f"{key}: {there!r} there, {here!r} here")
    return "; ".join(filter(None, changes))


def check_start(config: RunConfig) -> None:
    """Check a run's directory, its lock and its files of text before torch is imported, see
    :func:`check_run_directory`, :func:`locked` and :func:`check_files`."""
    check_run_directory(config)
    directory = Path(config.run_dir)
    if (directory / LOCK).exists():
        with locked(directory):
            pass
    if (directory / RECORD).exists():
        return
    for text in config.data.texts.values():
        if text.source == "files" and not text.prepared:
            check_files(text.files)


def check_files(names: Sequence[str]) -> None:
    """Raise a UserError without files of text, or if all are empty, and a FileNotFoundError if one
    is missing; addresses, lists and patterns are not looked at."""
    if any(set(name) & {*"@*?[:"} for name in names):
        return
    if not sum(Path(name).expanduser().stat().st_size for name in names):
        raise UserError(f"data.files: expected files with text, got {[*names]}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a run's directory; raise a UserError if another process holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    try:
        lock = FileLock(path, timeout=0).acquire()
    except Timeout:
        text = f"run_dir: another process is training in {str(directory)!r}"
        # Without locks of the system, as on some network disks, the file names the process, and
        # stays behind if that dies.
        holder = path.read_text("utf-8", "replace").split()
        if len(holder) >= 2:
            text += f": {holder[0]} on {holder[1]}; if it has ended, rm {shlex.quote(str(path))}"
        raise UserError(text) from None
    with lock:
        yield


def open_run_directory(config: RunConfig) -> Path:
    """Create or reopen a run's directory, and write ``config.yaml``."""
    check_run_directory(config)
    directory = Path(config.run_dir)
    if config.overwrite:
        for path in chain.from_iterable(map(directory.glob, WRITTEN)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    text = yaml.safe_dump(plain(config), sort_keys=False)
    write_atomically(directory / RECORD, text)
    return directory


def first_free(output: Path, is_free: Callable[[Path], bool]) -> Path:
    """Return ``output``, or if that is taken the first directory numbered beside it that is not."""
    beside = (output.with_name(f"{output.name}-{number}") for number in count(2))
    return next(filter(is_free, chain([output], beside)))


def place_of_comparison(output: Path, runs: Sequence[str]) -> Path:
    """Return the directory for a comparison of ``runs``, and note them there: the first one, of
    ``output`` and those numbered beside it, that holds no run and compares no others."""

    def is_free(place: Path) -> bool:
        if (place / RECORD).exists():
            return False
        record = place / COMPARED
        return not record.exists() or {*json.loads(record.read_bytes())} <= {*runs}

    place = first_free(output, is_free)
    write_atomically(place / COMPARED, json.dumps([*runs]))
    return place


def log_to_file(directory: Path) -> None:
    """Append the program's log to ``log.txt``, and no longer to that of an earlier run."""
    logger = logging.getLogger("trainer")
    for handler in [h for h in logger.handlers if h.name == LOG]:
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(directory / LOG, encoding="utf-8")
    handler.name = LOG  # a user may have other handlers
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


# metrics.csv

COLUMNS = (
    *("step", "tokens", "phase", "loss"),
    *("gradient_norm", "parameter_norm", "skipped_steps", "learning_rate"),
    *("tokens_per_second", "memory", "mfu"),
    *("drop/loss_before", "drop/loss_after", "drop/loss_end"),
)
"""Columns of ``metrics.csv``, which docs/files.md explains; ``epochs/`` and ``benchmark/`` have
more. There is one row a logged step, without gap or duplicate, however often a run resumes."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a metrics file, if it exists, as numbers without empty cells."""
    if not path.exists():
        return []
    with expecting("rows of metrics", path):
        text = path.read_text("utf-8")
        # A row without line end was cut short by a kill.
        rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines(), strict=True)
        metrics = []
        for row in rows:
            numbers: dict[str, Any] = {"step": int(row["step"])}
            for key, cell in row.items():
                if cell:
                    numbers[key] = int(cell) if cell.isdecimal() else float(cell)
            metrics.append(numbers)
        return metrics


def write_metrics(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the file by these rows, with the standard columns and those of the rows."""
    text = StringIO(newline="")
    columns = dict.fromkeys([*COLUMNS, *(key for row in rows for key in row)])
    writer = csv.DictWriter(text, list(columns))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def append_metrics(path: Path, row: dict[str, Any]) -> None:
    """Append a row; rewrite the file if it has new columns."""
    with path.open("r+", newline="", encoding="utf-8") as file:
        columns = next(csv.reader(file))
        if row.keys() <= set(columns):
            file.seek(0, os.SEEK_END)
            csv.DictWriter(file, columns).writerow(row)
            return
    write_metrics(path, [*read_metrics(path), row])
