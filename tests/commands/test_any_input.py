"""Anything at any place of the files and values that are read: sound, or one sentence a fault."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.commands.malformed import files, runs
from trainer.commands.hydra.composing import compose_words
from trainer.common.errors import UserError
from trainer.interchange.pretrained import read_pretrained
from trainer.runs.checkpoints import MANIFEST, damage, load_decoder, read_state
from trainer.runs.config import RunConfig
from trainer.runs.models import find_candidate
from trainer.runs.parsing import parse
from trainer.runs.saved_state import STATE, read_run_state

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 10**6, 10**12, 2**63, 10**30, 0.5, 1e300]),
    st.integers(),
    st.floats(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
EXAMPLES = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def places_in(plain, path=()):
    """Every place in plain values, as a path with dots."""
    keys = plain if isinstance(plain, dict) else range(len(plain) if isinstance(plain, list) else 0)
    for key in keys:
        yield ".".join((*path, str(key)))
        yield from places_in(plain[key], (*path, str(key)))


def result_or_problems(function):
    """Return its result, or None if it refuses its input with problems of one line each."""
    try:
        return function()
    except UserError as error:
        problems = [*map(str, error.problems)]
    assert problems
    assert all(problem and "\n" not in problem for problem in problems)
    return None


@pytest.fixture(scope="module")
def checkpoint(finished):
    return finished[1].checkpoint


@pytest.fixture(scope="module")
def copied(checkpoint, tmp_path_factory):
    place = tmp_path_factory.mktemp("any") / "run" / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, place)
    return place


@EXAMPLES
@given(st.data())
def test_any_value_in_a_description(checkpoint, copied, data):
    state = json.loads((checkpoint / STATE).read_text())
    place = data.draw(st.sampled_from(list(places_in(state))))
    runs.put(state, place, data.draw(VALUES | st.just(runs.GONE)))
    (copied / STATE).write_text(json.dumps(state))
    runs.vouch_for(copied)

    def read():
        state = read_state(copied)
        load_decoder(copied, state)
        read_run_state(copied, state)
        return find_candidate(str(copied))

    result_or_problems(read)


@EXAMPLES
@given(VALUES | st.dictionaries(st.text(max_size=9), st.lists(VALUES, max_size=3), max_size=3))
def test_any_manifest(copied, values):
    (copied / MANIFEST).write_text(json.dumps(values))
    assert damage(copied)


@EXAMPLES
@given(st.sampled_from([*files.LLAMA, "rope_scaling", "rope_theta", "head_dim"]), VALUES)
def test_any_value_in_a_published_configuration(tmp_path, key, value):
    shutil.rmtree(tmp_path / "published", ignore_errors=True)
    files.model(tmp_path, {key: value}, weights=files.NO_TENSORS)
    assert result_or_problems(lambda: read_pretrained(str(tmp_path / "published"))) is None


DEFAULTS = compose_words([]).without_kind("evaluation")[0]
KEYS = [key for key in places_in(DEFAULTS) if key not in ("plugins", "model.from_pretrained")]
"""But for those that look for files, or for a model on the network."""


@EXAMPLES
@given(st.sampled_from(KEYS), VALUES)
def test_any_value_in_a_configuration(key, value):
    values = copy.deepcopy(DEFAULTS)
    runs.put(values, key, value)
    config = result_or_problems(lambda: parse(RunConfig, values))
    if config is not None:
        assert result_or_problems(lambda: parse(RunConfig, asdict(config))) == config
