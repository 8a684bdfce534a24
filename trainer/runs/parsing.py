"""From plain values to a checked configuration; all problems are found before any is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, singledispatch
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from trainer.errors import UserError, did_you_mean
from trainer.formats import adapter
from trainer.plugins import load_plugins
from trainer.runs.branches import branch_problems
from trainer.runs.config import NAME, RunConfig
from trainer.runs.numbers import number_problems
from trainer.runs.phase_problems import phase_problems
from trainer.runs.phases import with_lengths

NAMED_BY_USERS = "controls", "callbacks", "phases"
"""Groups whose keys users choose."""
S = TypeVar("S")


def _unknown_keys(schema: type, values: Any, path: str) -> list[str]:
    """Keys that the dataclass does not have, at any depth, groups that are no mappings, and words
    that are meant to be none."""
    if not isinstance(values, dict):
        return [f"{path}: expected a group of keys, got {values!r}."]
    hints = _hints(schema)
    found = []
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            found.append(f"{where}: unknown key.{did_you_mean(str(key), hints)}")
        elif value == "None" and type(None) in get_args(hints[key]) and key != "prompt":
            found.append(where + OF_PYTHON)
        elif dataclasses.is_dataclass(hints[key]):
            found += _unknown_keys(hints[key], value, where)
        elif get_origin(hints[key]) is dict:  # groups by name
            inner = get_args(hints[key])[1]
            if dataclasses.is_dataclass(inner) and isinstance(value, dict):
                for name, group in value.items():
                    found += _unknown_keys(inner, group, f"{where}.{name}")
        else:  # a group that may be missing, or a list of groups
            groups = [item for item in _listed(value) if isinstance(item, dict)]
            for inner in filter(dataclasses.is_dataclass, get_args(hints[key])):
                found += [p for group in groups for p in _unknown_keys(inner, group, where)]
    return found


OF_PYTHON = ": got 'None', which is Python's word; nothing is written null."
_hints = cache(get_type_hints)
"""The types of a dataclass's fields, looked up once."""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _type_problem(error: Any) -> str:
    """One sentence for one of pydantic's findings."""
    expected = error["msg"][0].lower() + error["msg"][1:]
    hint = ""
    if error["type"] == "literal_error":
        hint = did_you_mean(str(error["input"]), _quoted(error["ctx"]["expected"]))
    elif error["type"] == "list_type" and isinstance(error["input"], str | int | float):
        hint = f" Of this one alone it is {_place(error)}=[{error['input']}]."
    return f"{_place(error)}: got {error['input']!r}; {expected}.{hint}"


def _place(error: Any) -> str:
    """The key that one of pydantic's findings is about."""
    return ".".join(str(part) for part in error["loc"] if str(part) not in _UNION_ARMS)


_UNION_ARMS = {"int", "float", "str", "bool", "list[int]"}


def _quoted(expected: str) -> list[str]:
    return [word for i, word in enumerate(expected.split("'")) if i % 2]


def validated(schema: type[S], values: dict[str, Any]) -> tuple[S, list[str]]:
    """``values`` as the dataclass ``schema``, and a sentence for every unknown key and wrong type.

    Keys of a wrong type have their defaults in the result, so that the rest can be checked too.
    """
    problems = _unknown_keys(schema, values, "")
    meant = [p.removesuffix(OF_PYTHON).split(".") for p in problems if p.endswith(OF_PYTHON)]
    values = _without(values, meant)
    try:
        found = adapter(schema).validate_python(values)
    except ValidationError as error:
        # One for each place: of a union each arm has its say, of a group the keys have had theirs.
        found_at = {_place(e): _type_problem(e) for e in error.errors()}
        problems += [
            text
            for where, text in found_at.items()
            if not any(p.startswith(f"{where}: ") for p in problems)
        ]
        values = _without(values, [e["loc"] for e in error.errors()])
        try:
            found = adapter(schema).validate_python(values)
        except ValidationError as again:  # of a group where a value belongs
            wrong = {e["loc"][0] for e in again.errors()}
            values = {key: value for key, value in values.items() if key not in wrong}
            found = adapter(schema).validate_python(values)
    return found, problems


class Schema(Protocol):
    """A dataclass that knows what is impossible in it."""

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        ...


T = TypeVar("T", bound=Schema)


def parse(schema: type[T], values: dict[str, Any], found: Sequence[str] = ()) -> T:
    """Plain values as a checked dataclass; ``found`` are problems already known.

    ``plugins`` are run first, so that what they add can be named. A run's configuration gets what
    follows from it: steps from tokens, the shape of pretrained weights.

    Raises:
        UserError: with every problem: unknown keys, wrong types, impossible combinations.
    """
    # `controls=null` on a command line leaves an experiment's out.
    empty = {key: {} for key in NAMED_BY_USERS if values.get(key, ...) is None}
    values = values | empty
    config, problems = validated(schema, values)
    try:
        load_plugins(getattr(config, "plugins", ()))
    except UserError as error:
        problems += error.problems
    if numbers := list(number_problems(config)):  # with which the rest would not come to an end
        raise UserError(*found, *problems, *numbers)
    config, impossible = _completed(config, values, [*found, *problems])
    if problems := [*found, *problems, *impossible]:
        raise UserError(*problems)
    return config


