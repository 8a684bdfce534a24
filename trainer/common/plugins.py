"""Python files of the user that register encodings, needle tasks and analyses.

Only files that a command names are run, never those that a checkpoint names.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.common.errors import Problem, UserError

PREFIX = "unrope_plugin_"
"""How the names of modules made from plugins begin."""
REGISTRIES: dict[str, dict[str, Any]] = {}
"""What plugins can add to, by the keys whose values are the names; modules enter their own."""


def load_plugins(paths: Sequence[str]) -> None:
    """Run the Python files in which a user registers encodings, tasks and analyses of their own.

    Raises:
        UserError: a file is missing, cannot be imported or registers something malformed.
    """
    for path in paths:
        if not Path(path).is_file():
            raise UserError.at("plugins", f"there is no file {path!r}.")
        spec = importlib.util.spec_from_file_location(f"{PREFIX}{Path(path).stem}", path)
        if spec is None or spec.loader is None:
            raise UserError.at(
                "plugins", f"{path!r} is not a Python file (expected a name in .py)."
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for the module of a class
        try:
            spec.loader.exec_module(module)
        except UserError as error:
            raise UserError(
                *(Problem("plugins", f"{path!r}: {p.message}", p.hint) for p in error.problems)
            ) from error
        except (Exception, SystemExit) as error:  # a script among them would end this program
            raise UserError.at(
                "plugins", f"{path!r} failed to import: {failure(error, spec.origin)}."
            ) from error


def added_by_plugins() -> dict[str, list[str]]:
    """Return the names that plugins have registered, by the keys that take them."""
    added = {
        key: sorted(name for name, entry in entries.items() if plugin_of(entry) is not None)
        for key, entries in REGISTRIES.items()
    }
    return {key: names for key, names in added.items() if names}


def plugin_of(entry: Callable[..., Any]) -> str | None:
    """Return the file of the plugin that defines a function or class, or None."""
    module = sys.modules.get(entry.__module__)
    return module.__file__ if module and module.__name__.startswith(PREFIX) else None


def failure(error: BaseException, path: str | None) -> str:
    """Return the type and message of an error, and the line of the plugin that raised it."""
    why = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == path), None)
    place = "" if line is None else f" (line {line})"
    return f"{type(error).__name__}{f': {why}' if why else ''}{place}"
