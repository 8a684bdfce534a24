"""Text sources by name: each gives its documents in a fixed order."""

import ast
import hashlib
import inspect
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs

from trainer.common.errors import UserError
from trainer.common.registry import Registry, check_call
from trainer.config import DataConfig
from trainer.data.readers import ROWS_AT_ONCE, as_text, format_of, read_column, without_query

Function = TypeVar("Function", bound=Callable[..., Iterable[str | None]])


@dataclass(frozen=True)
class TextSource:
    """A registered source: a function of ``data.arguments`` or, if its text depends on other
    ``keys`` of ``data``, of the configuration, whose revision is then a commit.

    ``state``: returns what tells two states apart without a network, by default of the function's
    code. ``is_remote``: whether it needs a network. ``title``: short name.
    """

    documents: Callable[..., Iterable[str | None]]
    state: Callable[[DataConfig], str | None]
    keys: tuple[str, ...] = ("arguments",)
    is_remote: Callable[[DataConfig], bool] = lambda _: False
    title: Callable[[DataConfig], str] = lambda config: config.source


TEXT_SOURCES = Registry[TextSource]("text source")
"""Sources by name, those of the user's plugins included."""

READ_WHOLE, END = 1 << 26, 1 << 16
"""Bytes of a file whose whole content tells two states apart, and of the ends of larger ones."""
REREAD = (".csv", ".tsv")
"""Formats that were once read otherwise: text that was prepared from them is prepared anew."""


def text_source(**fields: Any) -> Callable[[Function], Function]:
    """Register a function under its name as a :class:`TextSource` with these fields.

    It returns documents, always in the same order. Files that ``plugins`` names use this too.
    """

    def register(function: Function) -> Function:
        own_state = {"state": lambda _: digest(inspect.getsource(function))}
        TEXT_SOURCES.add(function.__name__, TextSource(function, **own_state | fields), function)
        return function

    return register


def digest(value: Any) -> str:
    """Return sixteen hexadecimal digits that identify plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _files_state(config: DataConfig) -> str:
    """Return a digest of the addresses elsewhere, and of the files on this machine."""
    if not config.files:
        raise UserError("data.files: expected files, got none")
    names = list(_addresses(config, offline=True))
    paths = find_files(replace(config, files=[name for name in names if "://" not in name]))
    return digest([[name for name in names if "://" in name], [_imprint(path) for path in paths]])


def _imprint(path: str) -> list[str | int]:
    """Return a file's name and size, and a hash of its content, of a large one's both ends."""
    size = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        if size <= READ_WHOLE:
            content = file.read()
        else:
            content = file.read(END)
            file.seek(-END, os.SEEK_END)
            content += file.read()
    imprint: list[str | int] = [Path(path).name, size, hashlib.sha256(content).hexdigest()]
    if format_of(path) in REREAD:
        imprint.append("cells are text")
    return imprint


def _dataset_state(config: DataConfig) -> str | None:
    """Return a digest of the files of a dataset on this machine; None for the hub's, a commit."""
    files = sorted(path for path in Path(str(config.hub_name)).rglob("*") if path.is_file())
    return digest([[str(path), _imprint(str(path))] for path in files]) if files else None


def source_of(config: DataConfig) -> TextSource:
    """Return the configured source; raise a UserError unless it takes ``data.arguments``."""
    source = TEXT_SOURCES.find(config.source, "data.source")
    if {*source.keys} <= {"arguments"}:
        check_call(f"data.arguments: {config.source}", source.documents, **config.arguments)
    elif config.arguments and "arguments" not in source.keys:
        raise UserError(f"data.arguments: data.source={config.source} takes none")
    return source


def revision_of(config: DataConfig) -> str | None:
    """Return the commit of a dataset on the hub as it is now; otherwise the configured revision."""
    if config.source != "hub" or Path(str(config.hub_name)).is_dir():
        return config.revision
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(str(config.hub_name), revision=config.revision).sha
    except Exception as error:  # of the network, it names neither
        raise UserError(f"data.hub_name: {config.hub_name}: {error}") from error


def cache_directory(config: DataConfig) -> Path:
    """Return the directory of prepared data: configured, ``$UNROPE_CACHE`` or the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "unrope")
    return Path(config.cache_dir or os.environ.get("UNROPE_CACHE") or default).expanduser()


def documents(config: DataConfig, revision: str | None = None) -> Iterator[str]:
    """Yield the documents of the source that have text.

    ``revision``: commit of a dataset on the hub.
    """
    source = source_of(config)
    if {*source.keys} <= {"arguments"}:
        rows = source.documents(**config.arguments)
    else:
        rows = source.documents(replace(config, revision=revision))
    return (row for row in rows if row and not row.isspace())


@text_source(
    keys=("hub_name", "hub_config", "hub_split", "text_field"),
    state=_dataset_state,
    is_remote=lambda config: not Path(str(config.hub_name)).is_dir(),
    title=lambda config: f"{config.hub_name} {config.hub_config or ''}".strip(),
)
def hub(config: DataConfig) -> Iterator[str | None]:
    """Yield the rows of a dataset of the hub."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a network request for every file
    rows = datasets.load_dataset(
        str(config.hub_name),
        config.hub_config,
        revision=config.revision,
        split=config.hub_split,
        streaming=True,
        cache_dir=str(cache_directory(config) / "datasets"),
    )
    rows = rows.select_columns([config.text_field]).with_format("arrow")
    for table in rows.iter(ROWS_AT_ONCE):
        for value in table[config.text_field].to_pylist():
            try:
                yield as_text(value, config.text_field)
            except ValueError as error:
                raise UserError(f"data.hub_name: {config.hub_name}: {error}") from error


