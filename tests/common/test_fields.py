"""Bounds of every configuration field: what lies just within is taken, what lies beyond refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from trainer.commands.plan import PlanKeys
from trainer.commands.sbatch import SlurmConfig
from trainer.common.fields import validated
from trainer.data.config import PrepareConfig
from trainer.runs.config import RunConfig
from trainer.workflows.requests import (
    AnalysisRequest,
    CompareRequest,
    EvaluationRequest,
    ExportRequest,
    GenerationRequest,
    HarnessRequest,
    InspectionRequest,
    MultipleChoiceRequest,
)

COUNT, NATURAL, POSITIVE, SHARE = "1 62", "0 62", "> 0", "0 .. 1"
RUN = {
    f"1 {1 << 26}": "data.piece_characters",
    COUNT: """
        trainer.max_steps trainer.max_tokens trainer.batch_size trainer.micro_batch_size
        trainer.log_every trainer.checkpoint_every trainer.keep_checkpoints trainer.keep_every
        trainer.rewind_after trainer.gc_every trainer.profile_steps[] strategy.shard_size
        data.validation_tokens data.test_tokens data.shuffle_group data.needles.names[2]
        data.needles.mentions[2] tokenizer.sample_megabytes drop.at_tokens drop.effect_sequences
        positional.windows[] positional.temperature.reference drop.windows[]
        phases.a.steps phases.a.tokens phases.a.batch_size phases.a.micro_batch_size
        phases.a.log_every phases.a.until.every phases.a.until.patience
        monitor.lengths_every monitor.windows monitor.probe_every monitor.probe_sequences
        monitor.benchmarks.every monitor.benchmarks.every_tokens monitor.benchmarks.limit
        evaluation.windows evaluation.last evaluation.batch_tokens evaluation.prefill_chunk
        evaluation.fit_windows
        evaluation.longrope.evaluations evaluation.longrope.windows evaluation.choice.texts
        evaluation.dope.r evaluation.needles.needles evaluation.needles.sinks
        evaluation.longbench.limit evaluation.many_shot.new_tokens""",
    NATURAL: """
        seed data.min_characters trainer.keep_best drop.anneal_steps schedule.warmup_steps
        drop.schedule.warmup_steps evaluation.longrope.seed evaluation.dope.heads
        evaluation.dope.seed evaluation.needles.seed evaluation.needles.changes
        evaluation.ruler.seed
        evaluation.longbench.seed evaluation.many_shot.seed""",
    "-62 62": """
        drop.layers[] drop.heads[] tokenizer.vocab_size evaluation.layers[]
        phases.a.rescale.layers[]""",
    "1 1024": "trainer.threads model.num_attention_heads model.num_key_value_heads",
    "1 1048576": "model.hidden_size",
    "1 16777216": "model.intermediate_size model.vocab_size",
    "1 2048": "model.num_hidden_layers",
    "1 65536": "model.head_dim",
    "0 1024": "data.num_workers",
    "2 2147483647": "data.sequence_length phases.a.sequence_length "
    "evaluation.training_length evaluation.tokens[]",
    "1 1000000": """
        monitor.lengths[] evaluation.needles.trials evaluation.ruler.trials
        evaluation.many_shot.trials""",
    "0 1000000": "monitor.trials",
    POSITIVE: """
        drop.slower_than drop.faster_than trainer.checkpoint_minutes trainer.step_timeout
        strategy.timeouts.start strategy.timeouts.collective strategy.timeouts.one_rank
        data.needles.weight phases.a.weights.x phases.a.until.flat""",
    "> 0 .. 1": "model.rms_norm_eps optimizer.eps",
    "> 0 .. 1000": """
        model.initializer_range optimizer.lr optimizer.muon_lr schedule.peak drop.schedule.peak""",
    "> 0 < 1": "data.validation data.test",
    "> 0 .. 1000000": "evaluation.choice.length evaluation.lengths[] monitor.benchmarks.lengths[]",
    "> 1 .. 1000000": "phases.a.rescale.factor evaluation.temperature.lengths[]",
    "1 .. 1000000": "evaluation.dynamic_ntk.alpha",
    "> 1 ..": "phases.a.rescale.base",
    SHARE: """
        data.needles.share data.needles.changes data.bad_rows
        schedule.final schedule.decay_fraction drop.schedule.final drop.schedule.decay_fraction
        positional.heads.x evaluation.weighted_rope[].tau evaluation.weighted_rope[].alpha
        evaluation.needles.depths[] evaluation.many_shot.depths[]""",
    "0 < 1": "optimizer.betas[2] optimizer.muon_momentum",
    "0 .. 1000": "optimizer.weight_decay trainer.z_loss",
    "0 .. 100": """
        positional.temperature.coefficient evaluation.temperature.grid[]
        evaluation.temperature.rope_id_coefficient""",
    "0 .. 10": "positional.temperature.exponent evaluation.temperature.rope_id_exponent",
    "0 .. 1000000": "evaluation.dope.sigma",
    "0.001 .. 1000000": "model.softmax.softcap model.softmax.final_softcap",
    "0.001 .. 1000": "positional.temperature.scale",
    "0 ..": "trainer.gradient_clip",
    "any": "phases.a.until.back_within",
}
ANALYSIS = {
    "2 62": "analysis.length analysis.frequency_entropy.frame",
    "6 62": "analysis.prefixes[] analysis.attenuation.choice_length",
    COUNT: """
        analysis.texts analysis.frequency_entropy.hop analysis.attenuation.tokens[]
        analysis.attenuation.texts""",
    NATURAL: "analysis.seed analysis.pairs[]",
    "-62 62": "analysis.layers[]",
    SHARE: "analysis.attenuation.alphas[] analysis.needle.depth",
    "1 1024": "threads",
}
BENCHMARK = {
    "1 1024": "threads",
    COUNT: "evaluation.limit evaluation.max_length evaluation.batch_tokens",
    "1 .. 1000000": "evaluation.factor",
}
OTHERS = [
    (
        ExportRequest,
        {"0 ..": "tolerance", "1 1024": "threads", "> 1 .. 1000000": "temperature_at"},
    ),
    (
        GenerationRequest,
        {
            "1 16777216": "max_new_tokens",
            "0 ..": "temperature",
            "> 0 .. 1": "top_p",
            NATURAL: "seed",
            "1 1024": "threads",
        },
    ),
    (InspectionRequest, {COUNT: "step samples characters"}),
    (PrepareConfig, {"1 1024": "workers"}),
    (
        SlurmConfig,
        {
            COUNT: "nodes cpus_per_task",
            "0 1024": "gpus_per_node",
            "1 65535": "signal_seconds",
            NATURAL: "max_retries prepare",
        },
    ),
    (PlanKeys, {"> 0 .. 1": "mfu"}),
]
TABLE = [
    (schema, bounds, key)
    for schema, table in [
        (RunConfig, RUN),
        (AnalysisRequest, ANALYSIS),
        (MultipleChoiceRequest, BENCHMARK),
        (HarnessRequest, BENCHMARK | {NATURAL: "evaluation.num_fewshot"}),
        *OTHERS,
    ]
    for bounds, keys in table.items()
    for key in keys.split()
]


def nested(key: str, value: Any) -> Any:
    """``{"a": {"b": [value]}}`` for ``a.b[]``, and two equal values for ``a.b[2]``."""
    for part in reversed(key.split(".")):
        name, _, items = part.partition("[")
        value = [value] * int(items[:-1] or 1) if items else value
        value = {name: value}
    return value


def within_and_beyond(bounds: str) -> tuple[list[Any], list[Any]]:
    """Values at the bounds, and values just beyond them; ``62`` stands for a power of two."""
    parts = bounds.split()
    if len(parts) == 2 and not {">", "<", ".."} & {*parts}:
        least, most = (
            int(x) if abs(int(x)) != 62 else math.copysign(1, int(x)) * (1 << 62) for x in parts
        )
        least, most = int(least), int(most)
        beyond = [least - 1, most + 1, True, 1.5, math.inf, "x"]
        return [least, most, float(least), str(most)], beyond
    good, bad = [], [math.inf, -math.inf, math.nan, True, "x", "nan"]
    if parts[0] == ">":
        good += [float(parts[1]) + 1e-9, str(float(parts[1]) + 1e-9)]
        bad.append(float(parts[1]))
    elif parts[0] != "any":
        good.append(float(parts[0]))
        bad.append(float(parts[0]) - 1e-9)
    if parts[-2:-1] == [".."]:
        good.append(float(parts[-1]))
        bad.append(float(parts[-1]) * (1 + 1e-9))
    elif parts[-2:-1] == ["<"]:
        good.append(1 - 1e-9)
        bad.append(float(parts[-1]))
    return good, bad


@pytest.mark.parametrize(("schema", "bounds", "key"), TABLE)
def test_values_at_the_bounds_are_taken_and_those_beyond_are_refused(schema, bounds, key):
    good, bad = within_and_beyond(bounds)
    for value in good:
        assert validated(schema, nested(key, value))[1] == []
    for value in bad:
        (problem, *_) = validated(schema, nested(key, value))[1]
        plain = problem.key.replace("[0]", "[]").replace("[1]", "[]").replace("[]", "")
        assert plain == key.replace("[2]", "").replace("[]", "")
        assert problem.message.startswith("expected ")
        assert str(value).lower() in problem.message.lower()


def test_the_table_has_every_number_of_every_configuration():
    schemas = {schema for schema, _, _ in TABLE} | {EvaluationRequest, CompareRequest}
    listed = {(schema, key.replace("[2]", "").replace("[]", "")) for schema, _, key in TABLE}
    run = {key.removeprefix("evaluation.") for schema, key in listed if schema is RunConfig}
    data = {key.removeprefix("data.") for key in run}
    missing = [
        f"{schema.__name__}: {key}"
        for schema in schemas
        for key in numbers(schema)
        # Groups that requests share with runs are listed once.
        if (schema, key) not in listed
        and key.removeprefix("evaluation.") not in run
        and key.removeprefix("text.") not in data
        and (AnalysisRequest, key) not in listed
        and not key.startswith(("phases.a.drop.", "phases.a.schedule.", "slurm."))
        and key not in ("drop.at", "time", "mem", "part", "analysis.chosen")
    ]
    assert missing == []


def numbers(schema: Any, path: str = "") -> list[str]:
    """Keys of numbers at any depth; ``a`` and ``x`` are names that users choose."""
    result = []
    for name, hint in get_type_hints(schema, include_extras=True).items():
        key = f"{path}{name}"
        if dataclasses.is_dataclass(schema) and name in schema.__dataclass_fields__:
            result += _numbers(hint, key)
    return result


def _numbers(hint: Any, key: str) -> list[str]:
    if dataclasses.is_dataclass(hint):
        return numbers(hint, f"{key}.")
    if hint in (int, float):
        return [key]
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        arguments = arguments[:1]
    if get_origin(hint) is dict:
        named = "a" if dataclasses.is_dataclass(arguments[1]) else "x"
        return _numbers(arguments[1], f"{key}.{named}")
    return list(dict.fromkeys(name for argument in arguments for name in _numbers(argument, key)))
