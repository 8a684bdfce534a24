"""Plain values to a checked and completed configuration, its controls, and the rules between keys.

A rule is here if breaking it would waste hours of training or give wrong numbers in silence.
Everything else fails where it happens; an evaluation that fails resumes behind the finished
training.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.config import MAIN, RunConfig, SourceConfig
from trainer.model.config import ModelConfig, check_shape
from trainer.positional.layout import Layout
from trainer.runs.directory import plain
from trainer.runs.phases import configured_layout, layouts_of, phases_of, reading

NAMED_BY_USERS = "controls", "callbacks", "phases"
"""Groups whose keys users choose; null stands for none."""

T = TypeVar("T")
Rules = Iterator[tuple[object, str]]
"""Conditions that must not hold, each with a message."""


def parse(schema: type[T], values: dict[str, Any], *, is_control: bool = False) -> T:
    """Return plain values as a checked and completed dataclass.

    A run whose ``drop`` would change nothing, such as one of NoPE, has none. ``plugins`` are run
    first, so that the configuration can name what they register. A run that begins with trained
    weights has their shape.

    Raises:
        UserError: unknown keys, wrong types, or a broken rule.
    """
    values = values | {k: {} for k in NAMED_BY_USERS if values.get(k, ...) is None}
    for path in values.get("plugins") or ():
        runpy.run_path(path)
    config = validated(schema, values)
    if isinstance(config, RunConfig):
        return _completed(config, is_control)  # type: ignore[return-value]  # T is RunConfig
    return config


def _completed(config: RunConfig, is_control: bool) -> RunConfig:
    if config.phases:
        steps = sum(phase.steps for phase in config.phases.values())
        config = replace(config, trainer=replace(config.trainer, max_steps=steps))
    config, layout = with_trained_shape(config)
    check_shape(config.model)
    _refuse(_run_rules(config, is_control))
    layouts_of(config, layout or configured_layout(config))
    if _drops_nothing(config):
        config = replace(config, drop=replace(config.drop, at=None))
    for name, control in runs_of(config).items():
        if name != MAIN:
            _refuse(_control_rules(config, control, name))
    return config


def _drops_nothing(config: RunConfig) -> bool:
    """Whether the drop of a run without named phases puts the encoding of all heads in its own
    place."""
    positional, drop = config.positional, config.drop
    names = {*positional.layers[: config.model.num_hidden_layers], *positional.heads}
    is_known = not config.phases and config.model.from_pretrained is None
    return is_known and names == {drop.to} and not drop.windows


def _refuse(rules: Rules) -> None:
    """Raise the message of the first rule that is broken."""
    for is_broken, text in rules:
        if is_broken:
            raise UserError(text)


def _run_rules(config: RunConfig, is_control: bool) -> Rules:
    drop, last, benchmarks = config.drop, config.trainer.max_steps, config.benchmarks
    yield (
        config.model.qk_norm.when == "after_drop"
        and config.drop_step is None
        and not (config.controls or is_control),
        "model.qk_norm.when: 'after_drop', but there is no drop",
    )
    yield (
        (benchmarks.every is None) == bool(benchmarks.tasks),
        "benchmarks.every: expected it with tasks",
    )
    yield (
        config.phases and drop.at is not None,
        "drop: with phases it is one of them that drops; expected phases.NAME.drop",
    )
    yield MAIN in config.controls, f"controls.{MAIN}: the run itself has this name"
    step = drop.step(last)
    yield (
        step is not None and not 0 <= step < last,
        f"drop.at: expected a step before trainer.max_steps, {last}, got {step}",
    )
    yield (
        config.evaluation.enabled and "none" not in config.evaluation.methods,
        "evaluation.methods: expected 'none' among them, the run as it is",
    )


# Controls


def runs_of(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configurations of the run, first and as ``main``, and of its controls by name."""
    controls = {name: control_config(plain(config), name) for name in config.controls}
    return {MAIN: config, **controls}


