"""What every phase overrides has no effect on a run, and a wrong value is found in any phase.

If all phases have a value of their own, the run's value is read by nothing: whatever is computed of
two runs that differ in it alone must be the same.
"""

from __future__ import annotations

import csv
import json
import logging
import re
from dataclasses import fields, replace

import lightning as L
import pytest
import yaml

from tests.commands.malformed.words import RUN as MALFORMED
from tests.relations.leaves import nested
from tests.relations.test_controls import REMARKS
from tests.small_runs import SMALLEST, trained_in
from trainer.common.errors import UserError
from trainer.data.corpus import prepare_corpus
from trainer.runs import memory
from trainer.runs.arms import gpus_that_fit
from trainer.runs.checkpoints import read_state
from trainer.runs.config import PhaseConfig, RunConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import (
    kept_steps,
    phase_at,
    phases_of,
    stretch_end,
    tokens_at,
    training_length_at,
)
from trainer.runs.ranks import Ranks
from trainer.runs.training_config import StrategyConfig
from trainer.training.run import train
from trainer.workflows import experiment, remarks
from trainer.workflows import plan as plans
from trainer.workflows.plan import PlanRequest
from trainer.workflows.training_text import layouts, readings

OVERRIDDEN = {
    "sequence_length": "data.sequence_length",
    "batch_size": "trainer.batch_size",
    "micro_batch_size": "trainer.micro_batch_size",
    "log_every": "trainer.log_every",
    "schedule": "schedule",
    "weights": "data.mixture",
}
"""Keys of a phase, and the keys of a run that they override."""
OWN = {"steps", "tokens", "drop", "rescale", "optimizer_state", "until"}
"""Keys of a phase that a run does not have."""


def test_every_key_of_a_phase_is_one_of_these():
    assert {field.name for field in fields(PhaseConfig)} == {*OVERRIDDEN, *OWN}


def phase_values(steps, length, batch, micro, log, peak, a, **more):
    """Plain values of a phase that overrides everything."""
    schedule = {"name": "constant", "peak": peak, "warmup_steps": 1}
    sizes = {"sequence_length": length, "batch_size": batch, "micro_batch_size": micro}
    of_texts = {"a": a, "b": 1.0}
    return {
        "steps": steps,
        **sizes,
        "log_every": log,
        "schedule": schedule,
        "weights": of_texts,
        **more,
    }


PHASES = {
    "first": phase_values(3, 32, 4, 2, 1, 1.0, 1.0),
    "long": phase_values(2, 64, 2, 1, 2, 0.5, 3.0, rescale={"method": "pi"}),
    "dropped": phase_values(3, 64, 2, 2, 3, 0.7, 3.0, drop={"anneal_steps": 2}),
    "short": phase_values(2, 16, 6, 3, 1, 0.2, 2.0),
}  # fmt: skip
MIXTURE = {"a": {"weight": 1.0}, "b": {"weight": 1.0, "min_characters": 1}}
VALUES = {
    "name": "phased",
    "run_dir": "runs/phased",
    "model": {**SMALLEST, "vocab_size": 300},
    "positional": {"layers": ["rope"]},
    "drop": {"at": None, "effect_sequences": 4},
    "data": {"source": "files", "files": ["a.jsonl"], "sequence_length": 24, "mixture": MIXTURE},
    "tokenizer": {"vocab_size": 300},
    "trainer": {"batch_size": 4, "micro_batch_size": 4, "log_every": 2},
    "monitor": {"lengths_every": None},
    "phases": PHASES,
}
OTHER = {
    "data.sequence_length": 20,
    "trainer.batch_size": 40,
    "trainer.micro_batch_size": 2,
    "trainer.log_every": 7,
    "trainer.max_steps": 77,
    "trainer.max_tokens": 1234,
    "schedule.name": "wsd",
    "schedule.peak": 3.0,
    "schedule.warmup_steps": 500,
    "schedule.final": 0.5,
    "schedule.decay_fraction": 0.7,
    "data.mixture": {"a": {"weight": 9.0}, "b": {"weight": 0.5, "min_characters": 1}},
}
"""Other values of what all phases override."""


