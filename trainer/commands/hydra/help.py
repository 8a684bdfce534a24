"""The help of a command: what it does in words, then its keys and groups as the files in ``conf/``
describe them."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from trainer.commands.hydra.command import Command
from trainer.commands.hydra.files import REQUIRED, ConfigFiles, is_global
from trainer.positional.encodings import parameters

WIDTH, COLUMN = 100, 32
COMMENT = re.compile(r"(?::[^#]*|[ ,]*)#(.*)")
"""The rest of a line from the end of a key or a value, with its comment."""
BLOCK = {False, "|", ">"}
"""Styles of YAML's nodes that are written below their keys."""
FLAGS = {
    "--help": "this text",
    "--cfg job [--package GROUP]": "print all values",
    "--config-dir DIR": "a directory with groups and experiments of your own",
    "--version": "of the program",
}
MULTIRUN = {"--multirun": "a job for each of several values or options: seed=0,1"}


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
    command: Command[Any],
    words: Sequence[str],
    files: ConfigFiles,
    added: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return what a command does, then its keys, groups and flags.

    Keys are listed for the groups that the command describes and for those that ``words`` choose.
    ``added``: names that plugins registered, by the keys that take them.

    Raises:
        UserError: the words choose an option that does not exist, or whose file cannot be read.
    """
    root, described = command.root, command.described
    defaults = files.default_groups(root)
    parts = [command.help.strip()]
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
        if group == "positional" and option in files.encodings:
            keys = [
                Key(f"positional.encodings.{option}.{key}", _written(value), "")
                for key, value in parameters(option).items()
            ]
            parts.append("\n".join([f"Keys of {group}={option}:", *map(str, keys)]))
        elif option is not None:
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
    if added:
        lists = [f"  {key}: {', '.join(names)}" for key, names in added.items()]
        parts.append("\n".join(["Values that plugins add:", *lists]))
    flags = FLAGS | ({} if command.single else MULTIRUN) | {**command.flags}
    lines = [_two_columns(f"  {flag}", meaning) for flag, meaning in flags.items()]
    parts.append("\n".join(["Flags:", *lines]))
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
    """Return the keys of a file that can be read, with their comments."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    loader = yaml.SafeLoader(text)

    def walk(group: yaml.MappingNode, prefix: str) -> Iterator[Key]:
        loader.flatten_mapping(group)
        for key, value in group.value:
            name = f"{prefix}{key.value}"
            if name in ("defaults", "hydra"):
                continue
            meaning = _comment(lines, key, value)
            if not isinstance(value, yaml.MappingNode) or not value.value:
                yield Key(name, _written(loader.construct_object(value, deep=True)), meaning)
                continue
            if meaning:
                yield Key(name, None, meaning)
            yield from walk(value, f"{name}.")

    root = loader.get_single_node()
    return [*walk(root, "")] if isinstance(root, yaml.MappingNode) else []


def _comment(lines: Sequence[str], key: yaml.Node, value: yaml.Node) -> str:
    """Return the comment beside a key and in the lines that continue it, or the one above."""
    # An alias stands for a value above it, and a block ends where the key below it begins.
    is_beside = value.start_mark.line == key.end_mark.line
    is_block = BLOCK & {getattr(value, "flow_style", None), getattr(value, "style", None)}
    end = value.end_mark if is_beside and not is_block else key.end_mark
    if match := COMMENT.match(lines[end.line], end.column):
        continued = re.compile(rf" {{{key.end_mark.column + 2},}}#")
        comments = [match[1], *takewhile(continued.match, lines[end.line + 1 :])]
    else:
        line = key.start_mark.line
        start = f"{lines[line][: key.start_mark.column]}#"
        comments = [*takewhile(lambda above: above.startswith(start), reversed(lines[:line]))][::-1]
        if len(comments) == line:  # A comment at the start of a file is about the whole file.
            return ""
    return " ".join(comment.lstrip(" #").rstrip() for comment in comments)


def _written(value: Any) -> str:
    """Return a value as a file holds it, in one line."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n...\n").strip()


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
