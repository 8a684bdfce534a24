"""A chain of phases is the run of its phases one by one.

Until the end of each phase it gives the results of the shorter chain. What every phase sets for
itself is read from the run by nothing. Each phase is the run that begins with the weights of the
last one and does the same.
"""

from __future__ import annotations

import pytest
import torch

from tests.comparing import checkpoint_of, contents_of, rows_of
from tests.small_runs import trained_in
from trainer.checkpoint import read_state
from trainer.runs.parsing import merged
from trainer.runs.phases import phases_of

pytestmark = pytest.mark.slow


def phase(steps, length, batch, micro, log, peak, a, **more):
    """Plain values of a phase that sets everything."""
    return {
        "steps": steps,
        "sequence_length": length,
        "batch_size": batch,
        "micro_batch_size": micro,
        "schedule": {"name": "constant", "peak": peak, "warmup_steps": 1},
        "weights": {"a": a, "b": 1.0},
        **more,
    }


CHAIN = {
    "first": phase(3, 64, 4, 2, 1, 1.0, 1.0),
    "slower": phase(2, 48, 2, 1, 1, 0.5, 3.0, rescale={"method": "pi", "factor": 2.0}),
    "again": phase(2, 56, 2, 2, 1, 0.6, 3.0, rescale={"method": "yarn", "factor": 3.0}),
    "dropped": phase(3, 40, 6, 3, 1, 0.7, 3.0, drop={}, optimizer_state="reset"),
    "last": phase(2, 16, 3, 3, 1, 0.2, 2.0, drop={"to": "alibi"}),
}
OTHER = {
    "data": {
        "sequence_length": 20,
        "mixture": {"a": {"weight": 9.0}, "b": {"weight": 0.5}},
    },
    "trainer": {"batch_size": 40, "micro_batch_size": 2},
    "schedule": {"name": "wsd", "peak": 3.0, "warmup_steps": 500, "final": 0.5},
}
"""Other values of what all phases set."""


@pytest.fixture(scope="module")
def chain(base, tmp_path_factory):
    """Plain values of the run of all phases, trained on two texts."""
    other = tmp_path_factory.mktemp("text") / "b.txt"
    other.write_text("".join(f"Number {i} of {i % 7} other words. \n" for i in range(4000)))
    texts = {"a": {"weight": 1.0}, "b": {"weight": 1.0, "files": [str(other)]}}
    changes = {
        "data": {"mixture": texts, "needles": {"share": 0.0}},
        "model": {"qk_norm": {"when": "never"}},
        "drop": {"at": None},
    }
    return merged({**base, "phases": CHAIN}, changes)


@pytest.fixture(scope="module")
def whole(chain, tmp_path_factory):
    """The run of all phases."""
    return trained_in(tmp_path_factory.mktemp("chain") / "run", chain)


def state_at(config, step):
    """Tensors, layout and counters of a checkpoint."""
    state = read_state(checkpoint_of(config, step))
    kept = {key: state[key] for key in ("step", "layout", "tally", "effects")}
    return contents_of(checkpoint_of(config, step)), kept


def assert_same(first, second):
    assert first[1] == second[1]
    assert first[0].keys() == second[0].keys()
    for name, value in first[0].items():
        assert torch.equal(value, second[0][name]), name


@pytest.mark.parametrize("count", range(1, len(CHAIN)))
def test_a_chain_trains_as_its_first_phases_do_alone(count, chain, whole, tmp_path):
    first = {name: CHAIN[name] for name in [*CHAIN][:count]}
    config, _ = trained_in(tmp_path / "run", {**chain, "phases": first})
    rows = rows_of(config)
    assert rows == rows_of(whole[0])[: len(rows)]
    for of_whole, alone in zip(phases_of(whole[0]), phases_of(config), strict=False):
        for name in ("start", "end", "tokens", "samples", "has_change", "seed"):
            assert getattr(of_whole, name) == getattr(alone, name), (alone.name, name)
        assert_same(state_at(whole[0], alone.end), state_at(config, alone.end))


def test_what_every_phase_sets_is_not_read_while_it_trains(chain, whole, tmp_path):
    config, _ = trained_in(tmp_path / "run", chain, **OTHER)
    assert rows_of(config) == rows_of(whole[0])
    assert_same(state_at(config, None), state_at(whole[0], None))


def test_a_phase_is_the_run_that_begins_with_the_weights_before_it(chain, whole, tmp_path):
    """The drop resets the optimizer and begins an order of samples, so that weights are all it
    takes over."""
    config, _ = whole
    number = [*CHAIN].index("dropped")
    begin = phases_of(config)[number]
    alone = {
        **chain,
        "seed": begin.seed - config.seed,
        "phases": {"dropped": CHAIN["dropped"]},
        "model": {
            "from_run": str(checkpoint_of(config, begin.start)),
            "qk_norm": {"when": "never"},
        },
    }
    assert begin.samples == 0
    begun, _ = trained_in(tmp_path / "run", alone)
    ours, theirs = (
        contents_of(checkpoint_of(each, step)) for each, step in ((config, begin.end), (begun, 3))
    )
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
