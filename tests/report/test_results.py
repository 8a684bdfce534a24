"""report.json: what is written is read back, strictly, or refused with a reason."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.examples import example
from trainer.errors import UserError
from trainer.report.results import (
    Arm,
    Cell,
    Drop,
    LossByPosition,
    Observation,
    Reach,
    Report,
    wilson_interval,
)

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
    st.integers(1, 10**6),
    st.floats(0.1, 100),
    st.none() | fractions,
    st.none() | st.tuples(fractions, fractions),
    numbers,
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
by_position = st.lists(numbers, max_size=3).map(
    lambda losses: LossByPosition("m", 8, tuple(range(len(losses) + 1)), tuple(losses))
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
reports = st.builds(
    Report,
    st.text(),
    objects,
    objects,
    st.lists(arms, max_size=3, unique_by=lambda arm: arm.name).map(tuple),
    st.none() | st.builds(Drop, counts, numbers, numbers, numbers),
    st.lists(cells, max_size=3, unique_by=lambda c: (c.method, c.length)).map(tuple),
    st.lists(by_position, max_size=2).map(tuple),
    st.lists(
        st.builds(Observation, st.text(), st.text(), st.none() | st.booleans(), st.text()),
        max_size=2,
    ).map(tuple),
    objects,
    st.dictionaries(st.text(), numbers, max_size=2),
    objects,
    st.dictionaries(st.text(), st.lists(reaches, max_size=2).map(tuple), max_size=2),
)


@given(reports)
def test_a_report_survives_writing_and_reading(tmp_path_factory, report):
    path = tmp_path_factory.mktemp("report") / "report.json"
    report.write(path)
    assert Report.read(path) == report


def test_the_file_has_the_documented_shape(tmp_path):
    report = example()
    report.write(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert set(data) == {
        *("name", "config", "environment", "training", "drop", "table", "loss_by_position"),
        *("observations", "task", "temperature", "timing", "reach"),
    }
    assert set(data["training"]["arms"]) == {"RoPE", "DroPE"}
    assert data["drop"] == {"step": 80, "loss_before": 4.1, "loss_after": 6.0, "loss_end": 4.2}
    assert set(data["table"][0]) == {
        *("method", "length", "factor", "retrieval", "retrieval_ci", "loss")
    }


def test_the_same_report_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        example().write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_numbers_that_are_not_finite_become_null(tmp_path):
    report = Report("r", {"x": math.inf}, {}, table=(Cell("m", 8, 1.0, None, None, math.nan),))
    report.write(tmp_path / "r.json")
    back = Report.read(tmp_path / "r.json")
    assert (back.table[0].loss, back.config) == (None, {"x": None})


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.json"
    example().write(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        Report("r", {"not json": object()}, {}).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_report_is_one_clear_sentence(tmp_path):
    with pytest.raises(UserError, match=r"Cannot read the report .*absent.json"):
        Report.read(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.pop("training"), "'training' is missing"),
        (lambda d: d.pop("table"), None),  # has a default
        (lambda d: d["table"][0].pop("method"), r"table\.0\.method"),
        (lambda d: d["table"][0].update(loss="high"), r"table\.0\.loss"),
        (lambda d: d["table"][0].update(retrieval=97.3), "between 0 and 1"),
        (lambda d: d["drop"].update(step=None), r"drop\.step"),
        (lambda d: d["training"].update(arms=3), "not a report"),
    ],
)
def test_a_malformed_report_names_the_fault(tmp_path, change, complaint):
    data = example().to_dict()
    change(data)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    if complaint is None:
        assert Report.read(path).table == ()
        return
    with pytest.raises(UserError, match=complaint):
        Report.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"text"', "null"])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match="is not a report"):
        Report.read(tmp_path / "report.json")


def test_names_that_would_hide_each_other_are_refused():
    arm, cell = Arm("a", "rope", 1, 1, 1), Cell("m", 8, 1.0)
    with pytest.raises(ValueError, match="more than one arm is called a"):
        Report("r", {}, {}, arms=(arm, arm))
    with pytest.raises(ValueError, match="more than one cell"):
        Report("r", {}, {}, table=(cell, cell))


def test_losses_need_their_edges():
    with pytest.raises(ValueError, match="2 losses of 'm' need 3 edges"):
        LossByPosition("m", 8, (0, 4), (1.0, 2.0))


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), Table I, method 3.
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_the_wilson_interval_gives_published_values(successes, trials, interval):
    assert wilson_interval(successes, trials) == pytest.approx(interval, abs=5e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_wilson_limits_solve_the_score_equation(pair):
    successes, trials = pair
    p, z = successes / trials, 1.959964
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= p <= high <= 1
    for limit in (low, high):  # |p - limit| = z sqrt(limit (1 - limit) / n), squared
        assert (p - limit) ** 2 == pytest.approx(z**2 * limit * (1 - limit) / trials, abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(-1, 10), (11, 10), (0, 0)])
def test_what_is_no_success_rate_has_no_interval(successes, trials):
    with pytest.raises(ValueError, match="not a success rate"):
        wilson_interval(successes, trials)
