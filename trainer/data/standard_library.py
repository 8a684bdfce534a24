"""Docstrings and help topics of the running Python: prose that every machine has."""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SHORTEST_DOCSTRING = 80
"""Characters; shorter docstrings repeat a name and little else."""

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Folders of the standard library."""

STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""What may hold definitions."""


@cache
def stdlib_docs() -> tuple[str, ...]:
    """Return the docstrings of the standard library and the topics of ``help()``.

    This is about 2 MB of English prose. Duplicates and non-ASCII characters are removed, white
    space is folded, ruled lines are shortened. Documents are sorted by a hash, so that neighbours
    are unrelated.
    """
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    documents = dict.fromkeys(_clean(text) for _, text in sorted(topics.items()))
    with _without_collections():
        for file in sorted(_modules(root)):
            documents.update(dict.fromkeys(map(_clean, _docstrings(file))))
    long = (text for text in documents if len(text) > SHORTEST_DOCSTRING)
    return tuple(sorted(long, key=lambda text: hashlib.sha256(text.encode()).digest()))


def stdlib_version() -> tuple[str, int]:
    """Return the version of the running Python, and the size in bytes of the modules read."""
    root = Path(sysconfig.get_path("stdlib"))
    name = f"{platform.python_implementation()} {platform.python_version()}"
    return name, sum(file.stat().st_size for file in _modules(root))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection: with this many objects it takes longer than parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _modules(root: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED  # os.walk skips what is removed here
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and files kept for older versions of the language
        return
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        # Expressions contain no docstrings, and most nodes are expressions.
        nodes += (n for n in ast.iter_child_nodes(node) if isinstance(n, STATEMENTS))


def _clean(text: str) -> str:
    text = re.sub(r"[^\x20-\x7e\n]", "", text)
    text = re.sub(r"([^\w\s])\1{2,}", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()
