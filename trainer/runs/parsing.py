"""Parsing of plain values to a checked configuration; reports all problems together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any, Protocol, TypeVar

from trainer.common.errors import Problem, UserError, collecting, raise_all
from trainer.common.validation import checked
from trainer.evaluation.config import EvaluationConfig
from trainer.plugins import load_plugins
from trainer.runs.config import NAME, RunConfig
from trainer.runs.phase_problems import branch_problems, phase_problems
from trainer.runs.phases import with_lengths
from trainer.runs.trained_shape import ignored_keys, with_trained_shape

NAMED_BY_USERS = "controls", "callbacks", "phases"
"""Groups whose keys users choose."""


class Schema(Protocol):
    """A dataclass that knows what is impossible in it."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        ...


T = TypeVar("T", bound=Schema)


def parse(schema: type[T], values: dict[str, Any], found: Sequence[Problem] = ()) -> T:
    """Plain values as a checked dataclass; ``found`` are problems already known.

    ``plugins`` are run first, so that what they add can be named. A run's configuration gets what
    follows from it: steps from tokens, the shape of pretrained weights.

    Raises:
        UserError: with every problem: unknown keys, wrong types, impossible combinations.
    """
    # `controls=null` on a command line leaves an experiment's out.
    empty: dict[str, Any] = {key: {} for key in NAMED_BY_USERS if values.get(key, ...) is None}
    values = values | empty
    config, unknown, wrong = checked(schema, values)
    problems = [*found, *unknown, *wrong]
    failed = [problem for problem in problems if problem.key == "plugins"]
    if not failed:
        with collecting(problems):
            load_plugins(getattr(config, "plugins", ()))
        failed = [problem for problem in problems if problem.key == "plugins"]
    config, impossible = _completed(_shortened(config), values, problems)
    if failed:  # what a plugin adds is not known then: its names would be reported as unknown
        impossible = [p for p in impossible if _group(p) not in NAMED_BY_PLUGINS]
    raise_all([*problems, *_apart_from(wrong, impossible)])
    return config


def _shortened(config: Any) -> Any:
    """Return the configuration with a quick evaluation's own numbers, if it asks for one."""
    evaluation = getattr(config, "evaluation", None)
    if not isinstance(evaluation, EvaluationConfig) or not evaluation.quick:
        return config
    return replace(config, evaluation=evaluation.shortened())


def _group(problem: Problem) -> str:
    """Return the outermost group of a problem's key."""
    return problem.key.split("[")[0].split(".")[0]


NAMED_BY_PLUGINS = ("positional", "evaluation", "monitor", "analysis", "data")
"""Groups that can name what a plugin adds."""
DEPENDENT = ("positional", "drop", "phases", "evaluation", "monitor")
"""Groups in which sizes of the model, of its text and of its steps decide on what is possible."""


def _apart_from(wrong: Sequence[Problem], impossible: Sequence[Problem]) -> list[Problem]:
    """Return the problems of ``impossible`` that stay whatever replaces the values of ``wrong``."""
    groups = {_group(problem) for problem in wrong}
    unsure = {*groups, *(DEPENDENT if groups & {"model", "data", "trainer"} else ())}
    return [problem for problem in impossible if _group(problem) not in unsure]


@singledispatch
def _completed(
    config: Any, values: dict[str, Any], known: Sequence[Problem]
) -> tuple[Any, list[Problem]]:
    """Complete the configuration with derived values; also return the problems that this shows."""
    return config, config.problems()


@_completed.register
def _(
    config: RunConfig, values: dict[str, Any], known: Sequence[Problem]
) -> tuple[Any, list[Problem]]:
    config = with_lengths(config)
    try:
        config = with_trained_shape(config)
    except UserError as error:
        return config, [*error.problems, *_apart_from([Problem("model", "")], config.problems())]
    problems = config.problems() + phase_problems(config)
    values = values | {"controls": config.controls}  # without what is already reported
    for name, changes in config.controls.items():
        problems += _control_problems(values, config, name, changes, [*known, *problems])
    return config, problems


def parse_without_weights(values: dict[str, Any], found: Sequence[Problem] = ()) -> RunConfig:
    """Parse as :func:`parse` does, with the shape in ``values`` instead of that of published
    weights."""
    config, unknown, wrong = checked(RunConfig, values)
    config = with_lengths(config)
    impossible = _apart_from(wrong, [*config.problems(), *phase_problems(config)])
    raise_all([*found, *unknown, *wrong, *impossible])
    return config


def _control_problems(
    values: dict[str, Any],
    config: RunConfig,
    name: str,
    changes: dict[str, Any],
    known: list[Problem],
) -> list[Problem]:
    if not NAME.fullmatch(name):
        return [
            Problem(
                "controls",
                f"{name!r} names a directory in the run's; expected letters, digits and ._+- only.",
            )
        ]
    own = [key for key in ("run_dir", "controls", "evaluation") if key in changes]
    branch = changes.get("branch")
    misplaced = [Problem(key, "a control has none of its own; leave it out.") for key in own]
    if found := misplaced or ([] if known else _branch_problems(config, branch)):
        return [problem.under(f"controls.{name}") for problem in found]
    try:
        control = control_config(values, name)
    except UserError as error:
        return [p.under(f"controls.{name}") for p in error.problems if p not in known]
    at = config.drop_step if branch == "drop" else branch
    apart = [] if at is None else branch_problems(config, control, at)
    return [p.under(f"controls.{name}") for p in _ignored_changes(control, changes) or apart]


def _branch_problems(config: RunConfig, branch: Any) -> list[Problem]:
    """Check the step at which a control branches off."""
    is_step = isinstance(branch, int) and not isinstance(branch, bool)
    if branch not in (None, "drop") and not is_step:
        return [Problem("branch", f"expected 'drop', a step or nothing, got {branch!r}.")]
    if branch == "drop" and config.drop_step is None:
        return [
            Problem("branch", "the run has no drop to branch from; set drop.at, or leave it out.")
        ]
    last = config.trainer.max_steps if config.drop_step is None else config.drop_step
    if is_step and not 1 <= branch <= last:
        return [
            Problem(
                "branch",
                f"expected a step from 1 to {last}, until which the run is as every branch "
                f"begins, got {branch}.",
            )
        ]
    return []


def _ignored_changes(control: RunConfig, changes: dict[str, Any]) -> list[Problem]:
    """Check for changes of a control that its trained weights determine."""
    sources = [key for key in ("from_run", "from_pretrained") if getattr(control.model, key)]
    groups = "model", "tokenizer"
    keys = [f"{group}.{key}" for group in groups for key in changes.get(group) or ()]
    keys += ["positional"] * ("positional" in changes)
    return [p for source in sources for p in ignored_keys(keys, source)]


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
    """Return the configuration of a control: the run's with the control's changes.

    ``weights``: whether the weights that it begins with are available; otherwise it has the shape
    in ``values``. The run's label is not inherited, since it describes the run.
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
