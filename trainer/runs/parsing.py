"""Parsing of plain values to a checked configuration; reports all problems together.

The configuration is completed: steps follow from tokens, and a run that begins with trained weights
has their shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from trainer.common.errors import Problem, UserError, collecting, raise_all
from trainer.common.fields import checked, value_at
from trainer.common.plugins import load_plugins
from trainer.runs.config import MAIN, NAME, RunConfig
from trainer.runs.directory import saved_run
from trainer.runs.layouts import layout_problems
from trainer.runs.phases import branch_problems, phase_problems, with_lengths

NAMED_BY_USERS = "controls", "callbacks", "phases"
"""Groups whose keys users choose."""
CHOSEN = "qk_norm", "attention_backend", "from_pretrained", "from_run"
"""Keys that a run may set for a model with trained weights; the weights determine all others."""


class Schema(Protocol):
    """A dataclass that checks its values."""

    def problems(self) -> list[Problem]:
        """Check the values."""
        ...


T = TypeVar("T", bound=Schema)


def parse(
    schema: type[T],
    values: dict[str, Any],
    known: Sequence[Problem] = (),
    *,
    weights: bool = True,
) -> T:
    """Return plain values as a checked and completed dataclass.

    ``plugins`` are run first, so that the configuration can name what they register. ``known``:
    problems found before, to be raised together with the others. ``weights``: whether the weights
    that a run begins with are available; otherwise the shape in ``values`` is used.

    Raises:
        UserError: with every problem: unknown keys, wrong types, impossible combinations.
    """
    # Null omits an experiment's controls, and in a control the phases of its run.
    values = values | {key: {} for key in NAMED_BY_USERS if values.get(key, ...) is None}
    config, unknown, wrong = checked(schema, values)
    problems = [*known, *unknown, *wrong]
    if not _of_plugins(problems):
        with collecting(problems):
            load_plugins(getattr(config, "plugins", ()))
    if isinstance(config, RunConfig):
        completed, impossible = _completed(config, values, problems, weights)
        config = cast("T", completed)
    else:
        impossible = config.problems()
    if _of_plugins(problems):  # without a plugin, the names that it adds would seem unknown
        impossible = [p for p in impossible if _group(p) not in NAMED_BY_PLUGINS]
    raise_all([*problems, *_apart_from(wrong, impossible)])
    return config


def _of_plugins(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of plugins that cannot be loaded."""
    return [problem for problem in problems if _group(problem) == "plugins"]


def _group(problem: Problem) -> str:
    """Return the outermost group of a problem's key."""
    return problem.key.split("[")[0].split(".")[0]


NAMED_BY_PLUGINS = ("positional", "drop", "phases", "evaluation", "monitor", "analysis", "data")
"""Groups that can name what a plugin adds."""
DEPENDENT = ("positional", "drop", "phases", "evaluation", "monitor")
"""Groups that are checked against sizes of the model, of its text and of its steps."""


def _apart_from(wrong: Sequence[Problem], impossible: Sequence[Problem]) -> list[Problem]:
    """Return the problems of ``impossible`` that stay whatever replaces the values of ``wrong``."""
    groups = {_group(problem) for problem in wrong}
    unsure = {*groups, *(DEPENDENT if groups & {"model", "data", "trainer"} else ())}
    return [problem for problem in impossible if _group(problem) not in unsure]


def _completed(
    config: RunConfig, values: dict[str, Any], known: Sequence[Problem], weights: bool
) -> tuple[RunConfig, list[Problem]]:
    """Complete a run's configuration with derived values; also return what is impossible in it."""
    config = with_lengths(config)
    if not weights:
        return config, _problems(config)
    try:
        config = with_trained_shape(config)
    except UserError as error:
        return config, [*error.problems, *_apart_from([Problem("model", "")], config.problems())]
    problems = _problems(config)
    values = values | {"controls": config.controls}  # without keys that are already reported
    for name, changes in config.controls.items():
        problems += _control_problems(values, config, name, changes, [*known, *problems])
    return config, problems


def _problems(config: RunConfig) -> list[Problem]:
    """Check a run, its phases and the layouts that it passes through."""
    of_phases = phase_problems(config)
    problems = [*config.problems(), *of_phases]
    sizes = *of_phases, *config.model.problems(), *config.drop_problems()
    has_steps = all(phase.steps is not None for phase in config.phases.values())
    if not sizes and has_steps and config.data.sequence_length > 1:
        problems += layout_problems(config)
    return list(dict.fromkeys(problems))


