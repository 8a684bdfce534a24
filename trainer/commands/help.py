"""The help of a command: what it does in words, then its keys and groups as the files in ``conf/``
describe them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from trainer.commands.config_files import REQUIRED, ConfigFiles, is_global, read_file

WIDTH, COLUMN = 100, 32
KEY = re.compile(r"( *)([a-z]\w*):(?: |$)")
OPTIONS = """\
Options:
  --help                        this text
  --cfg job [--package GROUP]   print all values
  --config-dir DIR              a directory with groups and experiments of your own"""
MULTIRUN = """
  --multirun                    a job for each of several values or options: seed=0,1"""


@dataclass(frozen=True)
class Key:
    """A key as its file describes it. ``default``: None of a group of keys."""

    path: str
    default: str | None
    meaning: str

    def __str__(self) -> str:
        left = f"  {self.path}." if self.default is None else f"  {self.path}={self.default}"
        return _two_columns(left, self.meaning)


def help_text(
    root: str,
    about: str,
    words: Sequence[str],
    files: ConfigFiles,
    described: Sequence[str],
    *,
    several: bool,
) -> str:
    """``about``, then the keys, groups and options of a command.

    ``root``: the file of ``conf/`` that it starts from. ``described``: groups of which every option
    has a line, and every key of the one that ``words`` choose. ``several``: whether there is
    ``--multirun``.
    """
    defaults = files.default_groups(root)
    parts = [about.strip()]
    if keys := list(_documented(files.inherited(("", root))).values()):
        parts.append("\n".join(["Keys (KEY=VALUE):", *map(str, keys)]))
    for group in described:
        names = files.options(group)
        lines = [
            _two_columns(f"  {name}", _headline(path))
            for name in names
            if (path := files.find((group, name)))
        ]
        parts.append("\n".join([f"Options of {group} (+{group}=NAME):", *lines]))
        given = [w.partition("=")[2] for w in words if w.lstrip("+").startswith(f"{group}=")]
        option = given[-1] if given else defaults[group]
        if option == REQUIRED:
            option = names[0]
        prefix = f"{group}."
        own = _documented(files.inherited((group, option)), prefix).values()
        more = "" if given else f"; of another: +{group}=NAME --help"
        parts.append("\n".join([f"Keys of {group}={option}{more}:", *map(str, own)]))
    others = [group for group in files.groups() if _belongs(group, defaults, files)]
    if lists := [f"  {g}: {', '.join(files.options(g))}" for g in others if g not in described]:
        title = "Groups (GROUP=OPTION; those of whole configurations, such as experiment, +GROUP=):"
        lists = [textwrap.fill(text, WIDTH, subsequent_indent=" " * 4) for text in lists]
        parts.append("\n".join([title, *lists]))
    parts.append(OPTIONS + (MULTIRUN if several else ""))
    return "\n\n".join(parts)


def _belongs(group: str, defaults: dict[str, str], files: ConfigFiles) -> bool:
    """Whether a command with these groups by default takes the group too."""
    if group in defaults:
        return True
    paths = [files.find((group, option)) for option in files.options(group)]
    return "model" in defaults and any(path is not None and is_global(path) for path in paths)


def _headline(path: Path) -> str:
    """The first comment of a file."""
    lines = path.read_text("utf-8", errors="replace").splitlines()
    comments = (line for line in lines if line.startswith("#") and "@package" not in line)
    return next(comments, "#")[1:].strip()


def _documented(paths: Sequence[Path], prefix: str = "") -> dict[str, Key]:
    """The keys of a file and of those that it inherits from, which come first."""
    found: dict[str, Key] = {}
    for path in paths:
        for key in _keys(path):
            before = found.get(key.path)
            if before is not None and not key.meaning:
                found[key.path] = replace(before, default=key.default)
            else:
                found[key.path] = key
    return {path: replace(key, path=prefix + path) for path, key in found.items()}


def _keys(path: Path) -> list[Key]:
    """What a file says of its keys: behind them, or in the lines above."""
    content = read_file(path)
    found: list[Key] = []
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    at = 0
    for line in path.read_text("utf-8").splitlines():
        code, _, comment = line.partition("#")
        if not code.strip():
            if len(code) > at + 1 and found:  # goes on below the end of a line
                found[-1] = replace(found[-1], meaning=f"{found[-1].meaning} {comment.strip()}")
            elif comment:
                above.append(comment.strip())
            else:
                above.clear()
            continue
        if match := KEY.match(line):
            at = len(match[1])
            parents = [parent for parent in parents if parent[0] < at]
            parents.append((at, match[2]))
            names = [name for _, name in parents]
            if names[0] not in ("defaults", "hydra"):
                first = not found
                meaning = comment.strip() or ("" if first else " ".join(above))
                key = Key(".".join(names), _default(content, names), meaning)
                if key.default is not None or key.meaning:
                    found.append(key)
                if "{" in code:  # a group in one line
                    found += _leaves(content, names)
        above.clear()
    return found


def _leaves(content: Any, names: Sequence[str]) -> list[Key]:
    """The keys of a group, without meanings of their own."""
    group = content
    for name in names:
        group = group[name]
    if not isinstance(group, dict):
        return []
    paths = [[*names, str(key)] for key in group]
    return [Key(".".join(path), _default(content, path), "") for path in paths]


def _default(content: Any, names: Sequence[str]) -> str | None:
    for name in names:
        content = content[name]
    if isinstance(content, dict) and content:
        return None
    written = yaml.safe_dump(content, default_flow_style=True, width=10**6, sort_keys=False)
    return written.removesuffix("\n...\n").strip()


def _two_columns(left: str, right: str) -> str:
    if len(left) + 2 <= COLUMN:
        left = left.ljust(COLUMN)
        return textwrap.fill(left + right, WIDTH, subsequent_indent=" " * COLUMN).rstrip()
    lines = textwrap.wrap(left, WIDTH, subsequent_indent=" " * 4, break_long_words=False)
    indent = " " * COLUMN
    return "\n".join(
        [*lines, *textwrap.wrap(right, WIDTH, initial_indent=indent, subsequent_indent=indent)]
    )
