"""Text sources by name: the files of each, and their documents in order."""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import fsspec

from trainer.common.errors import Problem, UserError, did_you_mean, raise_all
from trainer.common.plugins import REGISTRIES
from trainer.data.config import SourceConfig
from trainer.data.files import BadRow, File, find_files, one_line, read_rows, whole_characters

BUILT_IN = ("stdlib_docs", "files", "hub")
TEXT_SOURCES: dict[str, Callable[..., Iterable[str]]] = {}
"""Sources of the user's own, by name."""
REGISTRIES["data.source"] = TEXT_SOURCES


def text_source(function: Callable[..., Iterable[str]]) -> Callable[..., Iterable[str]]:
    """Register ``function`` as a source under its own name; use it in a file that ``plugins``
    names.

    The function takes ``data.arguments`` and returns documents, always in the same order.

    Raises:
        UserError: the name belongs to a built-in source.
    """
    if function.__name__ in BUILT_IN:
        raise UserError.at(
            "plugins", f"a text source cannot be called {function.__name__!r}, which is built in."
        )
    TEXT_SOURCES[function.__name__] = function
    return function


def source_problems(config: SourceConfig) -> list[Problem]:
    """Check that the source exists and takes the configured arguments."""
    if config.source in BUILT_IN:
        return []
    if (function := TEXT_SOURCES.get(config.source)) is None:
        near = did_you_mean(config.source, [*BUILT_IN, *TEXT_SOURCES])
        return [Problem("data.source", f"unknown source {config.source!r}.", near)]
    try:
        inspect.signature(function).bind(**config.arguments)
    except TypeError as error:
        reason = one_line(error)
        return [Problem("data.arguments", f"{config.source!r} does not take them: {reason}.")]
    return []


@dataclass(frozen=True)
class Listing:
    """State of a source: its files, its ``revision``, which is the commit of a dataset on the hub
    and otherwise the configured text, and for a plugin's source the hash of its ``code``."""

    files: tuple[File, ...]
    revision: str | None
    code: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Names and sizes, without locations, and the code."""
        files = [[f.name, f.size] for f in self.files]
        code = {} if self.code is None else {"code": self.code}
        return {"revision": self.revision, "files": files, **code}


def list_source(config: SourceConfig) -> Listing:
    """List the files of the configured source.

    Raises:
        UserError: the source is missing or cannot be reached.
    """
    if config.source == "stdlib_docs":
        name, size = stdlib_version()
        return Listing((File("stdlib_docs", name, size),), config.revision)
    if config.source == "files":
        return Listing(tuple(find_files(_addresses(config), "data.files")), config.revision)
    if config.source == "hub":
        return _list_hub(config)
    raise_all(source_problems(config))
    file, code = File(config.source, config.source, 0), code_hash(TEXT_SOURCES[config.source])
    return Listing((file,), config.revision, code)


def code_hash(function: Callable[..., Any]) -> str:
    """Return a hash of a function's source, or of its bytecode and constants without a source.

    The functions that it calls are not covered.
    """
    try:
        text = inspect.getsource(function)
    except Exception:  # inspect raises whatever its tokenizer does
        text = repr(_plain(getattr(function, "__code__", None)))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _plain(value: object) -> object:
    """Return code and constants as values whose ``repr`` is the same in every process."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [_plain(constant) for constant in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def read_source(config: SourceConfig, file: File) -> Iterator[str | BadRow]:
    """Yield the documents of one file of the source.

    Raises:
        UserError: the file cannot be read.
    """
    if config.source == "stdlib_docs":
        return iter(stdlib_docs())
    if config.source in TEXT_SOURCES:
        return _checked(config)
    return read_rows(file.path, config.text_field, config.piece_characters)


def _checked(config: SourceConfig) -> Iterator[str | BadRow]:
    try:
        texts = TEXT_SOURCES[config.source](**config.arguments)
        if isinstance(texts, str):
            raise UserError.at(
                "data.source", f"{config.source!r} gave one text instead of several."
            )
        for number, text in enumerate(texts, 1):
            bad = BadRow(f"{config.source} row {number}", f"is no text but {text!r:.40}")
            yield whole_characters(text) if isinstance(text, str) else bad
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError.at("data.source", f"{config.source!r} failed: {error!r}.") from error


