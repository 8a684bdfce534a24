"""Compose the words of a command line to plain values, with Hydra; find every wrong word
together."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    OmegaConfBaseException,
)

from trainer.commands.hydra.files import (
    REQUIRED,
    ConfigFiles,
    config_directory,
    is_global,
    read_file,
)
from trainer.common.errors import Problem, UserError, collecting, did_you_mean, nearest
from trainer.common.fields import configuration, validated, value_at
from trainer.common.plugins import load_plugins
from trainer.positional.config import PositionalConfig
from trainer.positional.encodings import ENCODINGS, parameters
from trainer.runs.parsing import NAMED_BY_USERS

T = TypeVar("T", bound=Any)
Values = dict[str, Any]


@dataclass(frozen=True)
class Composed:
    """Configuration that the words of one job stand for."""

    values: Values
    """Plain values, from the words that are right."""
    choices: dict[str, str]
    """The chosen option of each group."""
    problems: tuple[Problem, ...] = ()
    """Problems of malformed and unknown words, to report together with those of the values."""
    words: tuple[str, ...] = ()
    """The overrides."""
    files: ConfigFiles = field(default_factory=ConfigFiles)
    """Files to choose options from."""
    flags: tuple[str, ...] = ()
    """The flags among the words that only this command has."""
    verbatim: tuple[str, ...] = ()
    """Values of the command's verbatim key."""
    overruled: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    """Keys of each option among the words that a file such as an experiment sets otherwise: the
    file's value and the option's."""

    @property
    def named_keys(self) -> tuple[str, ...]:
        """Keys and groups that the words name, each once."""
        keys = (word.lstrip("+~").partition("=")[0] for word in self.words)
        return tuple(dict.fromkeys(key.partition("@")[0] for key in keys))

    def value(self, key: str) -> Any:
        """Return the value of a dotted key, or None if there is none."""
        return value_at(self.values, key)

    def without_kind(self, group: str) -> tuple[Values, Any]:
        """Return the values without the key ``kind`` of a group, and its value or None."""
        inside = self.values.get(group)
        if not isinstance(inside, dict):
            return self.values, None
        others = {key: value for key, value in inside.items() if key != "kind"}
        return {**self.values, group: others}, inside.get("kind")

    def with_verbatim(self, key: str) -> Values:
        """Return the values with the verbatim ones appended to the list under ``key``."""
        listed = self.values[key]
        return self.values | ({key: [*listed, *self.verbatim]} if isinstance(listed, list) else {})

    def split(self, schema: type[T]) -> tuple[T, list[Problem], Composed]:
        """Return the command's own keys as ``schema``, their problems, and the run's keys."""
        names = [field.name for field in fields(schema)]
        own_keys, problems = validated(schema, {name: self.values[name] for name in names})
        values = {key: value for key, value in self.values.items() if key not in names}
        return own_keys, problems, replace(self, values=values)

    @staticmethod
    def from_hydra(config: DictConfig) -> Composed:
        """Return the configuration that Hydra hands to a job."""
        job = HydraConfig.get()
        choices = dict(job.runtime.choices)
        values = _plain(config, choices=choices)
        return Composed(values, choices, (), tuple(job.overrides.task))


def compose_words(
    words: Sequence[str],
    root: str = "config",
    files: ConfigFiles | None = None,
    known: Sequence[Problem] = (),
    verbatim: str = "",
) -> Composed:
    """Compose overrides such as ``+experiment=drope_demo data.files=[a.txt]``.

    ``root``: the file of ``conf/`` that the command starts from. ``known``: problems to report too.
    ``verbatim``: the command's key that is not among the words, but may be meant by one.

    Raises:
        UserError: they cannot be composed at all; with every problem found so far.
    """
    files = files or ConfigFiles()
    defaults = files.default_groups(root)
    experiments = files.options("experiment")
    overrides, malformed = parse_words(plain_groups(words, defaults), experiments)
    problems = [*known, *malformed]
    chosen, others = _sorted(overrides, defaults, files, problems)
    lines = [*chosen.values()]
    config = compose_with_hydra(root, lines, files, problems)
    keys: list[Override] = []
    base: Any = OmegaConf.to_container(config)
    base |= {verbatim: None} if verbatim else {}
    for override in others:
        if problem := key_problem(override, base):
            problems.append(problem)
        else:
            keys.append(override)
    _apply(keys, config, problems)
    for override in keys:  # Hydra has merged them with the defaults
        if override.key_or_group in NAMED_BY_USERS and override.value() == {}:
            config[override.key_or_group] = {}
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    values = _plain(config, problems, files, choices)
    named = [override.key_or_group for override in others]
    overruled = _overruled(root, chosen, named, defaults, files)
    return Composed(values, choices, tuple(problems), tuple(words), files, overruled=overruled)