def of_phases(config):
    """Return all that a phase says of itself, without the run that it is a part of."""
    values = []
    for phase in phases_of(config):
        plain = {k: v for k, v in vars(phase).items() if k not in ("config", "stretch")}
        factors = [phase.factor(step) for step in range(phase.start, phase.end)]
        values += [plain, factors, phase.stretch, phase.change, phase.seed, phase.config.data]
        values += [phase.config.trainer.accumulation(), phase.tokens_at(phase.end)]
        values.append(replace(phase.config.trainer, max_tokens=None))
        values.append(phase.first_sample(phase.end - 1, [(1, 5)]))
    return values


DDP = StrategyConfig("ddp")


def counted(config):
    """Return steps, tokens, lengths and ends of a run."""
    ends = range(config.trainer.max_steps + 1)
    return [
        config.trainer.max_steps,
        [tokens_at(config, step) for step in ends],
        [training_length_at(config, step) for step in ends],
        [stretch_end(phases_of(config), step) for step in ends],
        kept_steps(config),
        config.drop_step,
        config.training_length,
        config.longest_sequence,
        [gpus_that_fit(replace(config, strategy=DDP), nodes) for nodes in (1, 2, 3)],
        [(data.packing, data.sequence_length) for data in readings(config)],
        [replace(layout, training_length=1) for layout in layouts(config)],
        [layout.training_length for layout in layouts(config)][1:],
    ]


@pytest.mark.parametrize("key", OTHER)
def test_what_every_phase_overrides_decides_on_nothing(key, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 20)
    monkeypatch.setattr(plans, "step_memory", of_the_configuration)
    monkeypatch.setattr(plans, "product_peak", lambda threads: 1e12)
    run, other = parse(RunConfig, VALUES), parse(RunConfig, merged(VALUES, nested(key, OTHER[key])))
    assert run != other or key in ("trainer.max_steps",)
    for computed in (of_phases, counted, checked, planned):
        assert computed(run) == computed(other), computed.__name__
    messages = []
    for config in (run, other):
        caplog.clear()
        for name in REMARKS:
            getattr(remarks, name)({"main": config})
        messages.append(caplog.messages)
    assert messages[0] == messages[1]


def of_the_configuration(config, ranks, exact):
    """Stand in for the memory of a step: all that it depends on."""
    rows = config.trainer.micro_batch_size or config.trainer.batch_size // ranks.world_size
    sizes = rows, config.data.sequence_length, config.trainer.batch_size
    return {f"{name} {size}": size << 20 for name, size in zip("rlb", sizes, strict=True)}


def checked(config):
    """Return what checks find in a run and each of its phases, on a machine with little memory."""
    arms = {"main": config}
    problems = [
        *experiment.machine_problems(arms, 1),
        *experiment.experiment_problems(arms, 5, 5),
        *experiment.start_problems(arms, Ranks()),
    ]
    return [*map(str, problems)]


def planned(config):
    """Return the plan of a run whose text is not here."""
    return [*plans.plan(PlanRequest(config, 1, 1, "a100", 0.4))]


@pytest.fixture(scope="module")
def texts(base):
    """Plain values of a run that is trained on two texts."""
    data = {key: base["data"][key] for key in ("source", "files", "cache_dir")}
    mixture = {"a": {"weight": 1.0}, "b": {"weight": 1.0, "min_characters": 40}}
    values = merged(VALUES, {"data": {**data, "mixture": mixture}})
    threads = {"trainer": {"threads": 1, "checkpoint_every": 2, "keep_checkpoints": 100}}
    model = {"vocab_size": None, "initializer": "fan_in"}
    return merged(values, threads | {"model": model})


