"""Read configuration files of ``conf/`` and of a user's directory (``--config-dir``).

A mistake in a file is reported in one line that names the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.common.errors import Problem, UserError, did_you_mean, raise_all

Place = tuple[str, str]
"""A group and an option of it; the group of the files that commands start from is empty."""

REQUIRED = "???"
"""The default option of a group that has none."""


def config_directory() -> Path:
    """``conf/``: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


@dataclass(frozen=True)
class ConfigFiles:
    """``conf/`` and behind it a user's directory.

    Raises:
        UserError: the user's directory does not exist, or holds an option that ``conf/`` has.
    """

    user_directory: Path | None = None
    encodings: tuple[str, ...] = ()
    """Options of ``positional`` without a file, which plugins register."""

    def __post_init__(self) -> None:
        directory = self.user_directory
        if directory is None:
            return
        if not directory.is_dir():
            raise UserError.at("--config-dir", f"there is no directory {str(directory)!r}.")
        taken = ConfigFiles()
        problems = [
            Problem(
                str(path),
                f"there is a {path.stem!r} in conf/{path.parent.name} already; give this option "
                "another name.",
            )
            for path in sorted(directory.glob("*/*.yaml"))
            if taken.find((path.parent.name, path.stem))
        ]
        raise_all(problems)

    @property
    def directories(self) -> tuple[Path, ...]:
        """Directories to search, in this order."""
        return (config_directory(), *filter(None, [self.user_directory]))

    def groups(self) -> list[str]:
        """Return the configuration groups."""
        return sorted(
            {
                path.relative_to(directory).as_posix()
                for directory in self.directories
                for path in directory.rglob("*")
                if path.is_dir()
            }
        )

    def options(self, group: str) -> list[str]:
        """Return the names that ``group=`` or ``+group=`` accepts."""
        names = {p.stem for place in self.directories for p in (place / group).glob("*.yaml")}
        return sorted({*names, *(self.encodings if group == "positional" else ())})

    def find(self, place: Place) -> Path | None:
        """Return the file of an option, or None."""
        paths = (directory / place[0] / f"{place[1]}.yaml" for directory in self.directories)
        return next((path for path in paths if path.is_file()), None)

    def defaults_chain(
        self, place: Place, above: tuple[Place, ...] = (), *, inherited: bool = False
    ) -> list[Path]:
        """Return the files that an option's defaults list leads to, and last its own.

        ``above``: the options whose lists have led to this one. ``inherited``: only files whose
        keys become keys of the option, because of their group or by ``@_here_``.

        Raises:
            UserError: one of them cannot be read, names what does not exist, or leads to itself.
        """
        path = self.find(place)
        if path is None:
            group, option = place
            near = did_you_mean(option, self.options(group))
            where = f"{self.find(above[-1])}: defaults" if above else group
            raise UserError.at(where, f"there is no {group} {option!r}.", near)
        if place in above:
            circle = " -> ".join(name for _, name in (*above, place))
            raise UserError.at(str(path), f"its defaults list leads back to itself ({circle}).")
        paths = []
        for (group, option), is_inherited in _parents(path, place[0]):
            if option == REQUIRED:
                continue
            if group and group not in self.groups():
                near = did_you_mean(group, self.groups())
                raise UserError.at(str(path), f"defaults: there is no group {group!r}.", near)
            chain = self.defaults_chain((group, option), (*above, place), inherited=inherited)
            paths += chain if is_inherited or not inherited else []
        return [*paths, path]

    def default_groups(self, root: str) -> dict[str, str]:
        """Return the groups in the file that a command starts from, each with its default
        option."""
        groups: dict[str, str] = {}
        path = self.find(("", root))
        assert path is not None
        for (group, option), _ in _parents(path, ""):
            groups |= {group: option} if group else self.default_groups(option)
        return groups


BASE_60 = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
"""Plain text that YAML reads as a number to the base 60: 24:00:00 is 86400."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file, with interpolations unresolved.

    Raises:
        UserError: it cannot be read, or is no mapping of keys.
    """
    try:
        content = OmegaConf.load(path)
        if isinstance(content, DictConfig):
            values: Any = OmegaConf.to_container(content)
            text = path.read_text("utf-8")
            if BASE_60.search(text):  # a scan adds 40% to the time of loading
                for token in yaml.scan(text):
                    if isinstance(token, yaml.ScalarToken) and token.plain:
                        _check_base_60(path, token)
            return {str(key): value for key, value in values.items()}
    except RecursionError as error:
        raise UserError.at(str(path), "it is nested too deeply, or holds itself.") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError.at(f"{path}{line}", f"{error.problem}.") from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise UserError.at(str(path), " ".join(str(error).split())) from error
    raise UserError.at(str(path), "expected keys with values, got a list.")


def _check_base_60(path: Path, token: yaml.ScalarToken) -> None:
    """Raise a ``UserError`` for a value that is meant as text, such as a time limit."""
    if BASE_60.fullmatch(token.value):
        raise UserError.at(
            f"{path}, line {token.start_mark.line + 1}",
            f'YAML reads {token.value} as a number to the base 60; write "{token.value}".',
        )


def is_global(path: Path) -> bool:
    """Whether the file says that its keys are those of the whole configuration."""
    text = path.read_text("utf-8", errors="replace")
    return re.search(r"^#\s*@package\s+_global_\s*$", text, re.MULTILINE) is not None


def _parents(path: Path, group: str) -> Iterator[tuple[Place, bool]]:
    """Yield the options in the defaults list of a file in ``group``, and whether their keys become
    keys of that group."""
    listed = read_file(path).get("defaults", [])
    if not isinstance(listed, list):
        raise UserError.at(str(path), f"defaults: expected a list, got {listed!r}.")
    for entry in listed:
        pairs = entry.items() if isinstance(entry, dict) else [("", entry)]
        for key, value in pairs:
            whole, _, package = str(key).partition("@")
            words = whole.split()
            name = words[-1] if words else ""
            if "optional" in words or name.strip("/").startswith("hydra/") or "${" in str(entry):
                continue
            there = name[1:] if name.startswith("/") else "/".join(filter(None, (group, name)))
            for option in value if isinstance(value, list) else [value]:
                if isinstance(option, str) and option != "_self_":
                    plain = option.partition("@")[0]
                    place = _split(option, there) if "/" in option else (there, plain)
                    yield place, place[0] == group or package == "_here_"


def _split(option: str, group: str) -> Place:
    """Return the place of an option that is written with its group, such as ``/model/nano``."""
    path = option.partition("@")[0]
    parts = (path[1:] if path.startswith("/") else f"{group}/{path}").strip("/").split("/")
    return "/".join(parts[:-1]), parts[-1]
