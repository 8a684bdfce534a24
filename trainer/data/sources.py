"""Text sources: each yields documents, in an order that depends on nothing but their content."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from trainer.data.config import DataConfig
from trainer.errors import UserError

SHORTEST_DOCSTRING = 80
"""Characters; shorter docstrings repeat a name and little else."""

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Folders of the standard library."""

STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""What may hold definitions."""


@cache
def stdlib_docs() -> tuple[str, ...]:
    """Docstrings of the running Python's standard library, and the topics of its ``help()``.

    About 2 MB of English prose that is on every machine. Duplicates are left out, white space is
    folded, ruled lines are shortened, and what is not ASCII is dropped.
    """
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    documents = dict.fromkeys(_clean(text) for _, text in sorted(topics.items()))
    with _without_collections():
        for file in sorted(_modules(root)):
            documents.update(dict.fromkeys(map(_clean, _docstrings(file))))
    return tuple(text for text in documents if len(text) > SHORTEST_DOCSTRING)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Syntax trees are so many objects that collections, each through all that was imported, take
    longer than parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _modules(root: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED  # and what is below them
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
        # Nothing below an expression has a docstring, and most nodes are expressions.
        nodes += (n for n in ast.iter_child_nodes(node) if isinstance(n, STATEMENTS))


def _clean(text: str) -> str:
    text = re.sub(r"[^\x20-\x7e\n]", "", text)
    text = re.sub(r"([^\w\s])\1{2,}", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def read_files(paths: list[str], text_field: str) -> list[str]:
    """Documents of ``.txt`` files, in pieces, and of ``.jsonl`` files, one a line.

    ``text_field`` is the key that holds the text of a line.

    Raises:
        UserError: every file that is missing, empty, of another kind or malformed.
    """
    documents: list[str] = []
    problems: list[str] = []
    for name in paths:
        path = Path(name)
        if not path.is_file():
            problems.append(f"data.files: there is no file {name!r}.")
        elif path.suffix not in (".txt", ".jsonl"):
            problems.append(f"data.files: {name!r} is not a .txt or .jsonl file.")
        else:
            try:
                text = path.read_text(encoding="utf-8")
                found = pieces(text) if path.suffix == ".txt" else _jsonl(text, name, text_field)
            except UnicodeDecodeError:
                problems.append(f"data.files: {name!r} is not UTF-8 text.")
            except UserError as error:
                problems.extend(error.problems)
            else:
                found = [document for document in found if document.strip()]
                if not found:
                    problems.append(f"data.files: {name!r} holds no text.")
                documents += found
    if problems:
        raise UserError(*problems)
    return documents


def pieces(text: str, size: int = 8192) -> list[str]:
    """A long text as documents of about ``size`` characters, cut at line ends, so that a single
    file can be split into text to train on and text to hold out."""
    found = [""]
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), size):
            if len(found[-1]) >= size:
                found.append("")
            found[-1] += line[start : start + size]
    return found


def _jsonl(text: str, name: str, text_field: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold other line ends
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"data.files: {name!r} line {number} is not JSON ({error}).") from None
        if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
            keys = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise UserError(
                f"data.files: {name!r} line {number} has no text under {text_field!r} "
                f"(data.text_field); it has {keys}."
            )
        documents.append(row[text_field])
    return documents


def read_hub(config: DataConfig) -> list[str]:
    """Documents of a dataset on the Hugging Face hub.

    Raises:
        UserError: it cannot be had, or has no such field.
    """
    import datasets

    try:
        rows = datasets.load_dataset(config.hub_name, config.hub_config, split=config.hub_split)
    except Exception as error:  # datasets raises whatever its transports raise
        raise UserError(
            f"data.hub_name: {config.hub_name!r} (split {config.hub_split!r}) is not on this "
            f"machine and could not be loaded from the hub: {str(error).splitlines()[0]}"
        ) from error
    if config.text_field not in rows.column_names:
        raise UserError(
            f"data.text_field: {config.hub_name!r} has no field {config.text_field!r}; "
            f"it has {', '.join(rows.column_names)}."
        )
    return [text for text in rows[config.text_field] if text.strip()]


def read_documents(config: DataConfig) -> list[str]:
    """The documents of the configured source, ordered by a hash of their text.

    That order is a shuffle which does not depend on file systems or seeds, so that the split into
    training and held-out documents is the same everywhere.
    """
    documents: Sequence[str]
    if config.source == "stdlib_docs":
        documents = stdlib_docs()
    elif config.source == "files":
        documents = read_files(config.files, config.text_field)
    else:
        documents = read_hub(config)
    return sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