def test_what_every_phase_overrides_is_not_read_while_it_trains(texts, tmp_path):
    """The same rows, states and weights; monitors are left out, whose unit is the run's length."""
    changes = {}
    for key, value in OTHER.items():
        if key not in ("trainer.max_steps", "trainer.max_tokens", "data.mixture"):
            changes = merged(changes, nested(key, value))
    changes = merged(changes, {"data": {"mixture": {"a": {"weight": 9.0}, "b": {"weight": 0.5}}}})
    left_out = "tokens_per_second", "time/", "memory"
    results = []
    for name, change in (("run", {}), ("other", changes)):
        _, trained = trained_in(tmp_path / name, texts, **change)
        state = read_state(trained.checkpoint)
        del state["config"], state["data"]["corpus"]
        with (tmp_path / name / "metrics.csv").open() as file:
            rows = [
                {k: v for k, v in row.items() if not k.startswith(left_out)}
                for row in csv.DictReader(file)
            ]
        done = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        effects = {phase: vars(effect) for phase, effect in trained.effects.items()}
        results.append([rows, json.loads(json.dumps(state)), done, effects])
    assert results[0] == results[1]


ROWS = [line.split(" | ")[0].strip() for line in MALFORMED.splitlines() if line.strip()]
IN_PHASES = {
    run: name for name, run in OVERRIDDEN.items() if name in ("sequence_length", "batch_size",
    "micro_batch_size", "log_every")
} | {"schedule": "schedule", "drop": "drop"}  # fmt: skip
"""Keys of a run whose values a phase may have, under another name."""


def words():
    """Yield every malformed pair of key and value of the table that names a leaf of a run."""
    for row in ROWS:
        if re.fullmatch(r"[a-z_.0-9]+=\S+", row):
            key, _, value = row.partition("=")
            group = key.split(".")[0]
            if "." in key and group not in ("evaluation", "hydra", "controls", "phases", "plugins"):
                yield key, yaml.safe_load(value)


SINGLE = {
    "name": "one", "run_dir": "runs/one", "model": VALUES["model"], "drop": {"at": None},
    "data": {"source": "files", "files": ["a.jsonl"], "sequence_length": 32},
    "tokenizer": {"vocab_size": 300}, "trainer": {"max_steps": 12, "batch_size": 4},
}  # fmt: skip


def keys_of(values):
    """Return the keys of what is wrong."""
    try:
        config = parse(RunConfig, values)
    except UserError as error:
        return {problem.key for problem in error.problems}
    arms = experiment.arms_of(config)
    problems = [*experiment.machine_problems(arms, 1), *experiment.experiment_problems(arms, 1, 1)]
    return {problem.key for problem in problems}


def test_a_value_that_a_run_cannot_have_is_found_in_a_control_and_in_a_phase():
    sound, missed, in_phases = keys_of(SINGLE), [], 0
    for key, value in words():
        change = nested(key, value)
        keys = keys_of(merged(SINGLE, change)) - sound
        wrong = [name for name in keys if "model.from" not in name]
        if not wrong:
            continue
        of_control = keys_of(merged(SINGLE, {"controls": {"x": {"label": "X", **change}}}))
        if not any(name.startswith("controls.x") for name in of_control):
            missed.append(f"controls.x.{key}={value!r}: {of_control}")
        name = next((run for run in IN_PHASES if f"{key}.".startswith(f"{run}.")), None)
        if name is None or key.startswith(("drop.at", "drop.enabled", "drop.schedule", "drop.eff")):
            continue
        in_phases += 1
        place = IN_PHASES[name] + key.removeprefix(name)
        two = {"a": {"steps": 6}, "b": {"steps": 6, **nested(place, value)}}
        of_phase = keys_of(merged(SINGLE, {"phases": two}))
        if not any(name.startswith("phases.b") for name in of_phase) and value is not None:
            missed.append(f"phases.b.{place}={value!r}: {of_phase}")
    assert missed == []
    assert in_phases > 10


class Rhythm(L.Callback):
    """Compares the rhythm of all callbacks with that of the phase, before each step."""

    def on_train_batch_start(self, trainer, module, batch, index):
        phase = phase_at(module.phases, trainer.global_step)
        rhythms = {x.log_every for x in trainer.callbacks if hasattr(x, "log_every")}
        assert rhythms == {phase.config.trainer.log_every}


def test_callbacks_follow_the_rhythm_of_their_phase(texts, tmp_path):
    config = parse(RunConfig, {**texts, "run_dir": str(tmp_path / "run")})
    train(config, prepare_corpus(config.data, config.tokenizer), callbacks=[Rhythm()])