def _control_problems(
    values: dict[str, Any],
    config: RunConfig,
    name: str,
    changes: dict[str, Any],
    known: list[Problem],
) -> list[Problem]:
    if not NAME.fullmatch(name):
        reason = f"{name!r} names a directory in the run's; expected letters, digits and ._+- only."
        return [Problem("controls", reason)]
    if name == MAIN:
        reason = "this is what the run itself is called; choose another name."
        return [Problem(f"controls.{name}", reason)]
    branch = changes.get("branch")
    problems = [
        Problem(key, "a control has none of its own; leave it out.")
        for key in ("run_dir", "controls", "evaluation")
        if key in changes
    ]
    if not problems and not known:  # the run's own problems may be the reason for these
        problems = _branch_problems(config, branch)
    if not problems:
        try:
            control = control_config(values, name)
        except UserError as error:
            problems = [problem for problem in error.problems if problem not in known]
        else:
            step = config.drop_step if branch == "drop" else branch
            keys = [
                f"{group}.{key}"
                for group, inside in changes.items()
                for key in (inside if isinstance(inside, dict) else ())
            ]
            problems = _ignored_changes(control, changes)
            problems += idle_keys(keys, merged({**values, "controls": {}}, changes))
            if not problems and not known and step is not None:
                problems = branch_problems(config, control, step)
    return [problem.under(f"controls.{name}") for problem in problems]


def _branch_problems(config: RunConfig, branch: Any) -> list[Problem]:
    """Check the step at which a control branches off."""
    is_step = isinstance(branch, int) and not isinstance(branch, bool)
    if branch not in (None, "drop") and not is_step:
        return [Problem("branch", f"expected 'drop', a step or nothing, got {branch!r}.")]
    if branch == "drop" and config.drop_step is None:
        reason = "the run has no drop to branch from; set drop.at, or leave it out."
        return [Problem("branch", reason)]
    last = config.trainer.max_steps
    if is_step and not 1 <= branch <= last:
        return [Problem("branch", f"expected a step from 1 to {last}, the last, got {branch}.")]
    return []


