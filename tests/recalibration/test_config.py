"""When the drop happens, which drops are impossible, and learning rates in closed form."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import DropConfig, ScheduleConfig


@pytest.mark.parametrize(
    ("drop", "step"),
    [
        (DropConfig(), None),
        (DropConfig(at=85), 85),
        (DropConfig(at=0.85), 850),
        (DropConfig(at=1), 1),
        (DropConfig(at=1.0), 1000),
        (DropConfig(at_tokens=64_000), 500),
        (DropConfig(at_tokens=64_001), 501),
        (DropConfig(at_tokens=1), 1),
    ],
)
def test_the_step_of_a_drop(drop, step):
    assert drop.step(max_steps=1000, tokens_per_step=128) == step


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_at_tokens_is_the_first_step_by_which_so_many_were_seen(tokens, per_step):
    step = DropConfig(at_tokens=tokens).step(10**9, per_step)
    assert (step - 1) * per_step < tokens <= step * per_step


@pytest.mark.parametrize(
    ("drop", "start"),
    [
        (DropConfig(at=0), "drop.at: 0 is step 0,"),
        (DropConfig(at=1000), "drop.at: 1000 is step 1000,"),
        (DropConfig(at=1.0), "drop.at: 1.0 is step 1000,"),
        (DropConfig(at=-0.5), "drop.at: -0.5 is step -500,"),
        (DropConfig(at=85.0), "drop.at: 85.0 is step 85000,"),
        (DropConfig(at_tokens=10**6), "drop.at_tokens: 1000000 is step 7813,"),
        (DropConfig(at=5, at_tokens=640), "drop: give either drop.at or drop.at_tokens, not both"),
        (DropConfig(layers=[0, 4]), "drop.layers: layer 4 does not exist in a model of 4 layers"),
        (DropConfig(layers=[-5]), "drop.layers: layer -5 does not exist"),
        (DropConfig(heads=[2]), "drop.heads: head 2 does not exist in a model of 2 key-"),
        (DropConfig(heads=[-3]), "drop.heads: head -3 does not exist in a model of 2 key-"),
        (DropConfig(layers=[]), "drop.layers: an empty list drops nothing"),
        (DropConfig(heads=[]), "drop.heads: an empty list drops nothing"),
    ],
)
def test_an_impossible_drop_is_named(drop, start):
    (problem,) = map(str, drop.problems(1000, 128, 4, 2, 64))
    assert problem.startswith(start)


def test_a_problem_names_the_key_that_decides_the_step():
    """``at_tokens`` decides the step, so the step it leads to is reported under its name."""
    problems = [*map(str, DropConfig(at=5, at_tokens=10**6).problems(1000, 128, 4, 2, 64))]
    assert problems[1].startswith("drop.at_tokens: 1000000 is step 7813,")


@pytest.mark.parametrize(
    "drop",
    [
        DropConfig(),
        DropConfig(at=1),
        DropConfig(at=999),
        DropConfig(at=0.5),
        DropConfig(effect_sequences=1),
        DropConfig(layers=[-4, -1, 3]),
        DropConfig(at=5, windows=[64, None]),
        DropConfig(to="alibi"),
        DropConfig(at=5, enabled=False),
        DropConfig(at=10**9, enabled=False),
    ],
)
def test_possible_drops(drop):
    assert drop.problems(1000, 128, 4, 2, 64) == []


def test_trained_weights_may_drop_at_once():
    assert DropConfig(at=0).problems(10, 1, 4, 2, 64, trained=True) == []
    (problem,) = map(str, DropConfig(at=-1).problems(10, 1, 4, 2, 64, trained=True))
    assert "the run has steps 0 to 9 to drop at" in problem
    assert DropConfig(at=85, enabled=False).step(1000, 128) is None


def test_a_drop_in_a_run_of_one_step_asks_for_more_steps():
    (problem,) = map(str, DropConfig(at=0.85).problems(1, 128, 4, 2, 64))
    assert problem.startswith("drop.at: the run has a single step, and a drop needs one before it")


fractions = st.floats(0, 1)
schedules = st.builds(
    ScheduleConfig,
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.floats(0.01, 10),
    st.integers(0, 50),
    fractions,
    fractions,
)


def curve(length=100, **schedule):
    return [ScheduleConfig(**schedule).factor(step, length) for step in range(length)]


def test_warmup_is_linear_and_ends_at_the_peak():
    assert curve(warmup_steps=4, peak=2.0)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_cosine_in_closed_form():
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * t / 90)) / 2 for t in range(90)]
    assert curve(name="cosine", warmup_steps=10)[10:] == pytest.approx(expected)


def test_wsd_stays_and_falls_linearly_over_its_last_fifth():
    rates = curve(name="wsd", warmup_steps=10, final=0.0)
    assert rates[10:80] == [1.0] * 70
    assert rates[80:] == pytest.approx([1 - t / 20 for t in range(20)])


def test_constant_stays():
    assert curve(name="constant", warmup_steps=10, peak=3.0)[10:] == [3.0] * 90


def test_wsd_without_decay_is_constant():
    assert curve(name="wsd", decay_fraction=0.0) == [1.0] * 100


@given(schedules, st.integers(1, 200))
def test_rates_lie_between_zero_and_the_peak_and_reach_final_at_the_end(schedule, length):
    rates = [schedule.factor(step, length) for step in range(length)]
    assert all(0 < rate <= schedule.peak * (1 + 1e-12) or schedule.final == 0 for rate in rates)
    assert min(rates) >= 0
    assert all(rate >= schedule.final * schedule.peak - 1e-9 for rate in rates[50:])
    if schedule.name == "cosine" and length > schedule.warmup_steps:
        assert schedule.factor(length, length) == pytest.approx(schedule.peak * schedule.final)


@given(schedules, st.integers(0, 200), st.floats(0.1, 5))
def test_the_peak_multiplies_everything(schedule, step, by):
    louder = replace(schedule, peak=schedule.peak * by)
    assert louder.factor(step, 100) == pytest.approx(by * schedule.factor(step, 100))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([], "drop.windows: expected at least one entry, or null."),
        ([16, 65], "drop.windows: a window of 65 tokens does not fit sequences of 64; expected 1"),
        ([16] * 5, "drop.windows: expected one for each of the 4 layers at most, got 5"),
    ],
)
def test_windows_after_a_drop_fit_its_sequences(windows, message):
    (problem,) = map(str, DropConfig(at=5, windows=windows).problems(1000, 128, 4, 2, 64))
    assert problem.startswith(message)
