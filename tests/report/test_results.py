"""report.json: what is written is read back, strictly, or refused with a reason."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.examples import EXPERIMENT, cell, report
from trainer.common.errors import UserError
from trainer.evaluation.results import Arm, Cell, Drop, Observation, Reach, Report

fractions = st.floats(0, 1)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 10**12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), plain, max_size=3)
cells = st.builds(
    Cell,
    st.text(),
    st.text(),
    st.text(),
    st.integers(1, 10**6),
    st.floats(0.1, 100),
    st.lists(fractions, max_size=3).map(tuple),
    last_loss=numbers,
)
arms = st.builds(
    Arm,
    st.text(),
    st.text(),
    counts,
    counts,
    counts,
    numbers,
    st.lists(st.tuples(counts, numbers), max_size=3).map(tuple),
)
reaches = st.builds(
    Reach,
    counts,
    st.booleans(),
    counts,
    st.lists(counts, max_size=2).map(tuple),
    st.lists(numbers, max_size=2).map(tuple),
    st.lists(fractions, max_size=2).map(tuple),
    st.lists(counts, max_size=2).map(tuple),
    st.lists(numbers, max_size=2).map(tuple),
)
names = st.dictionaries(st.text(), st.text(), max_size=2)
reports = st.builds(
    Report,
    st.text(),
    counts,
    st.lists(cells, max_size=3, unique_by=lambda c: (c.model, c.method, c.task, c.length)).map(
        tuple
    ),
    names,
    names,
    st.lists(st.text(), max_size=2).map(tuple),
    objects,
    objects,
    st.lists(arms, max_size=3, unique_by=lambda arm: arm.name).map(tuple),
    st.none() | st.builds(Drop, counts, numbers, numbers, numbers),
    st.lists(
        st.builds(Observation, st.text(), st.text(), st.none() | st.booleans(), st.text()),
        max_size=2,
    ).map(tuple),
    objects,
    st.dictionaries(st.text(), fractions, max_size=2),
    objects,
    st.dictionaries(st.text(), st.lists(reaches, max_size=2).map(tuple), max_size=2),
)


@given(reports)
def test_a_report_survives_writing_and_reading(tmp_path_factory, report):
    path = tmp_path_factory.mktemp("report") / "report.json"
    report.write(path)
    assert Report.read(path) == report


def test_numbers_that_are_not_finite_become_null(tmp_path):
    made = report(cell([], last_loss=math.nan), config={"x": math.inf})
    made.write(tmp_path / "r.json")
    back = Report.read(tmp_path / "r.json")
    assert (back.cells[0].last_loss, back.config) == (None, {"x": None})


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.json"
    report().write(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        report(config={"not json": object()}).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.pop("cells"), "cells"),
        (lambda d: d["cells"][0].pop("method"), r"cells\.0\.method"),
        (lambda d: d["cells"][0].update(last_loss="high"), r"cells\.0\.last_loss"),
        (lambda d: d["cells"][0].update(scores=[97.3]), "between 0 and 1"),
        (lambda d: d["drop"].update(step=None), r"drop\.step"),
    ],
)
def test_a_malformed_report_names_the_fault(tmp_path, change, complaint):
    data = report(cell([1.0]), **EXPERIMENT).to_dict()
    change(data)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=complaint):
        Report.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"text"', "null"])
def test_only_a_json_object_is_a_report(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match="expected a report"):
        Report.read(tmp_path / "report.json")


def test_names_that_would_hide_each_other_are_refused():
    arm = Arm("a", "rope", 1, 1, 1)
    with pytest.raises(ValueError, match="2 arms are called a"):
        report(arms=(arm, arm))
    with pytest.raises(ValueError, match="2 cells are of RoPE / none / multi_key / 2048"):
        report(cell([1.0]), cell([0.0]))


def test_the_last_tokens_default_to_the_shortest_length():
    perplexity = cell([], task="perplexity", length=32)
    assert report(perplexity, config={"evaluation": {"last": 16}}).last == 16
    assert report(perplexity, config={"evaluation": {"last": None}}).last == 32
    assert report(cell([1.0], length=32)).last == 1024
    assert report(cell([], task="perplexity", length=2048)).last == 1024


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": (0.5,)}, "has 2 scores but 1 depths"),
        ({"labels": ("a", "b", "c")}, "has 2 scores but 3 labels"),
        ({"groups": (0,)}, "has 2 scores but 1 groups"),
        ({"losses": (4.0,), "edges": (0,)}, "has 1 losses but 1 edges"),
        ({"losses": (4.0,), "edges": (0, 1, 2)}, "has 1 losses but 3 edges"),
    ],
)
def test_fields_of_a_trial_have_one_length(fields, message):
    with pytest.raises(ValueError, match=message):
        cell([0.0, 1.0], **fields)
    cell([0.0, 1.0], depths=(0.0, 1.0), labels=("a", "b"), losses=(4.0,), edges=(0, 1))


@pytest.mark.parametrize("score", [-0.01, 1.01, math.nan])
def test_scores_are_fractions(score):
    with pytest.raises(ValueError, match="not between 0 and 1"):
        cell([0.5, score])
