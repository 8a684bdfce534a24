"""Plain values to a checked and completed configuration, its controls, and the rules between keys.

A rule is here if breaking it would waste hours of training or give wrong numbers in silence.
Everything else fails where it happens; an evaluation that fails resumes behind the finished
training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.config import MAIN, DataConfig, NeedlesConfig, RunConfig
from trainer.model.config import check_shape
from trainer.positional.layout import Layout
from trainer.runs.directory import plain
from trainer.runs.phases import configured_layout, drop_step, layout_of_phase, phases_of

NAMED_BY_USERS = "controls", "callbacks", "phases"
"""Groups whose keys users choose; null stands for none."""


def parse(values: dict[str, Any]) -> RunConfig:
    """Validate plain values into a complete ``RunConfig``.

    A run whose ``drop`` would change nothing, such as one of NoPE, has none. A run that begins with
    trained weights has their shape.

    Raises:
        UserError: unknown keys, wrong types, or a broken rule.
        ValueError: an encoding does not fit the model, or a phase asks for an impossible change.
    """
    values = values | {k: {} for k in NAMED_BY_USERS if values.get(k, ...) is None}
    config = validated(RunConfig, values)
    if config.phases:
        steps = sum(phase.steps for phase in config.phases.values())
        config = replace(config, trainer=replace(config.trainer, max_steps=steps))
    config, layout = _with_trained_shape(config)
    check_shape(config.model)
    _check_run(config)
    layout = layout or configured_layout(config)
    for phase in phases_of(config):
        phase.config.trainer.accumulation()
        layout = layout_of_phase(layout, phase)
    drop, positional = config.drop, config.positional
    names = {*positional.layers[: config.model.num_hidden_layers], *positional.heads}
    is_known = not config.phases and config.model.from_pretrained is None
    if is_known and names == {drop.to} and not drop.windows:  # it would change nothing
        config = replace(config, drop=replace(drop, at=None))
    runs_of(config)
    return config


def _with_trained_shape(config: RunConfig) -> tuple[RunConfig, Layout | None]:
    """Return the configuration with the shape of the trained model that the run begins with, and
    the model's layout; None without such a model.

    Its encodings also come from the run that trained the weights.
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


def _check_run(config: RunConfig) -> None:
    drop, last, benchmarks = config.drop, config.trainer.max_steps, config.benchmarks
    if (benchmarks.every is None) == bool(benchmarks.tasks):
        raise UserError("benchmarks.every: expected it with tasks")
    if config.phases and drop.at is not None:
        raise UserError("drop: with phases it is one of them that drops; expected phases.NAME.drop")
    if MAIN in config.controls:
        raise UserError(f"controls.{MAIN}: the run itself has this name")
    step = drop.step(last)
    if step is not None and not 0 <= step < last:
        raise UserError(f"drop.at: expected a step before trainer.max_steps, {last}, got {step}")
    if config.evaluation.enabled and "none" not in config.evaluation.methods:
        raise UserError("evaluation.methods: expected 'none' among them, the run as it is")


# Controls


def runs_of(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configurations of the run, first and as ``main``, and of its controls by name:
    the run's with the control's changes.

    Raises:
        UserError: a control breaks a rule, or does not compare with its run.
    """
    runs, values = {MAIN: config}, plain(config)
    for name, changes in values.pop("controls").items():
        base = values | {"run_dir": f"{config.run_dir}/controls/{name}"}
        branch = changes.pop("branch", None)
        try:
            runs[name] = parse(merged(base, changes))
        except UserError as error:
            raise UserError(f"controls.{name}.{error}") from error
        _check_control(config, runs[name], f"controls.{name}", branch)
    return runs


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` applied: mappings merged, everything else replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


def _check_control(run: RunConfig, control: RunConfig, key: str, branch: Any) -> None:
    """Check that a control trains in the processes of its run, reads its text, and fits into its
    table."""
    lengths = control.training_length, run.training_length
    if lengths[0] != lengths[1]:
        raise UserError(f"{key}: trains on {lengths[0]} tokens, the run on {lengths[1]}")
    sequences: dict[str, Any] = {"sequence_length": 2, "document_mask": False}
    sequences |= {"needles": NeedlesConfig(), "weight": 1.0}  # which may differ
    is_read = _texts(control, **sequences).items() <= _texts(run, **sequences).items()
    if not is_read or control.tokenizer != run.tokenizer:
        raise UserError(f"{key}.data: a control reads the texts and tokens of its run")
    if (control.strategy.name == "single") != (run.strategy.name == "single"):
        raise UserError(f"{key}.strategy: a control trains in the processes of its run")
    if branch is None:
        return
    step = drop_step(run) if branch == "drop" else branch
    if not isinstance(step, int) or not 0 <= step <= run.trainer.max_steps:
        raise UserError(f"{key}.branch: expected 'drop' or a step of the run, got {branch!r}")
    if _before(run, step) != _before(control, step):
        raise UserError(
            f"{key}.branch: model, encoding, optimizer, seed or samples differ from the run's "
            f"before step {step}"
        )


def _texts(config: RunConfig, **same: Any) -> dict[str, DataConfig]:
    """Return the texts of a run by name. All have the values ``same``, and one way of reading."""
    same |= {"num_workers": 0, "cache_dir": None}
    return {name: replace(text, **same) for name, text in config.data.texts.items()}


def _before(config: RunConfig, step: int) -> tuple[object, ...]:
    """Return what determines the state of a run after ``step`` steps, except learning rates."""
    phases = [
        (part.start, part.change, part.config.trainer.batch_size, _texts(part.config))
        for part in phases_of(config)
        if part.start < step
    ]
    model = replace(config.model, attention_backend="auto")
    return model, config.positional, config.optimizer.name, config.seed, phases
