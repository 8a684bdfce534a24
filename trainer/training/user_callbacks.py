"""A user's own Lightning callbacks, named by ``callbacks`` in a configuration, and their states.

Only training imports and constructs them; readers of checkpoints treat their states as plain
values.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.common.errors import Problem, UserError, collecting, did_you_mean

TARGET = "_target_"
"""The key that names the class, as Hydra has it."""
REPLACED: Mapping[type, str] = {
    Checkpoint: "checkpoints are written by the run itself (trainer.checkpoint_every)",
    ProgressBar: "the run has its own progress bar",
}
"""Lightning's callbacks that a run cannot have, and why."""
MOST_ELEMENTS = 10_000
"""Largest tensor in a callback's state; ``state.json`` is text."""


def callback_problems(configured: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Check configured callbacks by importing their classes; return a problem for each mistake."""
    problems: list[Problem] = []
    for name, values in configured.items():
        with collecting(problems):
            _checked(f"callbacks.{name}", values)
    return problems


def make_callbacks(configured: Mapping[str, Mapping[str, Any]]) -> list[L.Callback]:
    """Create each callback that is configured: the class ``_target_`` with the other keys.

    Raises:
        UserError: a class is missing, is no callback or takes other arguments; two callbacks have
            the same state key. Names every problem.
    """
    made: dict[str, L.Callback] = {}
    problems: list[Problem] = []
    for name, values in configured.items():
        with collecting(problems):
            made[name] = _make(f"callbacks.{name}", values)
    seen: dict[str, str] = {}
    for name, callback in made.items():
        if not _has_state(callback):
            continue
        if (key := callback.state_key) in seen:
            problems.append(
                Problem(
                    f"callbacks.{name}",
                    f"its state has the same key {key!r} as {seen[key]}; give the class a property "
                    "state_key that tells them apart.",
                )
            )
        seen[key] = f"callbacks.{name}"
    if problems:
        raise UserError(*problems)
    return list(made.values())


def _checked(where: str, values: Mapping[str, Any]) -> tuple[type[L.Callback], dict[str, Any]]:
    """Import the class and check its arguments."""
    target = values.get(TARGET)
    kind = _find_class(f"{where}.{TARGET}", target)
    arguments = {str(key): value for key, value in values.items() if key != TARGET}
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(kind).parameters) or "no arguments"
        raise UserError.at(where, f"{target}: {error}; it takes {takes}.") from error
    return kind, arguments


def _make(where: str, values: Mapping[str, Any]) -> L.Callback:
    kind, arguments = _checked(where, values)
    try:
        return kind(**arguments)
    except Exception as error:  # a user's code may raise anything
        raise UserError.at(where, f"{values[TARGET]} could not be made: {error!r}.") from error


def _find_class(where: str, target: Any) -> type[L.Callback]:
    module_name, _, name = str(target).rpartition(".")
    if not isinstance(target, str) or not module_name:
        raise UserError.at(where, f"expected a class as package.module.Class, got {target!r}.")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UserError.at(
                where,
                f"there is no module {missing!r}; modules are looked for in the current directory "
                "(python -m trainer) and on PYTHONPATH.",
            ) from error
        raise UserError.at(where, f"{module_name!r} failed to import: {error!r}.") from error
    kind = getattr(module, name, None)
    if kind is None:
        callbacks = [key for key, value in vars(module).items() if _is_callback(value)]
        raise UserError.at(
            where, f"module {module_name!r} has no {name!r}.", did_you_mean(name, callbacks)
        )
    if not _is_callback(kind):
        raise UserError.at(where, f"{target!r} is no subclass of lightning.Callback.")
    for replaced, reason in REPLACED.items():
        if issubclass(kind, replaced):
            raise UserError.at(where, f"{target!r} has no place here: {reason}.")
    return kind


def _is_callback(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, L.Callback)


def _has_state(callback: L.Callback) -> bool:
    return type(callback).state_dict is not L.Callback.state_dict


def states_of(callbacks: Sequence[L.Callback]) -> dict[str, Any]:
    """Return the states by ``state_key`` as JSON values; all ranks call this together.

    Raises:
        UserError: a state contains what JSON cannot hold.
    """
    return {
        callback.state_key: _encoded(callback.state_dict(), f"callbacks: {callback.state_key}")
        for callback in callbacks
        if _has_state(callback)
    }


def load_states(callbacks: Sequence[L.Callback], states: Mapping[str, Any]) -> list[str]:
    """Restore the state of each callback; return the keys of states without a callback."""
    for callback in callbacks:
        if callback.state_key in states:
            callback.load_state_dict(_decoded(states[callback.state_key]))
    return sorted(states.keys() - {callback.state_key for callback in callbacks})


def _encoded(value: Any, where: str) -> Any:
    """Return a copy with each tensor as its values and dtype."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _encoded(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item, where) for item in value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor) and value.numel() <= MOST_ELEMENTS:
        return {"_tensor_": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError.at(
        where,
        f"its state_dict holds {_described(value)}; expected numbers, strings, lists, "
        f"dictionaries by name, and tensors of at most {MOST_ELEMENTS:,} elements.",
    )


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a dictionary with keys that are no strings"
    size = f" of {value.numel():,} elements" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{size}"


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"_tensor_", "dtype"}:
        return torch.tensor(value["_tensor_"], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value
