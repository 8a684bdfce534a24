"""Indicators: what holds past the training length, and what does not."""

import math

import pytest

from trainer.analysis.studies.section import Indicator, glance


def indicator(values, lengths=(32, 64, 128), wanted="high", trained=64, **more):
    return Indicator("name", lengths, values, trained, wanted, "meaning", **more)


@pytest.mark.parametrize(
    ("values", "wanted", "verdict"),
    [
        ((0.1, 0.9, 0.9), "high", "holds"),
        ((0.6, 0.6, 0.55), "high", "holds"),
        ((0.6, 0.6, 0.5), "high", "drifts"),
        ((0.6, 0.6, 0.3), "high", "breaks"),
        ((0.6, 0.6, 0.9), "high", "holds"),
        ((2.0, 2.0, 2.1), "low", "holds"),
        ((2.0, 2.0, 2.5), "low", "drifts"),
        ((2.0, 2.0, 4.0), "low", "breaks"),
        ((2.0, 2.0, 0.5), "low", "holds"),
        ((-0.6, -0.6, -1.0), "high", "breaks"),
        ((0.0, 0.0, math.nan), "high", None),
        # At the limits themselves: a tenth holds, a third drifts.
        ((1.0, 1.0, 1.1), "low", "drifts"),  # which is a little more than a tenth, in floats
        ((8.0, 8.0, 8.75), "low", "holds"),
        ((3.0, 3.0, 4.0), "low", "drifts"),
        ((3.0, 3.0, 4.0625), "low", "breaks"),
    ],
)
def test_a_change_for_the_worse_from_the_training_length_on_is_judged(values, wanted, verdict):
    assert indicator(values, wanted=wanted).verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.9, 0.6, 0.35), "holds"),  # falls by 0.25, and fell by 0.3 before
        ((0.3, 0.6, 0.35), "holds"),  # in whatever direction
        ((0.9, 0.6, 0.25), "breaks"),
        ((0.66, 0.6, 0.5), "drifts"),
        # A fall to an eighth is one, however steep the one before it was.
        ((0.115, 0.0575, 0.00694), "breaks"),
        ((1.2, 0.6, 0.3), "holds"),  # half of it
    ],
)
def test_a_change_as_within_the_training_length_is_none(values, verdict):
    assert indicator(values).verdict == verdict


def test_the_lengths_that_are_compared_are_said():
    assert indicator((0.9, 0.6, 0.3)).compared == "; at 64 and 128 tokens"
    assert indicator((0.9, 0.6, 0.3), (512, 1024, 4096), trained=2000).compared == (
        "; at 1,024 and 4,096 tokens"
    )
    assert indicator((0.9, 0.6, 0.3), trained=128).compared == ""


def test_what_is_not_beyond_or_means_nothing_is_not_judged():
    assert indicator((0.9, 0.1, 0.0), trained=128).verdict is None
    assert indicator((0.9, 0.9, 0.0), judged=False).verdict is None


def test_a_high_value_near_zero_everywhere_is_not_judged():
    assert indicator((0.001, 0.001, 0.0), least=0.05).verdict is None
    assert indicator((0.001, 0.001, 0.0), least=0.0001).verdict == "breaks"
    assert indicator((0.001, 0.001, 0.5), least=0.05).verdict == "holds"
    assert indicator((0.001, 0.001, -0.5), least=0.05).verdict == "breaks"
    assert indicator((0.01, 0.01, 0.011), wanted="low", least=0.05).verdict == "holds"


def test_numbers_of_sections_bring_them_back():
    measure = indicator((0.1, 0.2, 0.3), percent=True)
    assert glance([{}, {"glance": [measure.to_dict()]}]) == [
        indicator([0.1, 0.2, 0.3], [32, 64, 128], percent=True)
    ]
    assert measure.shown(measure.within) == "20%"


def test_what_is_within_is_the_last_length_that_was_trained():
    measure = indicator((1.0, 2.0, 4.0, 8.0), lengths=(16, 64, 128, 256), trained=64)
    assert (measure.within, measure.beyond, measure.change, measure.usual) == (2, 8, -3, 0.5)
    assert indicator((1.0, 2.0), lengths=(128, 256)).within == 1
    assert indicator((1.0, 2.0), lengths=(33, 64)).usual == 0
    assert indicator((1.0, 2.0), lengths=(32, 64)).usual == 0.5
    assert not indicator((1.0, 2.0), lengths=(32, 64)).goes_beyond
    assert indicator((1.0, 2.0), lengths=(32, 65)).goes_beyond
    near_zero = indicator((0.0, 0.01, 0.02), wanted="low")
    assert (near_zero.change, near_zero.usual) == pytest.approx((0.2, 0.2))


def test_indicators_are_judged_and_no_shares_by_themselves():
    measure = indicator((0.1, 0.9, 0.0625))
    assert (measure.verdict, measure.shown(measure.beyond)) == ("breaks", "0.0625")
    assert indicator((0.1,), percent=True).shown(0.61234) == "61.2%"


@pytest.mark.parametrize(
    ("values", "lengths", "trained", "curve", "mark"),
    [
        # Logarithmic to the right, from 2 at the top to 32 at the bottom.
        ((1.0, 2.0, 0.0), (16, 32, 256), 64, "0.0,17.0 30.0,2.0 120.0,32.0", 60.0),
        # A change of a twentieth is drawn as one of half its size, in the middle.
        ((1.0, 1.05), (32, 128), 999, "0.0,18.4 120.0,15.6", 120.0),
        ((-4.0, -4.0), (32, 64), 16, "0.0,17.0 120.0,17.0", 0.0),
        ((0.0, 0.0), (32, 64), 32, "0.0,17.0 120.0,17.0", 0.0),
        ((3.0,), (32,), 32, "0.0,17.0", 0.0),
    ],
)
def test_a_curve_lies_in_a_box_of_120_by_34(values, lengths, trained, curve, mark):
    measure = indicator(values, lengths, trained=trained)
    assert (measure.curve, measure.mark) == (curve, mark)