def control_config(values: dict[str, Any], name: str) -> RunConfig:
    """Return the configuration of a control: the run's with the control's changes.

    Raises:
        UserError: the control's configuration breaks a rule.
    """
    changes = {k: v for k, v in values["controls"][name].items() if k != "branch"}
    base = {**values, "controls": {}, "run_dir": f"{values['run_dir']}/controls/{name}"}
    try:
        return parse(RunConfig, merged(base, changes), is_control=True)
    except UserError as error:
        raise UserError(f"controls.{name}.{error}") from error


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` applied: mappings merged, everything else replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


BRANCHED = (
    *(f"model.{field.name}" for field in fields(ModelConfig) if field.name != "attention_backend"),
    "positional",
    "optimizer.name",
    "seed",
)
"""Keys whose value a checkpoint determines for a control that continues from it."""


def _control_rules(run: RunConfig, control: RunConfig, name: str) -> Rules:
    """Controls train in the processes of their run, read its text, and share its table."""
    key, branch = f"controls.{name}", run.controls[name].get("branch")
    yield (
        control.training_length != run.training_length,
        f"{key}: trains on {control.training_length} tokens, the run on {run.training_length}",
    )
    yield (
        not _texts_of(control).items() <= _texts_of(run).items()
        or control.tokenizer != run.tokenizer,
        f"{key}.data: a control reads the texts and tokens of its run",
    )
    yield (
        (control.strategy.name == "single") != (run.strategy.name == "single"),
        f"{key}.strategy: a control trains in the processes of its run",
    )
    if branch is None:
        return
    step: Any = run.drop_step if branch == "drop" else branch
    yield (
        not isinstance(step, int) or not 0 <= step <= run.trainer.max_steps,
        f"{key}.branch: expected 'drop' or a step of the run, got {branch!r}",
    )
    for continued in BRANCHED:
        yield (
            attrgetter(continued)(run) != attrgetter(continued)(control),
            f"{key}.{continued}: a control that branches off continues with the run's",
        )
    yield (
        _past(run, step) != _past(control, step),
        f"{key}.branch: the run and the control differ before step {step}",
    )


def _texts_of(config: RunConfig) -> dict[str, str]:
    """Return the keys that decide on each text of a run, by the name of the text."""
    keys = [key.name for key in fields(SourceConfig) if key.name != "weight"]
    texts = config.data.texts.items()
    return {name: repr([getattr(text, key) for key in keys]) for name, text in texts}


def _past(config: RunConfig, step: int) -> list[tuple[object, ...]]:
    """Return the changes and the samples of a run before ``step``."""
    return [
        (part.start, part.change, part.config.trainer.batch_size, reading(part.config.data))
        for part in phases_of(config)
        if part.start < step
    ]


def check_batches(config: RunConfig, processes: int) -> None:
    """Check that the batches of all phases divide into micro-batches on the processes.

    Raises:
        UserError: they do not.
    """
    for part in phases_of(config):
        run = part.config.trainer
        micro = run.micro_batch_size or max(run.batch_size // processes, 1)
        if run.batch_size % (processes * micro):
            raise UserError(
                f"trainer.batch_size: {run.batch_size} sequences do not divide into micro-batches "
                f"of {micro} on {processes} ranks"
            )


def with_trained_shape(config: RunConfig) -> tuple[RunConfig, Layout | None]:
    """Return the configuration with the shape of the trained model that the run begins with, and
    the model's layout; None without such a model.

    Its encodings also come from the run that trained the weights.

    Raises:
        UserError: there is no such model, its files are damaged, or it conflicts with the request.
    """
    model = config.model
    if not model.is_trained:
        return config, None
    # Reading weights needs torch, which a wrong configuration must not wait for.
    from trainer.runs.models import encodings_of, starting_weights

    start = starting_weights(model)
    assert start is not None
    is_normed = any(layer.qk_norm for layer in start.layout.layers)
    if not is_normed and model.qk_norm.when == "always":
        raise UserError("model.qk_norm.when: 'always', but the weights were trained without")
    shape = replace(
        start.config,
        qk_norm=replace(start.config.qk_norm, when="always") if is_normed else model.qk_norm,
        attention_backend=model.attention_backend,
        from_pretrained=model.from_pretrained,
        from_run=model.from_run,
    )
    if model.from_run is not None:
        config = replace(config, positional=encodings_of(model.from_run))
    return replace(config, model=shape), start.layout