def _overruled(
    root: str,
    chosen: dict[str, str],
    named_keys: Sequence[str],
    defaults: dict[str, str],
    files: ConfigFiles,
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return the value of :attr:`Composed.overruled`.

    Only keys that an option's own files set count: what they leave to the group's first file, whose
    keys are all of the group's, is an experiment's to set. An option that the experiment chooses
    itself is overruled on purpose, and a key among the words is the user's.

    ``chosen``: words that choose an option, by their groups. ``named_keys``: keys of other words.
    """
    places = {group: (group, word.partition("=")[2]) for group, word in chosen.items()}
    above = [
        places[group] for group in chosen if group not in defaults and files.find(places[group])
    ]
    if not above:
        return {}
    paths = [path for place in above for path in files.defaults_chain(place) if is_global(path)]
    set_above = _leaves(*map(read_file, paths))
    overruled: dict[str, dict[str, tuple[Any, Any]]] = {}
    for group, place in places.items():
        if group not in defaults or files.find(place) is None:
            continue
        first, *others = files.defaults_chain(place, inherited=True)
        values = _leaves(*({group: read_file(path)} for path in others or [first]))
        differing = {
            key: (set_above[key], value)
            for key, value in values.items()
            if set_above.get(key, value) != value
            and not any(f"{key}.".startswith(f"{name}.") for name in named_keys)
        }
        if differing:
            overruled[chosen[group]] = differing
    if not overruled:
        return {}
    remaining = [word for word in chosen.values() if word not in overruled]
    choices = compose_with_hydra(root, remaining, files).hydra.runtime.choices
    return {
        word: keys
        for word, keys in overruled.items()
        if choices[word.partition("=")[0]] != word.partition("=")[2]
    }


def _leaves(*trees: Values) -> Values:
    """Return the values of nested groups by their dotted keys; later trees replace values."""
    leaves: Values = {}
    for tree in trees:
        for name, value in tree.items():
            if name == "defaults":
                continue
            below = _leaves(value) if isinstance(value, dict) and value else {"": value}
            leaves |= {f"{name}.{key}".rstrip("."): value for key, value in below.items()}
    return leaves


@configuration
class Plugins:
    """The key whose files are run before the other words are read."""

    plugins: list[str] = field(default_factory=list)
    """Python files of the user."""


def run_plugins(words: Sequence[str]) -> list[Problem]:
    """Run the plugins among the words; return their problems."""
    overrides, _ = parse_words([word.lstrip("+") for word in words])
    problems: list[Problem] = []
    for override in overrides:
        if override.key_or_group == "plugins":
            named, wrong = validated(Plugins, {"plugins": override.value()})
            problems += wrong
            with collecting(problems):
                load_plugins(named.plugins)
    return problems


def plugin_encodings(
    words: Sequence[str], files: ConfigFiles, problems: list[Problem]
) -> tuple[str, ...]:
    """Return the encodings that the plugins among the words register, as options of ``positional``.

    Run the plugins only if the words choose an option of ``positional``; add their problems to
    ``problems``.
    """
    if not any(word.lstrip("+").startswith("positional=") for word in words):
        return ()
    problems += run_plugins(words)
    registered = tuple(sorted({*ENCODINGS} - {*files.options("positional")}))
    for name in registered:
        values = PositionalConfig(layers=[name], encodings={name: parameters(name)})
        ConfigStore.instance().store(f"{name}.yaml", asdict(values), group="positional")
    return registered


def _sorted(
    overrides: Sequence[Override],
    defaults: dict[str, str],
    files: ConfigFiles,
    problems: list[Problem],
) -> tuple[dict[str, str], list[Override]]:
    """Return the words that choose an option, by their groups, and the other words.

    Add to ``problems`` each word that is wrong. A group without a choice that needs one gets any
    option, so that the other words can be checked.
    """
    chosen: dict[str, str] = {}
    wanted: dict[str, list[str]] = {}
    others, swept = [], set()
    groups = files.groups()
    for override in overrides:
        group, word = override.key_or_group, str(override.input_line)
        if override.is_sweep_override():
            key = override.get_key_element()
            instead = "choose one" if group in groups else f"write '{key}=[...]' for a list"
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
    """Return the words; drop the plus of ``+evaluation=`` and its like if the group has a
    default."""
    bare = [word.lstrip("+") for word in words]
    return [
        without if without.partition("=")[0] in defaults else word
        for word, without in zip(words, bare, strict=True)
    ]


def _group_problems(
    override: Override, defaults: dict[str, str], files: ConfigFiles
) -> list[Problem]:
    """Return the problems of a choice such as ``experiment=x`` or ``model=x``."""
    group, option = override.key_or_group, str(override.value())
    if option not in files.options(group):
        near = did_you_mean(option, files.options(group))
        there = (
            "no group is null" if override.value() is None else f"there is no {group} {option!r}"
        )
        return [Problem(group, f"{there}.", near)]
    is_of_plugin = files.find((group, option)) is None
    try:
        path = Path() if is_of_plugin else files.defaults_chain((group, option))[-1]
    except UserError as error:
        return list(error.problems)
    if is_of_plugin or group in defaults or (is_global(path) and override.is_add()):
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
    """Compose overrides with Hydra, including its own settings such as its launcher.

    Raises:
        UserError: it cannot compose them; with the ``problems`` already known.
    """
    more = []
    if (directory := files.user_directory) is not None:
        quoted = f"file://{directory.resolve()}".replace("\\", "\\\\").replace("'", "\\'")
        more = [f"hydra.searchpath=['{quoted}']"]
    try:
        with initialize_config_dir(version_base=None, config_dir=str(config_directory())):
            return compose(root, overrides=[*lines, *more], return_hydra_config=True)
    except RecursionError as error:
        raise UserError(*problems, Problem("", "A defaults list leads back to itself.")) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        text = str(error) or str(error.__cause__)
        raise UserError(*problems, Problem("", " ".join(text.split()))) from error


def _apply(keys: list[Override], config: DictConfig, problems: Sequence[Problem]) -> None:
    """Set keys in a composed configuration, as Hydra does when it composes.

    Raises:
        UserError: a key cannot be set; with the ``problems`` already known.
    """
    try:
        ConfigLoaderImpl._apply_overrides_to_config(keys, config)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = error.__cause__ or error
        key = str(getattr(cause, "full_key", None) or "")
        if isinstance(cause, ConfigTypeError):
            message = f"expected keys with values, as in '{key}={{a: 1}}', got a list."
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
    """Return the values with every interpolation resolved.

    ``${GROUP.name}`` is the chosen option of a group that has no key ``name``.
    """
    config = config.copy()
    unresolved: Any = OmegaConf.to_container(config)
    named = [
        group
        for group in choices or {}
        if isinstance(inside := unresolved.get(group), dict) and "name" not in inside
    ]
    with open_dict(config):
        for group in named:
            config[group].name = (choices or {})[group]
    if whole := [*_whole_groups(unresolved)]:
        raise UserError(*problems, *whole)
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
            message = "${hydra:...} has no value here; name a key, such as ${positional.name}"
        raise UserError(*problems, Problem(key, f"{message}{where}.")) from error
    assert isinstance(values, dict)
    for group in named:
        del values[group]["name"]
    return {str(key): value for key, value in values.items()}


def _whole_groups(values: Values) -> Iterator[Problem]:
    """Yield a problem for each name or place of a run that holds a whole group as text.

    ``values``: with interpolations unresolved.
    """
    for key in ("name", "label", "run_dir", "to", "output"):
        for place in re.findall(r"\$\{([\w.]+)\}", str(values.get(key))):
            inside = value_at(values, place)
            if not isinstance(inside, dict | list):
                continue
            kind, suffix = (
                ("a group of keys", ".name") if isinstance(inside, dict) else ("a list", "[0]")
            )
            word = f"{key}={values[key].replace(f'${{{place}}}', f'${{{place}{suffix}}}')}"
            yield Problem(key, f"${{{place}}} is {kind}; write {shlex.quote(word)}.")


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


def parse_words(
    words: Sequence[str], experiments: Collection[str] = ()
) -> tuple[list[Override], list[Problem]]:
    """Return the overrides, and a problem for each malformed word.

    A word that only lacks quotes is among the overrides too, so that its key is not reported as
    missing.
    """
    parser = OverridesParser.create()
    overrides, problems = [], []
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            problems.append(_no_override(word, experiments))
            with suppress(HydraException):
                meant = _quoted(word)
                overrides.append(parser.parse_override(meant))
                problems[-1] = Problem(
                    repr(word),
                    f"a value with such characters stands in quotes: {shlex.quote(meant)}.",
                )
        else:
            if override.key_or_group:
                overrides.append(override)
            else:
                problems.append(_no_override(word, experiments))
    return overrides, problems


def _no_override(word: str, experiments: Collection[str]) -> Problem:
    if (experiment := nearest(word, experiments)) is not None:
        return Problem(repr(word), f"an experiment is named by +experiment={experiment}.")
    if word.find("=") > 0:
        return Problem(repr(word), "not readable as key=value; check brackets, quotes and blanks.")
    quotes = "" if "=" in word else "; a value with blanks needs quotes, as in 'label=two words'"
    return Problem(repr(word), f"expected key=value, for instance seed=1{quotes}.")


def _quoted(word: str) -> str:
    """Return the word with its value in quotes, or unchanged if more is wrong with it."""
    key, equals, value = word.partition("=")
    closed = all(word.count(a) == word.count(b) for a, b in ("[]", "{}", "()"))
    if not equals or not value or not closed:
        return word
    if value.startswith("[") and value.endswith("]"):
        value = ",".join(f'"{item.strip()}"' for item in value[1:-1].split(","))
        value = f"[{value}]"
    else:
        value = f'"{value}"'
    return f"{key}={value}"


def is_for_hydra(override: Override) -> bool:
    """Whether it sets something of Hydra itself, such as its launcher."""
    return override.key_or_group.partition(".")[0].partition("/")[0] == "hydra"


def expand(overrides: Sequence[Override], files: ConfigFiles) -> list[list[str]]:
    """Return the words of every job: one for each choice among ``seed=0,1`` and its like.

    A sweep without listed choices, such as ``interval(0,1)``, is left to Hydra's sweeper.

    Raises:
        UserError: no option matches a ``glob(...)``.
    """
    choices: list[list[str]] = []
    for override in overrides:
        key, value = override.get_key_element(), override.value()
        if isinstance(value, Glob):
            options = value.filter(files.options(override.key_or_group))
            if not options:
                near = did_you_mean("", files.options(override.key_or_group))
                raise UserError.at(str(override.input_line), "no option matches.", near)
            choices.append([f"{key}={option}" for option in options])
        elif override.is_discrete_sweep():
            choices.append([f"{key}={choice}" for choice in override.sweep_string_iterator()])
        elif not override.is_sweep_override():
            choices.append([str(override.input_line)])
    return [list(job) for job in itertools.product(*choices)]


FREE_FORM = (
    "positional.encodings",
    "positional.heads",
    "controls",
    "phases",
    "callbacks",
    "data.mixture",
    "data.arguments",
    "evaluation.metadata",
)
"""Groups whose keys the user chooses; new ones are added with a plus."""

CLOSE = 0.69
"""Least likeness of a key that is suggested from another group."""
MOST = 3
"""Most keys that one suggestion names."""


def _below(key: str, tree: dict[str, Any]) -> Iterator[str]:
    """Yield the dotted places of a key in the groups of a tree, at any depth."""
    for name, below in tree.items():
        if isinstance(below, dict) and name != "hydra":
            places = [key] if key in below else _below(key, below)
            yield from (f"{name}.{place}" for place in places)


def _names(tree: dict[str, Any]) -> Iterator[str]:
    """Yield all keys of a tree, at any depth."""
    for name, below in tree.items():
        if name != "hydra":
            yield str(name)
            yield from _names(below) if isinstance(below, dict) else ()


def _nearest(key: str, where: str, place: dict[str, Any], base: dict[str, Any]) -> str:
    """Suggest a key in place of one that ``place`` does not have: a similar one there, one of
    the same name elsewhere, or a similar one elsewhere; otherwise list all keys of ``place``."""
    siblings = [str(name) for name in place if name != "hydra"]
    if not get_close_matches(key, siblings, 1, CLOSE):
        for word in get_close_matches(key, [*_names(base)], 1, CLOSE):
            below = [f"{where}.{path}" if where else path for path in _below(word, place)]
            paths = below or ([word] if word in base else [*_below(word, base)])
            if len(paths) <= MOST:
                return f"Did you mean {' or '.join(paths)}?"
    return did_you_mean(key, siblings)


def key_problem(override: Override, base: Any) -> Problem | None:
    """Return the problem of the key in ``a.b.c=value``, which must exist or lie in a free-form
    group."""
    place = base
    path = override.key_or_group.split(".")
    for depth, key in enumerate(path):
        if not isinstance(place, dict):
            group, inner = ".".join(path[:depth]), ".".join(path[depth:])
            value = str(override.input_line).partition("=")[2]
            word = shlex.quote(f"{group}={{{inner}: {value}}}")
            kind = f"null; write {word}" if place is None else "a value, not a group"
            return Problem(override.key_or_group, f"{group} is {kind}.")
        if key not in place:
            where = ".".join(path[:depth])
            free = where in FREE_FORM or where.startswith(tuple(f"{f}." for f in FREE_FORM))
            # Free-form groups often hold names that other groups have too: search only there.
            near = did_you_mean(key, place) if free else _nearest(key, where, place, base)
            if free and (override.is_add() or override.is_force_add()):
                return None
            if free and nearest(key, map(str, place)) is None:
                word = shlex.quote(f"+{override.input_line}")
                return Problem(override.key_or_group, f"not set yet; write {word}")
            prefix = f"{where}." if where else ""
            return Problem(f"{prefix}{key}", "unknown key.", near)
        place = place[key]
    is_merged = isinstance(place, dict) and isinstance(override.value(), dict)
    if not override.is_add() or is_merged:
        return None
    word = shlex.quote(str(override.input_line).lstrip("+"))
    return Problem(override.key_or_group, f"it has a value already; write {word} without the plus.")
