"""Plain values to a checked and completed configuration, and the rules between its keys.

A rule is here if breaking it would waste hours of training or give wrong numbers in silence.
Everything else fails where it happens.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.common.plugins import load_plugins
from trainer.config import (
    LONGBENCH,
    MAIN,
    MANY_SHOT,
    MOST_NAMES,
    PARTS,
    PERIOD,
    PERPLEXITY,
    RULER,
    STATEMENTS,
    BenchmarksConfig,
    ChangeConfig,
    DataConfig,
    EvaluationConfig,
    MethodsConfig,
    MixedText,
    RunConfig,
    TrainerConfig,
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


def task_names() -> tuple[str, ...]:
    """Return the names for ``evaluation.tasks``, including those of plugins."""
    return (PERPLEXITY, STATEMENTS, *NEEDLE_TASKS, RULER, LONGBENCH, MANY_SHOT)


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
    _refuse(_trainer_rules(config))
    _refuse(_data_rules(config.data))
    _refuse(_benchmark_rules(config.monitor.benchmarks))
    for key, phase in _phase_keys(config).items():
        _refuse(_phase_rules(config, key, phase))
    _refuse(_drop_rules(config))
    for part in phases_of(config):
        _refuse([_uneven(part.config.trainer)])
        _refuse(_data_rules(part.config.data))
        if part.drop is not None:
            key = f"phases.{part.name}.drop" if config.phases else "drop"
            _refuse(_change_rules(config, key, part.drop, part.config.data.sequence_length))
    check_layouts(config)
    if config.evaluation.enabled:
        check_evaluation(config.evaluation, config.training_length)
        _refuse(_run_evaluation_rules(config))


def _trainer_rules(config: RunConfig) -> Rules:
    run, model = config.trainer, config.model
    yield _uneven(run)
    yield (
        config.optimizer.name == "muon" and config.strategy.name in ("fsdp2", "hsdp"),
        "optimizer.name: muon needs whole matrices: strategy single or ddp, got "
        f"{config.strategy.name}",
    )
    yield (
        model.qk_norm.when == "after_drop" and config.drop_step is None and not config.controls,
        "model.qk_norm.when: 'after_drop', but there is no drop",
    )


def _uneven(run: TrainerConfig) -> tuple[object, str]:
    return (
        run.batch_size % (run.micro_batch_size or run.batch_size),
        f"trainer.micro_batch_size: {run.micro_batch_size} does not divide the {run.batch_size} "
        "sequences of a step",
    )


def _data_rules(data: DataConfig) -> Rules:
    needles = data.needles
    yield (
        data.restart_positions and not data.document_mask,
        "data.restart_positions: needs data.document_mask=true",
    )
    yield (
        data.mixture and data.prepared,
        "data.prepared: one text, but data.mixture names several; give it there",
    )
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
    for key, (least, most) in (("names", needles.names), ("mentions", needles.mentions)):
        yield least > most, f"data.needles.{key}: expected least and most, got {[least, most]}"
    yield (
        needles.names[1] > MOST_NAMES,
        f"data.needles.names: expected at most {MOST_NAMES}, got {needles.names[1]}",
    )
    yield (
        needles.share and 3 * needles.mentions[1] >= data.sequence_length,
        f"data.needles.mentions: {needles.mentions[1]} statements of 3 tokens do not fit "
        f"data.sequence_length {data.sequence_length}",
    )


def _phase_keys(config: RunConfig) -> dict[str, Any]:
    return {f"phases.{name}": phase for name, phase in config.phases.items()}


def _phase_rules(config: RunConfig, key: str, phase: Any) -> Rules:
    yield phase.rescale and phase.drop, f"{key}.rescale: expected a phase apart from the drop"
    for name in phase.weights or ():
        yield name not in config.data.mixture, f"{key}.weights.{name}: no text of data.mixture"
    if rescale := phase.rescale:
        yield (
            (rescale.method == "base") != (rescale.base is not None),
            f"{key}.rescale.base: expected the new base with method base, and null without",
        )


def _drop_rules(config: RunConfig) -> Rules:
    drop, last = config.drop, config.trainer.max_steps
    yield (
        config.phases and drop.at is not None,
        "drop: with phases it is one of them that drops; expected phases.NAME.drop",
    )
    step = drop.step(last)
    first = 0 if config.model.is_trained else 1
    yield (
        step is not None and not first <= step < last,
        f"drop.at: step {step}, but steps {first} to {last - 1} are possible: a drop needs trained "
        f"weights before it, and trainer.max_steps is {last}",
    )


def _change_rules(config: RunConfig, key: str, change: ChangeConfig, length: int) -> Rules:
    model = config.model
    for name, count in (("layers", model.num_hidden_layers), ("heads", model.num_key_value_heads)):
        chosen = getattr(change, name)
        yield chosen == [], f"{key}.{name}: expected one or more, or null for all"
        for index in chosen or ():
            yield not -count <= index < count, f"{key}.{name}: there is no {index} among {count}"
    windows = change.windows
    yield windows == [], f"{key}.windows: expected one or more, or null"
    yield (
        len(windows or ()) > model.num_hidden_layers,
        f"{key}.windows: {len(windows or ())} for {model.num_hidden_layers} layers",
    )
    for window in windows or ():
        yield (
            window is not None and window > length,
            f"{key}.windows: {window} tokens do not fit sequences of {length}",
        )


def _benchmark_rules(asked: BenchmarksConfig) -> Rules:
    names = [*asked.tasks, *asked.multiple_choice]
    key = "monitor.benchmarks"
    yield asked.every and not names, f"{key}: expected tasks or multiple_choice"
    yield names and not asked.every, f"{key}.every: expected the steps between measurements"
    for name in asked.tasks:
        yield name not in task_names(), f"{key}.tasks: unknown task {name!r}"


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
            check_choice(config, C, config.methods or ())


def _method_rules(config: MethodsConfig) -> Rules:
    yield from _listed("evaluation.methods", config.names)
    dope, choice = config.dope, config.choice
    intervenes = dope.removal == "zero" or dope.variant == "by_gaussian"
    for name in config.names:
        yield from method_rules(name, "evaluation.methods")
        yield (
            intervenes and {"dope", "weighted_rope"} <= {*name.split("+")},
            f"evaluation.methods: {name!r} changes heads twice, which needs dope.removal=unrotate "
            "and another variant than by_gaussian",
        )
    yield (
        "weighted_rope" in config.parts and not config.weighted_rope,
        "evaluation.weighted_rope: expected one rule or more",
    )
    yield (
        dope.spectral != "inverse" and (dope.entropy, dope.r) != ("trunc", 1),
        "evaluation.dope.spectral: is for dope.entropy=trunc with dope.r=1",
    )
    texts = ("validation", *NEEDLE_TASKS, "many_shot_needle", "many_shot_skip")
    yield choice.text not in texts, f"evaluation.choice.text: there is no text {choice.text!r}"


def method_rules(name: str, key: str) -> Rules:
    """Yield the rules of a method's name."""
    parts = name.split("+")
    for part in parts:
        yield part not in PARTS, f"{key}: unknown method {part!r}"
    yield (
        len({*parts}) < len(parts) or ("none" in parts and len(parts) > 1),
        f"{key}: {name!r} does one thing twice, or 'none' and more",
    )


