"""From the command line to plain values, with Hydra; every wrong word is found at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import UserError, did_you_mean

Values = dict[str, Any]


def config_directory() -> Path:
    """``conf/``: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def options(group: str) -> list[str]:
    """The names that ``group=`` or ``+group=`` accepts."""
    return sorted(path.stem for path in (config_directory() / group).glob("*.yaml"))


def groups() -> list[str]:
    """The configuration groups."""
    return sorted(path.name for path in config_directory().iterdir() if path.is_dir())


def compose_values(words: list[str], config_name: str = "config") -> tuple[Values, list[str]]:
    """What overrides such as ``+experiment=drope_demo data.files=[a.txt]`` stand for.

    Returns:
        The values of those that are right, and a sentence for each that is malformed or unknown, so
        that the values can be checked before all problems are reported together.
    """
    problems: list[str] = []
    chosen: list[str] = []
    others: list[Override] = []
    parser = OverridesParser.create()
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            problems.append(f"{word!r}: expected key=value, for instance seed=1.")
            continue
        if not _is_group(override):
            others.append(override)
        elif problem := _group_problem(override):
            problems.append(problem)
        else:
            chosen.append(word)
    with initialize_config_dir(version_base=None, config_dir=str(config_directory())):
        base = _composed(config_name, chosen)
        for override in others:
            if problem := _key_problem(override, base):
                problems.append(problem)
            else:
                chosen.append(str(override.input_line))
        return _plain(_composed(config_name, chosen)), problems


def _composed(config_name: str, lines: list[str]) -> DictConfig:
    try:
        return compose(config_name, overrides=lines)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from error


def _plain(config: DictConfig) -> Values:
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(" ".join(str(error).split())) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _is_group(override: Override) -> bool:
    return override.key_or_group in groups() and not isinstance(override.value(), dict)


def _group_problem(override: Override) -> str | None:
    """What is wrong with ``experiment=x`` or ``model=x``, if it is one of those."""
    name, value = override.key_or_group, override.value()
    if value not in options(name):
        return f"{name}: there is no {name} {value!r}.{did_you_mean(str(value), options(name))}"
    if name == "experiment" and not override.is_add():
        return f"experiment: write +experiment={value} (with a plus, it adds to the defaults)."
    return None


def _key_problem(override: Override, base: DictConfig) -> str | None:
    """What is wrong with the key of ``a.b.c=value``: it must exist, or lie in a free-form group."""
    place: Any = base
    path = override.key_or_group.split(".")
    if path[0] == "hydra":
        return None
    for depth, key in enumerate(path):
        if not isinstance(place, DictConfig):
            return f"{'.'.join(path)}: {'.'.join(path[:depth])} is a value, not a group."
        if key not in place:
            where = ".".join(path[:depth])
            near = did_you_mean(key, [str(k) for k in place])
            free = where in FREE_FORM or where.startswith(tuple(f"{f}." for f in FREE_FORM))
            if free and (override.is_add() or override.is_force_add()):
                return None
            if free and "mean" not in near:
                return f"{'.'.join(path)}: not set yet; write +{override.input_line}"
            prefix = f"{where}." if where else ""
            return f"{prefix}{key}: unknown key.{near}"
        place = place[key]
    return None


FREE_FORM = ("positional.encodings", "positional.heads", "controls", "callbacks")
"""Groups whose keys the user chooses; new ones are added with a plus."""
