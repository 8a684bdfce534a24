"""Plain values to a checked and completed configuration, and the rules between its keys.

A rule is here if breaking it would waste hours of training or give wrong numbers in silence.
Everything else fails where it happens; a run makes its evaluation's tasks and methods before it
trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.common.plugins import load_plugins
from trainer.config import (
    LONGBENCH,
    MAIN,
    MANY_SHOT,
    PARTS,
    PERIOD,
    PERPLEXITY,
    RULER,
    STATEMENTS,
    ChangeConfig,
    DataConfig,
    EvaluationConfig,
    MethodsConfig,
    MixedText,
    RunConfig,
)
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.model.config import check_shape
from trainer.runs.layouts import check_layouts, drops_nothing
from trainer.runs.phases import branch_problem, phases_of, with_lengths

NAMED_BY_USERS = "controls", "callbacks", "phases"
"""Groups whose keys users choose; null stands for none."""
SHORTEST = {"sequence": 6, "spectrum": 1024}
"""Tokens that the entropies of ``evaluation.weighted_rope`` need."""

T = TypeVar("T")
Rules = Iterable[tuple[object, str]]
"""Conditions that must not hold, each with a message."""


def parse(schema: type[T], values: dict[str, Any], *, weights: bool = True) -> T:
    """Return plain values as a checked and completed dataclass.

    A run whose ``drop`` would change nothing, such as one of NoPE, has none. ``plugins`` are run
    first, so that the configuration can name what they register. ``weights``: whether the weights
    that a run begins with are available; otherwise the shape in ``values`` is used.

    Raises:
        UserError: unknown keys, wrong types, or a broken rule.
    """
    values = values | {k: {} for k in NAMED_BY_USERS if values.get(k, ...) is None}
    load_plugins(values.get("plugins") or ())
    config = validated(schema, values)
    if isinstance(config, RunConfig):
        completed = with_lengths(config)
        completed = with_trained_shape(completed) if weights else completed
        check_run(completed)
        if drops_nothing(completed):
            completed = replace(completed, drop=replace(completed.drop, at=None))
        for name, changes in completed.controls.items() if weights else ():
            _check_control(values, completed, name, changes)
        return completed  # type: ignore[return-value]  # T is RunConfig
    evaluation, text = getattr(config, "evaluation", None), getattr(config, "text", None)
    if isinstance(evaluation, MethodsConfig):
        check_evaluation(evaluation)
    if isinstance(text, DataConfig):
        _refuse(_data_rules(text))
    return config


def _refuse(rules: Rules) -> None:
    """Raise the message of the first rule that is broken."""
    for is_broken, text in rules:
        if is_broken:
            raise UserError(text)


def check_run(config: RunConfig) -> None:
    """Check the rules of a run, of its phases and of its evaluation.

    Raises:
        UserError: the first rule that is broken.
    """
    check_shape(config.model)
    _refuse(_run_rules(config))
    for part in phases_of(config):
        _refuse(_data_rules(part.config.data))
        if part.drop is not None:
            key = f"phases.{part.name}.drop" if config.phases else "drop"
            _refuse(_change_rules(config, key, part.drop))
    check_layouts(config)
    if config.evaluation.enabled:
        check_evaluation(config.evaluation, config.training_length)
        if "none" not in config.evaluation.names:
            raise UserError("evaluation.methods: expected 'none' among them, the run as it is")


def _run_rules(config: RunConfig) -> Rules:
    drop, last, benchmarks = config.drop, config.trainer.max_steps, config.monitor.benchmarks
    yield (
        config.model.qk_norm.when == "after_drop"
        and config.drop_step is None
        and not config.controls,
        "model.qk_norm.when: 'after_drop', but there is no drop",
    )
    yield (
        (benchmarks.every is None) == bool(benchmarks.tasks or benchmarks.multiple_choice),
        "monitor.benchmarks.every: expected it with tasks or multiple_choice",
    )
    yield (
        config.phases and drop.at is not None,
        "drop: with phases it is one of them that drops; expected phases.NAME.drop",
    )
    step, first = drop.step(last), 0 if config.model.is_trained else 1
    yield (
        step is not None and not first <= step < last,
        f"drop.at: step {step}, but steps {first} to {last - 1} are possible: a drop needs trained "
        f"weights before it, and trainer.max_steps is {last}",
    )
    for name, phase in config.phases.items():
        key, rescale = f"phases.{name}", phase.rescale
        yield rescale and phase.drop, f"{key}.rescale: expected a phase apart from the drop"
        for text in phase.weights or ():
            yield text not in config.data.mixture, f"{key}.weights.{text}: no text of data.mixture"
        yield (
            rescale and (rescale.method == "base") != (rescale.base is not None),
            f"{key}.rescale.base: expected the new base with method base, and null without",
        )


def _data_rules(data: DataConfig) -> Rules:
    yield (
        data.restart_positions and not data.document_mask,
        "data.restart_positions: needs data.document_mask=true",
    )
    yield data.mixture and data.prepared, "data.prepared: expected it in each text of data.mixture"
    for name, changes in data.mixture.items():
        validated(MixedText, changes, f"data.mixture.{name}")
    share = sum(weight for _, weight in data.texts.values()) / PERIOD
    for name, (text, weight) in data.texts.items():
        yield (
            data.mixture and weight < share,
            f"data.mixture.{name}.weight: {weight:g} is less than one of {PERIOD:,} samples",
        )
        yield (
            text.validation + text.test >= 1,
            "data.validation: with data.test it leaves no documents to train on",
        )
    for key in ("names", "mentions"):
        least, most = getattr(data.needles, key)
        yield least > most, f"data.needles.{key}: expected the least first, got {[least, most]}"
    yield (
        data.needles.share and 3 * data.needles.mentions[1] >= data.sequence_length,
        f"data.needles.mentions: {data.needles.mentions[1]} statements of 3 tokens do not fit "
        f"data.sequence_length {data.sequence_length}",
    )


def _change_rules(config: RunConfig, key: str, change: ChangeConfig) -> Rules:
    model = config.model
    for name, count in (("layers", model.num_hidden_layers), ("heads", model.num_key_value_heads)):
        for index in getattr(change, name) or ():
            yield not -count <= index < count, f"{key}.{name}: there is no {index} among {count}"


def check_evaluation(config: MethodsConfig, training_length: int | None = None) -> None:
    """Check an evaluation, also of models with that training length if it is known.

    Raises:
        UserError: the first rule that is broken.
    """
    _refuse(_method_rules(config))
    if isinstance(config, EvaluationConfig):
        _refuse(_task_rules(config))
        if (C := config.training_length or training_length) is not None:
            _refuse(_length_rules(config, C))


def _method_rules(config: MethodsConfig) -> Rules:
    dope = config.dope
    intervenes = dope.removal == "zero" or dope.variant == "by_gaussian"
    for name in config.names:
        parts = name.split("+")
        for part in parts:
            yield part not in PARTS, f"evaluation.methods: unknown method {part!r}"
        yield (
            len({*parts}) < len(parts) or ("none" in parts and len(parts) > 1),
            f"evaluation.methods: {name!r} does one thing twice, or 'none' and more",
        )
        yield (
            intervenes and {"dope", "weighted_rope"} <= {*parts},
            f"evaluation.methods: {name!r} changes heads twice, which needs dope.removal=unrotate "
            "and another variant than by_gaussian",
        )
    yield (
        dope.spectral != "inverse" and (dope.entropy, dope.r) != ("trunc", 1),
        "evaluation.dope.spectral: is for dope.entropy=trunc with dope.r=1",
    )


def _task_rules(config: EvaluationConfig) -> Rules:
    names = (PERPLEXITY, STATEMENTS, *NEEDLE_TASKS, RULER, LONGBENCH, MANY_SHOT)
    for name in config.tasks:
        yield name not in names, f"evaluation.tasks: unknown task {name!r}"
    needles = config.needles
    yield (
        needles.changes >= needles.needles,
        f"evaluation.needles.changes: expected fewer than the {needles.needles} needles",
    )


def _length_rules(config: EvaluationConfig, training_length: int) -> Rules:
    lengths, least = config.in_tokens(training_length), 3 * config.needles.needles + 2
    key, shortest = config.lengths_key, min(lengths)
    yield len({*lengths}) < len(lengths), f"{key}: expected each length once, got {lengths}"
    yield (
        STATEMENTS in config.tasks and least > shortest,
        f"{key}: {shortest} tokens are too few for {config.needles.needles} statements, which take "
        f"{least}",
    )
    yield (
        PERPLEXITY in config.tasks and config.last is not None and config.last > shortest,
        f"evaluation.last: {config.last} tokens, but the shortest length has {shortest}",
    )
    rules = config.weighted_rope if "weighted_rope" in config.parts else ()
    least = max((2, *(SHORTEST[rule.entropy] for rule in rules)))
    tokens = round((config.choice.length or min(config.factors)) * training_length)
    yield (
        {*config.parts} & {"dope", "weighted_rope"} and tokens < least,
        f"evaluation.choice.length: {tokens} tokens, but {least:,} or more are needed to choose on",
    )


def _check_control(
    values: dict[str, Any], config: RunConfig, name: str, changes: dict[str, Any]
) -> None:
    """Check a control and the step at which it branches off.

    Raises:
        UserError: with the name of the control.
    """
    if name == MAIN:
        raise UserError(f"controls.{name}: the run itself has this name")
    key, branch, last = f"controls.{name}", changes.get("branch"), config.trainer.max_steps
    for own in ("run_dir", "controls", "evaluation"):
        if own in changes:
            raise UserError(f"{key}.{own}: a control has none of its own")
    if branch == "drop" and config.drop_step is None:
        raise UserError(f"{key}.branch: 'drop', but the run has no drop")
    step = config.drop_step if branch == "drop" else branch
    if branch is not None and not (isinstance(step, int) and 0 <= step <= last):
        raise UserError(f"{key}.branch: expected 'drop' or a step up to {last}, got {branch!r}")
    try:
        control = control_config(values, name)
    except UserError as error:
        raise UserError(f"{key}.{error}") from error
    if step is not None and (problem := branch_problem(config, control, step)):
        raise UserError(f"{key}.{problem}")


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
    its shape.
    """
    changes = {k: v for k, v in values["controls"][name].items() if k != "branch"}
    base = {
        **values,
        "controls": {},
        "run_dir": f"{values['run_dir']}/controls/{name}",
    }
    return parse(RunConfig, merged(base, changes), weights=weights)


def with_trained_shape(config: RunConfig) -> RunConfig:
    """Return the configuration with the shape of the trained model that the run begins with.

    Its encodings also come from the run that trained the weights.

    Raises:
        UserError: there is no such model, its files are damaged, or it conflicts with the request.
    """
    model = config.model
    if not model.is_trained:
        return config
    # Reading weights needs torch, which a wrong configuration must not wait for.
    from trainer.runs.starting_point import encodings_of, normalizes, starting_weights

    start = starting_weights(model)
    assert start is not None
    is_normed = normalizes(start.layout)
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
    return replace(config, model=shape)