def _listed(key: str, names: list[str]) -> Rules:
    yield not names, f"{key}: expected one or more, got none"
    for name, times in Counter(names).items():
        yield times > 1, f"{key}: expected each one once, got {name!r} {times} times"


def _files(key: str, path: str | None) -> Iterator[tuple[object, str]]:
    yield path is not None and not Path(path).exists(), f"{key}: there is no {path!r}"


def _task_rules(config: EvaluationConfig) -> Rules:
    yield from _listed("evaluation.tasks", config.tasks)
    for name in config.tasks:
        yield name not in task_names(), f"evaluation.tasks: unknown task {name!r}"
    yield not (config.tokens or config.lengths), "evaluation.lengths: expected one or more"
    needles = config.needles
    yield (
        needles.changes >= needles.needles,
        f"evaluation.needles.changes: expected fewer than the {needles.needles} needles",
    )
    yield not needles.depths, "evaluation.needles.depths: expected one or more"
    yield from _files("evaluation.many_shot.file", config.many_shot.file)
    yield from _files("evaluation.longbench.directory", config.longbench.directory)
    yield from _files("evaluation.ruler.squad_file", config.ruler.squad_file)
    yield from _files("evaluation.ruler.hotpotqa_file", config.ruler.hotpotqa_file)


def _length_rules(config: EvaluationConfig, training_length: int) -> Rules:
    lengths, least = config.in_tokens(training_length), 3 * config.needles.needles + 2
    key, shortest = config.lengths_key, min(lengths)
    yield shortest < 2 or max(lengths) >= 1 << 31, f"{key}: {lengths} are no lengths in tokens"
    yield len({*lengths}) < len(lengths), f"{key}: expected each length once, got {lengths}"
    reads = STATEMENTS in config.tasks
    yield (
        reads and config.needles.needles > MOST_NAMES,
        f"evaluation.needles.needles: expected at most {MOST_NAMES} for statements",
    )
    yield (
        reads and least > shortest,
        f"{key}: {shortest} tokens are too few for {config.needles.needles} statements, which take "
        f"{least}",
    )
    yield (
        PERPLEXITY in config.tasks and config.last is not None and config.last > shortest,
        f"evaluation.last: {config.last} tokens, but the shortest length has {shortest}",
    )


