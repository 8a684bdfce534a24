"""Every phase decides for itself, and a chain of phases is the run of the phases until there.

If all phases have a value of their own, the run's value is read by nothing: runs that differ in it
alone are the same. Up to the end of each phase, a chain gives the results of the shorter chain.
"""

from __future__ import annotations

import csv
import json

import pytest

from tests.small_runs import SMALLEST, trained_in
from trainer.runs.checkpoints import load_decoder, read_state
from trainer.runs.config import RunConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of, tokens_at, training_length_at

pytestmark = pytest.mark.slow


def nested(key, value):
    """Return ``{"a": {"b": value}}`` for the key ``a.b``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


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
    "dropped": phase_values(3, 64, 2, 2, 3, 0.7, 3.0, drop={}),
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


CHAIN = {
    "first": phase_values(3, 64, 4, 2, 1, 1.0, 1.0),
    "slower": phase_values(2, 48, 2, 1, 1, 0.5, 3.0, rescale={"method": "pi", "factor": 2.0}),
    "again": phase_values(2, 56, 2, 2, 1, 0.6, 3.0, rescale={"method": "yarn", "factor": 3.0}),
    "dropped": phase_values(3, 40, 6, 3, 1, 0.7, 3.0, drop={}, optimizer_state="reset"),
    "last": phase_values(2, 16, 3, 3, 1, 0.2, 2.0, drop={"to": "alibi"}),
}
NAMES = [*CHAIN]
OF_TIME = "tokens_per_second", "time/", "memory"


@pytest.fixture(scope="module")
def values(base):
    """Plain values of the run with all phases; it is trained on two texts."""
    data = {key: base["data"][key] for key in ("source", "files", "cache_dir")}
    mixture = {"a": {"weight": 1.0}, "b": {"weight": 1.0, "min_characters": 40}}
    threads = {"trainer": {"threads": 1, "checkpoint_every": 100, "keep_checkpoints": 100}}
    model = {"vocab_size": None, "initializer": "fan_in"}
    changes = {"data": {**data, "mixture": mixture}, "model": model, **threads}
    return merged({**VALUES, "phases": CHAIN}, changes)


def beginning(values, count):
    """Return the values of a run of the first phases."""
    return {**values, "phases": {name: CHAIN[name] for name in NAMES[:count]}}


def results(directory, values):
    """Train; return rows, weights and layout at the end of each phase, and effects."""
    config, trained = trained_in(directory, values)
    with (directory / "metrics.csv").open() as file:
        rows = [
            {k: v for k, v in row.items() if v and not k.startswith(OF_TIME)}
            for row in csv.DictReader(file)
        ]
    ends = {}
    for phase in phases_of(config):
        place = directory / "checkpoints" / f"step-{phase.end:06}"
        state = read_state(place)
        decoder = load_decoder(place, state)
        weights = {name: tensor.tolist() for name, tensor in decoder.state_dict().items()}
        ends[phase.name] = weights, decoder.layout, json.loads(json.dumps(state["tally"]))
    effects = {phase: vars(effect) for phase, effect in trained.effects.items()}
    return rows, ends, effects


@pytest.fixture(scope="module")
def whole(values, tmp_path_factory):
    """Results of the run with all phases."""
    return results(tmp_path_factory.mktemp("chain") / "run", values)


@pytest.mark.parametrize("count", range(1, len(CHAIN)))
def test_a_chain_trains_as_its_first_phases_do_alone(count, values, whole, tmp_path):
    rows, ends, effects = results(tmp_path / "run", beginning(values, count))
    assert rows == whole[0][: len(rows)]
    assert ends == {name: whole[1][name] for name in NAMES[:count]}
    assert effects == {name: effect for name, effect in whole[2].items() if name in NAMES[:count]}


@pytest.mark.parametrize("count", range(1, len(CHAIN)))
def test_a_chain_is_counted_as_its_first_phases_are_alone(count, values):
    whole, begun = (parse(RunConfig, merged(x, {})) for x in (values, beginning(values, count)))
    for phase, alone in zip(phases_of(whole), phases_of(begun), strict=False):
        steps = range(phase.start, phase.end)
        assert [phase.factor(step) for step in steps] == [alone.factor(step) for step in steps]
        for name in ("start", "end", "tokens", "order", "order_start", "samples", "change", "seed"):
            assert getattr(phase, name) == getattr(alone, name), (phase.name, name)
    for step in range(begun.trainer.max_steps + 1):
        assert tokens_at(whole, step) == tokens_at(begun, step)
        assert training_length_at(whole, step) == training_length_at(begun, step)
