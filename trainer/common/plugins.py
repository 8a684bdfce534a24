"""Python files of the user that register encodings, texts, needle tasks and analyses.

Only files that a command names are run, never those that a checkpoint names.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path


def load_plugins(paths: Sequence[str]) -> None:
    """Run the Python files; their errors are raised as they are."""
    for path in paths:
        spec = importlib.util.spec_from_file_location(f"unrope_plugin_{Path(path).stem}", path)
        assert spec is not None, f"plugins: {path!r} is not a name in .py"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for the module of a class
        spec.loader.exec_module(module)