@text_source(
    keys=("allow_patterns", "text_field"),
    state=_files_state,
    is_remote=lambda config: any("://" in name for name in _addresses(config, offline=True)),
    title=lambda config: ", ".join(config.files),
)
def files(config: DataConfig) -> Iterator[str | None]:
    """Yield the documents of the configured files."""
    return chain.from_iterable(read_column(path, config.text_field) for path in find_files(config))


def find_files(config: DataConfig) -> list[str]:
    """Return the files that the configured paths, directories, globs and lists name, in order.

    Directories and globs name the files that can be read. Raise a FileNotFoundError if there is no
    such file.
    """
    files: list[str] = []
    for pattern in _addresses(config):
        system, path = url_to_fs(pattern)
        is_local = "file" in system.protocol
        is_directory = "http" not in system.protocol and system.isdir(path)
        is_glob = has_magic(without_query(path)) and not (is_local and system.exists(path))
        if is_directory or is_glob:
            named = system.find(path) if is_directory else system.glob(path)
            root = path if is_directory else re.split(r"[*?\[]", path)[0]
            named = [name for name in named if format_of(name) and not _is_hidden(name, root)]
            known = {*named}
            named = [name for name in named if not _is_description(name, known)]
        else:
            named = [path]
        if not named or (is_local and not all(map(system.exists, named))):
            raise FileNotFoundError(f"data.files: there is no file {pattern!r}")
        files += named if is_local else map(system.unstrip_protocol, named)
    return list(dict.fromkeys(files))


def _is_hidden(name: str, root: str) -> bool:
    """Whether a file or one of its directories below ``root`` is hidden."""
    return any(part.startswith(".") for part in name.removeprefix(root).split("/"))


def _is_description(name: str, known: set[str]) -> bool:
    """Whether a file lies beside the data of `datasets`, as a description, or as a cache of a saved
    dataset. ``known``: all files."""
    directory, _, file = name.rpartition("/")
    is_saved = {f"{directory}/dataset_info.json", f"{directory}/state.json"} <= known
    is_beside = is_saved and not fnmatchcase(file, "data*.arrow")
    return is_beside or file in ("dataset_info.json", "dataset_dict.json")


def _addresses(config: DataConfig, offline: bool = False) -> Iterator[str]:
    """Yield the configured addresses, each ``@LIST`` as its lines that match a pattern.

    ``offline``: yield a list that is elsewhere as it is, instead of reading it.
    """
    wanted = config.allow_patterns or ["*"]
    for pattern in config.files:
        if not pattern.startswith("@") or (offline and "://" in pattern):
            yield pattern.removeprefix("file://")
            continue
        with fsspec.open(pattern[1:], "rt", encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
        for line in lines:
            if any(fnmatchcase(line, glob) for glob in wanted):
                yield line.removeprefix("file://")


SHORTEST_DOCSTRING = 80
"""Characters; shorter docstrings repeat a name and little else."""
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Folders of the standard library that are not read."""
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Nodes that may contain definitions."""


@text_source(
    keys=(), state=lambda _: f"{platform.python_implementation()} {platform.python_version()}"
)
@cache
def stdlib_docs() -> tuple[str, ...]:
    """Return the docstrings of the standard library and the topics of ``help()``.

    This is 1.8 MB of English prose, without duplicates and non-ASCII characters. Documents are
    sorted by a hash, so that neighbours are unrelated.
    """
    from pydoc_data.topics import topics

    texts = {_clean(text) for text in topics.values()}
    for directory, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - SKIPPED  # os.walk visits only the folders that stay
        for name in names:
            if name.endswith(".py"):
                texts.update(map(_clean, _docstrings(Path(directory, name))))
    long = (text for text in texts if len(text) > SHORTEST_DOCSTRING)
    return tuple(sorted(long, key=lambda text: hashlib.sha256(text.encode()).digest()))


def _docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions."""
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
    """Remove non-ASCII characters, shorten ruled lines and fold white space."""
    text = re.sub(r"[^\x20-\x7e\n]", "", text)
    text = re.sub(r"([^\w\s])\1{2,}", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()
