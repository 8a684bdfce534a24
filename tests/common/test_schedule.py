"""When the drop happens, which drops are impossible, and learning rates in closed form."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
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
    ],
)
def test_the_step_of_a_drop(drop, step):
    assert drop.step(max_steps=1000) == step


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
    return [ScheduleConfig(**schedule).over(length)(step) for step in range(length)]


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
    rates = [schedule.over(length)(step) for step in range(length)]
    assert all(0 < rate <= schedule.peak * (1 + 1e-12) or schedule.final == 0 for rate in rates)
    assert min(rates) >= 0
    assert all(rate >= schedule.final * schedule.peak - 1e-9 for rate in rates[50:])
    if schedule.name == "cosine" and length > schedule.warmup_steps:
        assert schedule.over(length)(length) == pytest.approx(schedule.peak * schedule.final)


@given(schedules, st.integers(1, 200))
@example(ScheduleConfig("wsd", warmup_steps=10, decay_fraction=1.0), 40)
@example(ScheduleConfig("wsd", warmup_steps=40, decay_fraction=0.2), 40)
@example(ScheduleConfig("cosine", warmup_steps=40), 40)
def test_rates_are_at_the_peak_when_the_warmup_ends_and_never_rise_after_it(schedule, length):
    """Also where the decay would begin within the warmup."""
    factor, warmup = schedule.over(length), schedule.warmup_steps
    rates = [factor(step) for step in range(warmup, warmup + length + 1)]
    assert rates[0] == pytest.approx(schedule.peak)
    assert all(later <= rate * (1 + 1e-12) for rate, later in pairwise(rates))


@given(schedules, st.integers(0, 200), st.floats(0.1, 5))
def test_the_peak_multiplies_everything(schedule, step, by):
    louder = replace(schedule, peak=schedule.peak * by)
    assert louder.over(100)(step) == pytest.approx(by * schedule.over(100)(step))
