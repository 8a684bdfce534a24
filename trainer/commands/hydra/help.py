"""The help of a command: what it does in words, then its keys and groups as the files in ``conf/``
describe them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from trainer.commands.hydra.files import REQUIRED, ConfigFiles, is_global, read_file

WIDTH, COLUMN = 100, 32
KEY = re.compile(r"( *)([a-z]\w*):(?: |$)")
OPTIONS = """\
Options:
  --help                        this text
  --cfg job [--package GROUP]   print all values
  --config-dir DIR              a directory with groups and experiments of your own
  --version                     of the program"""
MULTIRUN = """
  --multirun                    a job for each of several values or options: seed=0,1"""


@dataclass(frozen=True)
class Key:
    """A key as its file describes it."""

    path: str
    default: str | None
    """None for a group of keys."""
    meaning: str

    def __str__(self) -> str:
        key = f"  {self.path}." if self.default is None else f"  {self.path}={self.default}"
        return _two_columns(key, self.meaning)


def help_text(
    root: str,
    about: str,
    words: Sequence[str],
    files: ConfigFiles,
    described: Sequence[str],
    *,
    several: bool,
) -> str:
    """Return ``about``, then the keys, groups and options of a command.

    ``root``: the file of ``conf/`` that it starts from. ``described``: groups whose options are
    listed one by one. ``several``: whether the command has ``--multirun``. Keys are listed for the
    described groups and for the groups that ``words`` choose.

    Raises:
        UserError: the words choose an option that does not exist, or whose file cannot be read.
    """
    defaults = files.default_groups(root)
    parts = [about.strip()]
    if keys := list(_documented(files.defaults_chain(("", root), inherited=True)).values()):
        parts.append("\n".join(["Keys (KEY=VALUE):", *map(str, keys)]))
    others = [group for group in files.groups() if _belongs(group, defaults, files)]
    pairs = (word.lstrip("+").partition("=") for word in words)
    chosen = {group: option for group, _, option in pairs if group in others}
    for group in dict.fromkeys([*described, *chosen]):
        if group in described:
            parts.append(_options(group, files))
        option = chosen.get(group, defaults.get(group))
        if option == REQUIRED:
            option = files.options(group)[0]
        if option is not None:
            # An option of the whole configuration sets keys of other groups.
            prefix = f"{group}." if group in defaults else ""
            chain = files.defaults_chain((group, option), inherited=True)
            keys = list(_documented(chain, prefix).values())
            more = "" if group in chosen else f"; of another: +{group}=NAME --help"
            parts.append("\n".join([f"Keys of {group}={option}{more}:", *map(str, keys)]))
    if lists := [f"  {g}: {', '.join(files.options(g))}" for g in others if g not in described]:
        title = "Groups (GROUP=OPTION; what its keys are: GROUP=OPTION --help):"
        lists = [textwrap.fill(text, WIDTH, subsequent_indent=" " * 4) for text in lists]
        parts.append("\n".join([title, *lists]))
    parts.append(OPTIONS + (MULTIRUN if several else ""))
    return "\n\n".join(parts)


def _options(group: str, files: ConfigFiles) -> str:
    """Return a line for every option of a group."""
    lines = [
        _two_columns(f"  {name}", _headline(path))
        for name in files.options(group)
        if (path := files.find((group, name)))
    ]
    return "\n".join([f"Options of {group} (+{group}=NAME):", *lines])


def _belongs(group: str, defaults: dict[str, str], files: ConfigFiles) -> bool:
    """Whether a command with these groups by default takes the group too."""
    if group in defaults:
        return True
    paths = [files.find((group, option)) for option in files.options(group)]
    return "model" in defaults and any(path is not None and is_global(path) for path in paths)


def _headline(path: Path) -> str:
    """Return the comment that a file begins with."""
    lines = path.read_text("utf-8", errors="replace").splitlines()
    above = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line[1:].strip() for line in above if "@package" not in line)


def _documented(paths: Sequence[Path], prefix: str = "") -> dict[str, Key]:
    """Return the keys of a file and, before them, of the files that it inherits from."""
    keys: dict[str, Key] = {}
    for path in paths:
        for key in _keys(path):
            before = keys.get(key.path)
            if before is not None and not key.meaning:
                keys[key.path] = replace(before, default=key.default)
            else:
                keys[key.path] = key
    return {path: replace(key, path=prefix + path) for path, key in keys.items()}


def _keys(path: Path) -> list[Key]:
    """Return the keys of a file with their comments, beside them or in the lines above."""
    content = read_file(path)
    keys: list[Key] = []
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    end = 0  # of the key of the line above
    for line in path.read_text("utf-8").splitlines():
        code, _, comment = line.partition("#")
        if not code.strip():
            if len(code) > end and keys:  # continues below the end of a line
                keys[-1] = replace(keys[-1], meaning=f"{keys[-1].meaning} {comment.strip()}")
            elif comment:
                above.append(comment.strip())
            else:
                above.clear()
            continue
        if match := KEY.match(line):
            depth, end = len(match[1]), len(match[0].rstrip())
            parents = [parent for parent in parents if parent[0] < depth]
            parents.append((depth, match[2]))
            names = [name for _, name in parents]
            if names[0] not in ("defaults", "hydra"):
                first = not keys
                meaning = comment.strip() or ("" if first else " ".join(above))
                key = Key(".".join(names), _default(content, names), meaning)
                if key.default is not None or key.meaning:
                    keys.append(key)
                if "{" in code and key.default is None:  # a group in one line
                    keys += _leaves(content, names)
        above.clear()
    return keys


def _leaves(content: Any, names: Sequence[str]) -> list[Key]:
    """Return the keys below a group, without their own meanings."""
    group = content
    for name in names:
        group = group[name]
    if not isinstance(group, dict) or not group:
        return [Key(".".join(names), _default(content, names), "")]
    return [key for name in group for key in _leaves(content, [*names, str(name)])]


def _default(content: Any, names: Sequence[str]) -> str | None:
    for name in names:
        content = content[name]
    if isinstance(content, dict) and content:
        return None
    written = yaml.safe_dump(content, default_flow_style=True, width=10**6, sort_keys=False)
    return written.removesuffix("\n...\n").strip()


def _two_columns(key: str, meaning: str) -> str:
    """Set ``meaning`` beside a short key, or below a long one."""
    if len(key) + 2 <= COLUMN:
        return textwrap.fill(
            key.ljust(COLUMN) + meaning, WIDTH, subsequent_indent=" " * COLUMN
        ).rstrip()
    lines = textwrap.wrap(key, WIDTH, subsequent_indent=" " * 4, break_long_words=False)
    indent = " " * COLUMN
    lines += textwrap.wrap(meaning, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
