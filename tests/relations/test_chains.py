"""A chain of phases is, up to the end of each phase, the run of the phases until there.

Every phase has lengths, sizes, schedule, texts and a change unlike those of its neighbours. A value
that is taken from the run, from the first phase or from the last one changes a result here.
"""

from __future__ import annotations

import csv
import json

import pytest

from tests.relations.test_phases import VALUES, phase_values
from tests.small_runs import trained_in
from trainer.runs.checkpoints import load_decoder, read_state
from trainer.runs.config import RunConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of, tokens_at, training_length_at

CHAIN = {
    "first": phase_values(3, 64, 4, 2, 1, 1.0, 1.0),
    "slower": phase_values(2, 48, 2, 1, 1, 0.5, 3.0, rescale={"method": "pi", "factor": 2.0}),
    "again": phase_values(2, 56, 2, 2, 1, 0.6, 3.0, rescale={"method": "yarn", "factor": 3.0}),
    "dropped": phase_values(
        3, 40, 6, 3, 1, 0.7, 3.0, drop={"anneal_steps": 2}, optimizer_state="reset"
    ),
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
