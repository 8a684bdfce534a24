"""Python files of the user that register encodings, needle tasks and analyses.

Only files that a command names are run, never those that a checkpoint names.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.common.errors import UserError


def load_plugins(paths: Sequence[str]) -> None:
    """Run the Python files in which a user registers encodings, tasks and analyses of their own.

    Raises:
        UserError: a file is missing or cannot be imported.
    """
    for path in paths:
        if not Path(path).is_file():
            raise UserError.at("plugins", f"there is no file {path!r}.")
        spec = importlib.util.spec_from_file_location(f"unrope_plugin_{Path(path).stem}", path)
        if spec is None or spec.loader is None:
            raise UserError.at(
                "plugins", f"{path!r} is not a Python file (expected a name in .py)."
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for the module of a class
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # a script among them would end this program
            kind, why = type(error).__name__, " ".join(str(error).split())
            raise UserError.at(
                "plugins", f"{path!r} failed to import: {kind}{f': {why}' if why else ''}."
            ) from error
