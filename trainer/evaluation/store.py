"""Finished results on disk, under a hash of everything that they depend on.

An interrupted evaluation resumes from them, and several processes share them.
"""

import hashlib
import inspect
import json
import logging
import re
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

    A function or class counts with the text of its file, so that its helpers there count too. A
    function counts with its defaults and the variables that it takes from a function around it.
    Raise a TypeError if a value has another type, whose text may not identify it.
    """
    return _checksum(json.dumps(parts, sort_keys=True, default=_as_json))


def _as_json(value: Any) -> Any:
    """Return data of a type that ``json`` does not know, or code, as values that it knows."""
    if isinstance(value, array | np.ndarray):
        value = np.asarray(value)
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return ["array", value.dtype.str, value.shape, content]
    if is_dataclass(value) and not isinstance(value, type):
        compared = [field.name for field in fields(value) if field.compare]  # not origins
        return [type(value).__name__, {name: getattr(value, name) for name in compared}]
    if isinstance(value, set | frozenset):
        return ["set", sorted(map(fingerprint, value))]
    if isinstance(value, re.Pattern):
        return ["pattern", value.pattern, value.flags]
    return _code_as_json(value)


def _code_as_json(value: Any) -> list[Any]:
    """Return all that a function or class depends on."""
    if isinstance(value, partial):
        return ["partial", value.func, value.args, value.keywords]
    if inspect.ismethod(value):
        return ["method", value.__func__, type(value.__self__), vars(value.__self__)]
    if inspect.isclass(value):
        return ["class", value.__qualname__, Path(inspect.getfile(value)).read_text("utf-8")]
    if inspect.isfunction(value):
        code = Path(inspect.getfile(value)).read_text("utf-8")
        nonlocals = inspect.getclosurevars(value).nonlocals
        # A recursive function is a variable of itself.
        variables = {name: x for name, x in nonlocals.items() if inspect.unwrap(x) is not value}
        return [value.__qualname__, code, value.__defaults__, value.__kwdefaults__, variables]
    expected = "plain values, dataclasses, arrays, functions or classes"
    raise TypeError(f"a key of stored values: expected {expected}, got {value!r}")


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

    def wait(self, key: str, whole: Callable[[list[Any]], list[Any]] = list) -> list[Any]:
        """Return what ``whole`` takes of the values of a key, by default all, as soon as there is
        any.

        There is no time limit: if another process ends, all of them do (`trainer.common.watch`).
        Raise a RuntimeError if no other process could complete them.
        """
        for attempt in count():
            values = whole(self.values(key))
            if values:
                break
            if self.ranks == 1:
                raise RuntimeError(f"{self.directory / key}: incomplete, and nobody measures more")
            if attempt == NOTICEABLE:
                log.warning("Waiting for another process to measure %s", self.directory / key)
            time.sleep(POLL)
        return values