def check_choice(config: MethodsConfig, training_length: int, methods: Iterable[str]) -> None:
    """Check the text on which methods choose, for models of that training length.

    Raises:
        UserError: it is too short.
    """
    _refuse(_choice_rules(config, training_length, methods))


def _choice_rules(config: MethodsConfig, training_length: int, methods: Iterable[str]) -> Rules:
    C = training_length
    parts = {part for name in methods for part in name.split("+")}
    for length in config.temperature.lengths or () if "temperature" in parts else ():
        yield (
            round(length * C) <= C,
            f"evaluation.temperature.lengths: {length:g} of {C} tokens is no more than these",
        )
    rules = config.weighted_rope if "weighted_rope" in parts else ()
    least = max((2, *(SHORTEST[rule.entropy] for rule in rules)))
    tokens = round((config.choice.length or min(config.factors)) * C)
    yield (
        parts & {"dope", "weighted_rope"} and tokens < least,
        f"evaluation.choice.length: {tokens} tokens, but {least:,} or more are needed to choose on",
    )


def _run_evaluation_rules(config: RunConfig) -> Rules:
    evaluation, model = config.evaluation, config.model
    heads = model.num_attention_heads * model.num_hidden_layers
    yield (
        "none" not in (evaluation.methods or ["none"]),
        "evaluation.methods: expected 'none' among them; a run is reported as it is first",
    )
    yield (
        "dope" in evaluation.parts and evaluation.dope.heads > heads,
        f"evaluation.dope.heads: expected at most {heads}, the heads of the model",
    )
    yield (
        {*evaluation.tasks} == {STATEMENTS} and not config.data.needles.share,
        "evaluation.tasks: statements alone, but data.needles.share is 0",
    )
    if isinstance(layers := evaluation.layers, list):
        count = model.num_hidden_layers
        yield (
            not layers or not all(-count <= index < count for index in layers),
            f"evaluation.layers: expected some of {count} layers, got {layers}",
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
    if model.from_run and not os.path.lexists(model.from_run):
        raise UserError(f"model.from_run: there is no run {model.from_run!r}")
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