@singledispatch
def _completed(config: Any, values: dict[str, Any], known: Sequence[str]) -> tuple[Any, list[str]]:
    """The configuration with what follows from it, and what is impossible in it."""
    return config, config.problems()


@_completed.register
def _(config: RunConfig, values: dict[str, Any], known: Sequence[str]) -> tuple[Any, list[str]]:
    config = with_lengths(config)
    try:
        config = with_trained_shape(config)
    except UserError as error:
        return config, list(error.problems)
    problems = config.problems() + phase_problems(config)
    values = values | {"controls": config.controls}  # without what was found wrong already
    for name, changes in config.controls.items():
        problems += _control_problems(values, config, name, changes, [*known, *problems])
    return config, problems


def parse_without_weights(values: dict[str, Any], found: Sequence[str] = ()) -> RunConfig:
    """As :func:`parse`, with the shape that ``values`` give and not that of published weights."""
    config, problems = validated(RunConfig, values)
    problems += number_problems(config)
    config = with_lengths(config)
    if problems := [*found, *problems, *config.problems(), *phase_problems(config)]:
        raise UserError(*problems)
    return config


def with_trained_shape(config: RunConfig) -> RunConfig:
    """The configuration with the shape of the model whose weights the run begins with, and the
    encodings and the name of the run that these are from.

    Raises:
        UserError: there is no such model, its files are damaged, or it cannot have what is asked.
    """
    given = config.model
    if not given.is_trained:
        return config
    from trainer.runs.starting_weights import encodings_of, normalizes, starting_weights

    start = starting_weights(given)
    assert start is not None
    shape, normed = start.config, normalizes(start.layout)
    if not normed and given.qk_norm.when == "always":
        raise UserError(
            "model.qk_norm.when: 'always', but the weights were trained without; choose 'never' or "
            "'after_drop'."
        )
    shape = replace(
        shape,
        qk_norm=replace(shape.qk_norm, when="always") if normed else given.qk_norm,
        attention_backend=given.attention_backend,
        from_pretrained=given.from_pretrained,
        from_run=given.from_run,
    )
    if given.from_run is not None:
        positional, called = encodings_of(given.from_run)
        config = replace(config, positional=positional, label=config.label or called)
    return replace(config, model=shape)


def _without(values: dict[str, Any], locations: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A copy of ``values`` without the keys at ``locations`` (the deepest mapping's key each)."""
    copy = {k: _without(v, []) if isinstance(v, dict) else v for k, v in values.items()}
    for location in locations:
        place = copy
        for key in location:
            if not isinstance(place.get(key), dict):
                place.pop(key, None)
                break
            place = place[key]
    return copy


def _control_problems(
    values: dict[str, Any],
    config: RunConfig,
    name: str,
    changes: dict[str, Any],
    known: list[str],
) -> list[str]:
    if not NAME.fullmatch(name):
        return [
            f"controls: {name!r} names a directory in the run's; expected letters, digits and ._+- "
            "only."
        ]
    branch = changes.get("branch")
    is_step = isinstance(branch, int) and not isinstance(branch, bool)
    if branch not in (None, "drop") and not is_step:
        return [f"controls.{name}.branch: expected 'drop', a step or nothing, got {branch!r}."]
    if branch == "drop" and config.drop_step is None:
        return [f"controls.{name}.branch: the run has no drop to branch from; set drop.at."]
    last = config.trainer.max_steps if config.drop_step is None else config.drop_step
    if is_step and not 1 <= branch <= last:
        return [
            f"controls.{name}.branch: expected a step from 1 to {last}, until which the run is as "
            f"every branch begins, got {branch}."
        ]
    try:
        control = control_config(values, name)
    except UserError as error:
        return [f"controls.{name}: {p}" for p in error.problems if p not in known]
    at = config.drop_step if branch == "drop" else branch
    return [f"controls.{name}.{p}" for p in branch_problems(config, control, at or 0)]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, mappings merged, everything else replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


def control_config(values: dict[str, Any], name: str, weights: bool = True) -> RunConfig:
    """The configuration of a control: the run's, without controls, with the control's changes.

    ``weights``: whether those that it begins with are here; else it has the shape of ``values``.
    The run's label is no part of it: it says what the run is, and the control is something else.
    """
    changes = {k: v for k, v in values["controls"][name].items() if k != "branch"}
    base = {
        **values,
        "label": None,
        "controls": {},
        "run_dir": f"{values['run_dir']}/controls/{name}",
    }
    changed = merged(base, changes)
    return parse(RunConfig, changed) if weights else parse_without_weights(changed)