def is_here(config: SourceConfig) -> bool:
    """Whether the source can be listed without a network."""
    if config.source == "hub":
        return False
    return not any("://" in path.removeprefix("file://") for path in config.files)


STDLIB_DOCS = 1_800_000
"""Bytes of ``stdlib_docs``: 1,813,425 in Python 3.11.7, others in other versions."""


def estimated_bytes(config: SourceConfig) -> int | None:
    """Estimate the bytes of a source's text without a network, or return None.

    Raises:
        UserError: files are missing.
    """
    if config.source == "stdlib_docs":
        return STDLIB_DOCS
    if config.source != "files" or not is_here(config):
        return None
    return sum(file.text_bytes for file in list_source(config).files)


def _addresses(config: SourceConfig) -> list[str]:
    """Return the configured addresses, with ``@LIST`` replaced by the matching lines of that list.

    Raises:
        UserError: a list cannot be read, or no line matches.
    """
    addresses: list[str] = []
    wanted = config.allow_patterns or ["*"]
    for pattern in config.files:
        if not pattern.startswith("@"):
            addresses.append(pattern.removeprefix("file://"))
            continue
        try:
            with fsspec.open(pattern[1:], "rt", encoding="utf-8") as file:
                lines = [line.strip() for line in file if line.strip()]
        except Exception as error:  # transports raise whatever they like
            raise UserError.at(
                "data.files", f"the list {pattern[1:]!r} cannot be read: {one_line(error)}."
            ) from error
        if not lines:
            raise UserError.at("data.files", f"the list {pattern[1:]!r} names no file.")
        chosen = [line for line in lines if any(fnmatchcase(line, glob) for glob in wanted)]
        if not chosen:
            raise UserError.at(
                "data.allow_patterns",
                f"none of the {len(lines)} addresses in {pattern[1:]!r}, such as {lines[0]!r}, "
                f"matches {config.allow_patterns}.",
            )
        addresses += chosen
    return addresses


def _list_hub(config: SourceConfig) -> Listing:
    """List the files of a dataset's configuration and split at one commit."""
    try:
        revision = config.revision
        if config.hub_files:
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(str(config.hub_name), revision=revision).sha
            root = f"hf://datasets/{config.hub_name}@{revision}/"
            patterns = [root + pattern for pattern in config.hub_files]
        else:
            import datasets

            builder = datasets.load_dataset_builder(
                config.hub_name, config.hub_config, revision=revision
            )
            splits = builder.config.data_files or {}
            if config.hub_split not in splits:
                near = did_you_mean(config.hub_split, map(str, splits))
                raise UserError.at(
                    "data.hub_split", f"{config.hub_name!r} has no such split.", near
                )
            patterns = list(splits[config.hub_split])
            if patterns and patterns[0].startswith("hf://"):
                revision = patterns[0].partition("@")[2].partition("/")[0]
    except UserError:
        raise
    except Exception as error:  # datasets raises whatever its transports raise
        raise UserError.at(
            "data.hub_name",
            f"{config.hub_name!r} cannot be read from the hub: {one_line(error)}.",
        ) from error
    return Listing(tuple(find_files(patterns, "data.hub_name")), revision)


def describe(config: SourceConfig) -> str:
    """Describe the source in a few words, with its size if known."""
    if config.source == "hub":
        name = f"{config.hub_name} ({config.hub_config})" if config.hub_config else config.hub_name
        return f"{name}{', ' + config.about if config.about else ''}"
    if config.source == "files":
        if config.about:
            return config.about
        more = f" and {len(config.files) - 1} more" if len(config.files) > 1 else ""
        return f"{Path(config.files[0]).name}{more}"
    return config.source


SHORTEST_DOCSTRING = 80
"""Characters; shorter docstrings repeat a name and little else."""

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Folders of the standard library that are not read."""

STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Nodes that may contain definitions."""


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
        folders[:] = set(folders) - SKIPPED  # os.walk visits only the folders that stay
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
