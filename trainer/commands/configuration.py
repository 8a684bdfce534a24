"""From the words of a command line to plain values, with Hydra; every wrong word is found at
once."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    OmegaConfBaseException,
)

from trainer.commands.config_files import (
    REQUIRED,
    ConfigFiles,
    config_directory,
    is_global,
    read_file,
)
from trainer.commands.keys import key_problem
from trainer.commands.words import is_for_hydra, parse_words
from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.runs.parsing import NAMED_BY_USERS

Values = dict[str, Any]


@dataclass(frozen=True)
class Composed:
    """What the words of one job stand for.

    ``values``: of the words that are right. ``choices``: the option of each group. ``problems``: a
    sentence for each word that is malformed or unknown, so that the values can be checked before
    all problems are reported together. ``words``: the overrides. ``files``: what they choose
    from. ``flags``, ``verbatim``: see :class:`trainer.commands.command.Command`, those given.
    """

    values: Values
    choices: dict[str, str]
    problems: tuple[Problem, ...] = ()
    words: tuple[str, ...] = ()
    files: ConfigFiles = field(default_factory=ConfigFiles)
    flags: tuple[str, ...] = ()
    verbatim: tuple[str, ...] = ()

    def without_kind(self, group: str) -> tuple[Values, Any]:
        """The values without the key ``kind`` of a group, and what it says (None: nothing)."""
        inside = self.values.get(group)
        if not isinstance(inside, dict):
            return self.values, None
        rest = {key: value for key, value in inside.items() if key != "kind"}
        return {**self.values, group: rest}, inside.get("kind")

    @staticmethod
    def from_hydra(config: DictConfig) -> Composed:
        """The configuration that Hydra hands to a job."""
        job = HydraConfig.get()
        return Composed(_plain(config), dict(job.runtime.choices), (), tuple(job.overrides.task))


def compose_words(
    words: Sequence[str],
    root: str = "config",
    files: ConfigFiles | None = None,
    found: Sequence[Problem] = (),
) -> Composed:
    """What overrides such as ``+experiment=drope_demo data.files=[a.txt]`` stand for.

    ``root``: the file of ``conf/`` that the command starts from. ``found``: problems already known.

    Raises:
        UserError: they cannot be composed at all; with every problem found so far.
    """
    files = files or ConfigFiles()
    defaults = files.default_groups(root)
    experiments = files.options("experiment")
    overrides, malformed = parse_words(plain_groups(words, defaults), experiments)
    problems = [*found, *malformed]
    chosen, others = _sorted(overrides, defaults, files, problems)
    lines = [*chosen.values()]
    config = compose_with_hydra(root, lines, files, problems)
    keys: list[Override] = []
    base = OmegaConf.to_container(config)
    for override in others:
        if problem := key_problem(override, base):
            problems.append(problem)
        else:
            keys.append(override)
    _apply(keys, config, problems)
    for override in keys:  # which Hydra has merged with what was there
        if override.key_or_group in NAMED_BY_USERS and override.value() == {}:
            config[override.key_or_group] = {}
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    values = _plain(config, problems, files, choices)
    return Composed(values, choices, tuple(problems), tuple(words), files)


def _sorted(
    overrides: Sequence[Override],
    defaults: dict[str, str],
    files: ConfigFiles,
    problems: list[Problem],
) -> tuple[dict[str, str], list[Override]]:
    """The words that choose an option, by their groups, and the others.

    ``problems`` gets a sentence for each that is wrong. Where an option has to be chosen and none
    is, any stands for it, so that the rest can be checked.
    """
    chosen: dict[str, str] = {}
    wanted: dict[str, list[str]] = {}
    others, swept = [], set()
    groups = files.groups()
    for override in overrides:
        group, word = override.key_or_group, str(override.input_line)
        if override.is_sweep_override():
            key = override.get_key_element()
            instead = "choose one" if group in groups else f"write {key}=[...] for a list"
            problems.append(
                Problem(word, f"several values; {instead}, or --multirun for a job with each.")
            )
            swept.add(group)
        elif is_for_hydra(override):
            problems.append(Problem(word, "Hydra's own settings need --multirun."))
        elif group not in groups or isinstance(override.value(), dict):
            others.append(override)
        else:
            wanted.setdefault(group, []).append(str(override.value()))
            faults = _group_problems(override, defaults, files)
            problems += faults
            chosen |= {} if faults else {group: word}
    for group, options in wanted.items():
        if len(options) > 1:
            problems.append(Problem(group, f"expected one, got {', '.join(options)}."))
    for group in (g for g, default in defaults.items() if default == REQUIRED and g not in chosen):
        names = files.options(group)
        if group not in wanted and group not in swept:
            problems.append(Problem(group, f"give +{group}=NAME, one of {', '.join(names)}."))
        chosen[group] = f"{group}={names[0]}"
    return chosen, others


def plain_groups(words: Sequence[str], defaults: Container[str]) -> list[str]:
    """The words, ``+evaluation=`` and its like without the plus where the group has a default."""
    bare = [word.lstrip("+") for word in words]
    return [
        without if without.partition("=")[0] in defaults else word
        for word, without in zip(words, bare, strict=True)
    ]


def _group_problems(
    override: Override, defaults: dict[str, str], files: ConfigFiles
) -> list[Problem]:
    """What is wrong with ``experiment=x`` or ``model=x``."""
    group, option = override.key_or_group, str(override.value())
    if option not in files.options(group):
        near = did_you_mean(option, files.options(group))
        there = (
            "no group is null" if override.value() is None else f"there is no {group} {option!r}"
        )
        return [Problem(group, f"{there}.", near)]
    try:
        path = files.defaults_chain((group, option))[-1]
    except UserError as error:
        return list(error.problems)
    if group in defaults or (is_global(path) and override.is_add()):
        return []
    if is_global(path):
        return [Problem(group, f"write +{group}={option} (with a plus, it adds to the defaults).")]
    if path.is_relative_to(config_directory()):
        return [Problem(group, "unknown group here.", did_you_mean(group, defaults))]
    return [
        Problem(
            str(path),
            "expected '# @package _global_' as its first line, since its keys are those of the "
            "whole configuration.",
        )
    ]


def compose_with_hydra(
    root: str, lines: list[str], files: ConfigFiles, problems: Sequence[Problem] = ()
) -> DictConfig:
    """What Hydra makes of overrides, settings of its own among them, such as its launcher.

    Raises:
        UserError: it cannot compose them; with the ``problems`` already known.
    """
    more = []
    if files.own is not None:
        quoted = f"file://{files.own.resolve()}".replace("\\", "\\\\").replace("'", "\\'")
        more = [f"hydra.searchpath=['{quoted}']"]
    try:
        with initialize_config_dir(version_base=None, config_dir=str(config_directory())):
            return compose(root, overrides=[*lines, *more], return_hydra_config=True)
    except RecursionError as error:
        raise UserError(*problems, Problem("", "A defaults list leads back to itself.")) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        said = str(error) or str(error.__cause__)
        raise UserError(*problems, Problem("", " ".join(said.split()))) from error


def _apply(keys: list[Override], config: DictConfig, problems: Sequence[Problem]) -> None:
    """Set keys in a composed configuration as Hydra would have, had it been given them then.

    Raises:
        UserError: it cannot; with the ``problems`` already known.
    """
    try:
        ConfigLoaderImpl._apply_overrides_to_config(keys, config)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = error.__cause__ or error
        key = str(getattr(cause, "full_key", None) or "")
        if isinstance(cause, ConfigTypeError):
            message = f"expected keys with values, as in {key}={{a: 1}}, got a list."
        elif isinstance(cause, ConfigAttributeError | ConfigKeyError):
            message = "not set yet; a plus before its word adds it."
        else:
            message = " ".join(str(cause).split())
        raise UserError(*problems, Problem(key, message)) from error


def _plain(
    config: DictConfig,
    problems: Sequence[Problem] = (),
    files: ConfigFiles | None = None,
    choices: dict[str, str] | None = None,
) -> Values:
    """The values, with everything resolved."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        message = str(error).splitlines()[0]
        places = [place for place in (choices or {}).items() if files and files.find(place)]
        paths = [
            path for place in places for path in (files or ConfigFiles()).defaults_chain(place)
        ]
        last = key.rsplit(".", maxsplit=1)[-1].split("[", maxsplit=1)[0]
        where = next((f" ({p})" for p in reversed(paths) if _unresolved(read_file(p), last)), "")
        if any("${hydra:" in value for value in _values_of(OmegaConf.to_container(config), last)):
            message = "${hydra:...} has no value here; name a key, such as ${positional.layers[0]}"
        raise UserError(*problems, Problem(key, f"{message}{where}.")) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _unresolved(tree: Any, key: str) -> bool:
    """Whether a key of that name has a value yet to be resolved, at any depth."""
    return any("${" in value or value == "???" for value in _values_of(tree, key))


def _values_of(tree: Any, key: str) -> Iterator[str]:
    """Yield the values of all keys of that name, at any depth, as text."""
    if isinstance(tree, dict):
        if key in tree:
            yield str(tree[key])
        tree = [*tree.values()]
    for value in tree if isinstance(tree, list) else ():
        yield from _values_of(value, key)