def _ignored_changes(control: RunConfig, changes: dict[str, Any]) -> list[Problem]:
    """Check for changes of a control that its trained weights determine."""
    sources = [key for key in ("from_run", "from_pretrained") if getattr(control.model, key)]
    groups = "model", "tokenizer"
    keys = [f"{group}.{key}" for group in groups for key in changes.get(group) or ()]
    keys += ["positional"] * ("positional" in changes)
    return [p for source in sources for p in ignored_keys(keys, source)]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` applied: mappings merged, everything else replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


def control_config(values: dict[str, Any], name: str, weights: bool = True) -> RunConfig:
    """Return the configuration of a control: the run's with the control's changes.

    ``weights``: whether the weights that it begins with are available; otherwise ``values`` give
    its shape. The run's label is not inherited, since it describes the run.
    """
    changes = {k: v for k, v in values["controls"][name].items() if k != "branch"}
    base = {
        **values,
        "label": None,
        "controls": {},
        "run_dir": f"{values['run_dir']}/controls/{name}",
    }
    return parse(RunConfig, merged(base, changes), weights=weights)


def ignored_keys(keys: Iterable[str], source: str) -> list[Problem]:
    """Report the dotted ``keys`` that the trained weights of ``source`` determine.

    Published weights determine their encodings as well, but a drop may replace them.
    """
    keeps = ", which a run keeps that begins with it" if source == "from_run" else ""
    reason = f"the model that model.{source} names has its own{keeps}; leave it out."

    def is_ignored(key: str) -> bool:
        group, _, name = key.partition(".")
        if group == "model":
            return bool(name) and name.partition(".")[0] not in CHOSEN
        if group == "tokenizer":
            return name != "path"  # the tokenizer file may have moved
        return group == "positional" and source == "from_run"

    return [Problem(key, reason) for key in keys if is_ignored(key)]


def idle_keys(keys: Iterable[str], values: dict[str, Any]) -> list[Problem]:
    """Report the dotted ``keys`` without effect on a run and on all of its controls.

    ``values``: the plain values of the run, which may still be wrong.
    """
    controls = values.get("controls")
    changes = controls.values() if isinstance(controls, dict) else ()
    runs = [values, *(merged(values, change) for change in changes if isinstance(change, dict))]
    problems = []
    for key in keys:
        reasons = [_idle_reason(key, run) for run in runs]
        if all(reasons):
            problems.append(Problem(key, reasons[0]))
    return problems


def _idle_reason(key: str, values: dict[str, Any]) -> str:
    """Return why a key has no effect on a run, and what to write; empty if it has one."""
    group, _, name = key.partition(".")
    value, inside = value_at(values, key), values.get("phases")
    phases = [*map(str, inside)] if isinstance(inside, dict) else []
    if phases and value is not None and key in ("trainer.max_steps", "trainer.max_tokens"):
        length = f"phases.{phases[0]}.{name.removeprefix('max_')}={value}"
        return f"the phases ({', '.join(phases)}) give the run's length; write {length}."
    setting = name.partition(".")[0]
    if group == "drop" and setting not in ("", "at", "at_tokens", "enabled", "effect_sequences"):
        if phases:
            of_phase = name if setting in ("schedule", "optimizer_state") else key
            return f"with phases it is one of them that drops; write phases.NAME.{of_phase}."
        step = value_at(values, "drop.at"), value_at(values, "drop.at_tokens")
        if step == (None, None) and value_at(values, "drop.enabled") is True:
            return "nothing is dropped; write drop.at=0.85 as well, or leave it out."
    optimizer, strategy = value_at(values, "optimizer.name"), value_at(values, "strategy.name")
    if key in ("optimizer.muon_lr", "optimizer.muon_momentum") and optimizer == "adamw":
        return "optimizer=adamw does not use Muon; write optimizer=muon as well, or leave it out."
    if key == "strategy.reduce_gradients" and strategy in ("single", "ddp"):
        return f"strategy={strategy} does not shard; choose fsdp2 or hsdp, or leave it out."
    return ""


def with_trained_shape(config: RunConfig) -> RunConfig:
    """Return the configuration with the shape of the trained model that the run begins with.

    Encodings and label also come from the run that trained the weights.

    Raises:
        UserError: there is no such model, its files are damaged, or it conflicts with the request.
    """
    model = config.model
    if not model.is_trained:
        return config
    if own_checkpoint(config) is not None:
        return _as_it_began(config)
    if model.from_run and not os.path.lexists(model.from_run):
        raise UserError(f"model.from_run: there is no run {model.from_run!r}")
    # Reading weights needs torch, which a wrong configuration must not wait for.
    from trainer.runs.starting_point import encodings_of, normalizes, starting_weights

    start = starting_weights(model)
    assert start is not None
    is_normed = normalizes(start.layout)
    if not is_normed and model.qk_norm.when == "always":
        raise UserError.at(
            "model.qk_norm.when",
            "'always', but the weights were trained without; choose 'never' or 'after_drop'.",
        )
    shape = replace(
        start.config,
        qk_norm=replace(start.config.qk_norm, when="always") if is_normed else model.qk_norm,
        attention_backend=model.attention_backend,
        from_pretrained=model.from_pretrained,
        from_run=model.from_run,
    )
    if model.from_run is not None:
        positional, label = encodings_of(model.from_run)
        config = replace(config, positional=positional, label=config.label or label)
    return replace(config, model=shape)


def own_checkpoint(config: RunConfig) -> Path | None:
    """Return a run's own newest checkpoint if the model of its ``model.from_run`` has disappeared.

    The run resumes from its checkpoint and no longer needs the other model. None if the model
    exists or there is no checkpoint.

    Raises:
        UserError: the configuration that the run was started with is damaged.
    """
    source, run = config.model.from_run, Path(config.run_dir)
    if not source or config.overwrite or Path(source).exists():
        return None
    if not (run / "config.yaml").is_file():
        return None
    from trainer.checkpoint import regular_checkpoints

    checkpoints = regular_checkpoints(run / "checkpoints")
    if not checkpoints or saved_run(run).model.from_run != source:
        return None
    return checkpoints[-1]


def _as_it_began(config: RunConfig) -> RunConfig:
    """Return the configuration with the shape and encodings that the missing model gave the run."""
    model, saved = config.model, saved_run(Path(config.run_dir))
    shape = replace(saved.model, attention_backend=model.attention_backend)
    if shape.qk_norm.when != "always":
        shape = replace(shape, qk_norm=model.qk_norm)
    label = config.label or saved.label
    return replace(config, model=shape, positional=saved.positional, label=label)
