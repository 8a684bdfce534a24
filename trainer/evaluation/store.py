"""Finished results on disk, under a hash of everything that they depend on.

An interrupted evaluation resumes from them, and several processes share them.
"""

import hashlib
import inspect
import json
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

POLL = 0.2
"""Seconds between checks for results of other processes."""
NOTICEABLE = 600
"""Checks after which a wait for them is logged."""


def fingerprint(*parts: Any) -> str:
    """Return a hash of plain values, dataclasses, arrays and code, sixteen hexadecimal digits.

    A function or class counts with the text of its file, so that its helpers there count too, and
    with the variables that it takes from a function around it.

    Raises:
        TypeError: a value has another type, whose text may not identify it.
    """
    text = json.dumps(parts, sort_keys=True, default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_json(value: Any) -> Any:
    """Return a dataclass, an array, a function or a class as values that ``json`` knows."""
    if isinstance(value, array | np.ndarray):
        value = np.asarray(value)
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return ["array", value.dtype.str, value.shape, content]
    if is_dataclass(value) and not isinstance(value, type):
        compared = [field.name for field in fields(value) if field.compare]  # not origins
        items = {name: getattr(value, name) for name in compared}
        return [type(value).__name__, items]
    if isinstance(value, partial):
        return ["partial", value.func, value.args, value.keywords]
    if inspect.isfunction(value) or inspect.isclass(value):
        value = inspect.unwrap(value)
        code = Path(inspect.getfile(value)).read_text(encoding="utf-8")
        nonlocals = inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {}
        # A recursive function is a variable of itself.
        variables = {name: held for name, held in nonlocals.items() if name != value.__name__}
        return ["code", value.__qualname__, code, variables]
    raise TypeError(f"no key can be made of {value!r}")


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """Directory of JSON values under keys. This process is ``rank`` of ``ranks``, and each appends
    to files of its own."""

    def __init__(self, directory: Path, rank: int = 0, ranks: int = 1) -> None:
        self.directory = directory
        self.rank = rank
        self.ranks = ranks
        self._damaged: set[Path] = set()
        """Files that a warning has named."""

    def add(self, key: str, value: Any) -> None:
        """Add a JSON value to those of a key: a line of a checksum and the value."""
        path = self.directory / key / f"{self.rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(value)
        with path.open("a", encoding="utf-8") as file:
            # The first newline ends a line that an interruption has cut short.
            file.write(f"\n{_checksum(text)} {text}\n")

    def values(self, key: str) -> list[Any]:
        """Return the values of a key, with lists for tuples; warn of damaged lines."""
        values = []
        for path in sorted(self.directory.glob(f"{key}/*.txt")):
            content = path.read_text(encoding="utf-8", errors="replace")
            for line in content.split("\n")[:-1]:  # the last one is empty, or being written
                checksum, _, text = line.partition(" ")
                if checksum == _checksum(text):
                    values.append(json.loads(text))
                elif line and path not in self._damaged:
                    self._damaged.add(path)
                    log.warning("%s: a line is damaged; its value is measured again", path)
        return values

    def wait(self, key: str, is_complete: Callable[[list[Any]], bool] = bool) -> list[Any]:
        """Return the values of a key as soon as they are complete, by default any.

        There is no time limit: if another process ends, all of them do (`trainer.common.watch`).
        """
        for attempt in count():
            values = self.values(key)
            if is_complete(values):
                break
            if attempt == NOTICEABLE:
                log.warning("Waiting for another process to measure %s", self.directory / key)
            time.sleep(POLL)
        return values
