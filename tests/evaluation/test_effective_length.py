"""Effective lengths of all combinations of scores against a plain search."""

import itertools

import pytest

from trainer.evaluation.statistics import Estimate, effective_length, estimate

C = 64


def scores(*rates, lengths=(64, 128, 256, 512)):
    """Estimates of 100 trials at each length, from rates in %; None for not measured."""
    return {
        n: None if rate is None else estimate([1.0] * rate + [0.0] * (100 - rate))
        for n, rate in zip(lengths, rates, strict=False)
    }


def test_the_first_length_below_the_threshold_ends_the_search():
    rates = (100, 90, 85, 84, 40)
    for of_each in itertools.product(rates, repeat=3):
        expected, held = C, True
        for length, rate in zip((128, 256, 512), of_each, strict=True):
            held = held and 100 * rate >= 85 * 100
            expected = length if held else expected
        result = effective_length(scores(100, *of_each), C)
        assert result == (expected, not held)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((80, 68, 67), (128, True)),  # 85% of 80% is 68%
        ((80, 90, 68), (256, False)),
        ((80, 90, None, 90), (128, False)),
        ((100, 0), (64, True)),
        ((0, 50), (0, True)),
    ],
)
def test_scores_that_fall_are_missing_or_at_chance_end_it(rates, expected):
    assert effective_length(scores(*rates), C) == expected


@pytest.mark.parametrize("rates", [(90,), (90, None), (None, 90)])
def test_without_the_training_length_and_a_longer_one_there_is_no_effective_length(rates):
    assert effective_length(scores(*rates), C) is None


def test_shorter_lengths_do_not_count():
    result = effective_length(scores(10, 80, 80, lengths=(32, 64, 128)), C)
    assert result == (128, False)


def test_rounding_does_not_lose_a_length():
    base, longer = Estimate(0.3, 0.2, 0.4), Estimate(0.255, 0.2, 0.3)
    assert longer.mean < 0.85 * base.mean + 1e-9
    assert effective_length({64: base, 128: longer}, C) == (128, False)
