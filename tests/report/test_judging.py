"""A verdict over several measurements: each of them decides, at the longest length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.evaluation.outcomes import Result
from trainer.evaluation.statistics import Estimate
from trainer.report.claims import Claim, Measured, cropping, fall, reach, same_loss

CLAIM = Claim("what a paper says", "where")
MARGIN = 0.05


def run(**rates_and_losses):
    """Of every role the retrieval and the loss at 1, 2 and 4 training lengths of 64 tokens."""
    cells = [
        Result(
            role,
            64 * factor,
            factor,
            None if rate is None else Estimate(rate, rate - 0.02, rate + 0.02),
            loss,
        )
        for role, (rates, losses) in rates_and_losses.items()
        for factor, rate, loss in zip((1, 2, 4), rates, losses, strict=True)
    ]
    return Measured(cells, {role: role for role in rates_and_losses})


LOST, KEPT, UNLEARNED = (0.9, 0.6, 0.2), (0.9, 0.9, 0.8), (0.3, 0.2, 0.1)
FLAT, RISEN = (4.0, 4.0, 4.1), (4.0, 4.1, 6.0)
FALLEN = (4.0, 4.0, 2.0)


@pytest.mark.parametrize(
    ("rates", "losses", "shown"),
    [
        (LOST, FLAT, True),
        (LOST, RISEN, False),  # it has lost its text too
        (KEPT, FLAT, False),  # it has kept its retrieval
        (KEPT, RISEN, False),
        (UNLEARNED, FLAT, None),
        (UNLEARNED, RISEN, None),
        (LOST, FALLEN, True),  # less loss is no rise
    ],
)
def test_cropping_is_shown_where_retrieval_falls_and_the_loss_does_not_rise(rates, losses, shown):
    (found,) = cropping(run(rope=(rates, losses)), CLAIM, "rope", MARGIN)
    assert found.shown is shown
    if shown is not None:
        assert "at 64 tokens, rope" in found.evidence
        assert f"Text loss of rope at 256 tokens {losses[-1]:.3f}, at 64 4.000" in found.evidence


def test_cropping_is_judged_at_the_longest_length_that_has_both():
    """At 256 tokens the loss was not measured: at 128 it has kept more than half."""
    measured = run(rope=(LOST, (4.0, 4.0, None)))
    (found,) = cropping(measured, CLAIM, "rope", MARGIN)
    assert found.shown is False
    assert "at 128" in found.evidence
    for missing in ((None, 4.0, 4.0), (4.0, None, None)):
        assert not [*cropping(run(rope=(LOST, missing)), CLAIM, "rope", MARGIN)]
    assert not [*cropping(run(rope=((None,) * 3, FLAT)), CLAIM, "rope", MARGIN)]


@pytest.mark.parametrize(
    ("near", "shown"),
    [((0.9, 0.8, 0.8), True), ((0.9, 0.3, 0.8), False), ((0.9, 0.8, 0.3), False)],
)
def test_a_claim_of_several_lengths_needs_all_of_them(near, shown):
    measured = run(far=(near, FLAT), base=((0.9, 0.2, 0.2), FLAT))
    (found,) = reach(measured, CLAIM, ("far", "base"), 2, from_factor=2)
    assert found.shown is shown
    (last,) = reach(measured, CLAIM, ("far", "base"), 2)  # the longest alone
    assert last.shown is (near[-1] > 0.4)


def test_a_fall_is_from_the_training_length_to_the_longest():
    for rates, shown in (((0.9, 0.9, 0.2), True), ((0.9, 0.2, 0.9), False)):
        (found,) = fall(run(rope=(rates, FLAT)), CLAIM, "rope")
        assert found.shown is shown


@pytest.mark.parametrize(("loss", "shown"), [(3.0, True), (4.1, True), (4.3, False)])
def test_the_same_loss_is_at_most_a_margin_above_the_others(loss, shown):
    measured = run(a=(KEPT, (loss, 9, 9)), b=(KEPT, (4.0, 1, 1)))
    (found,) = same_loss(measured, CLAIM, ("a", "b"), MARGIN)
    assert found.shown is shown
    (found,) = same_loss(replace(measured, one_text=False), CLAIM, ("a", "b"), MARGIN)
    assert found.shown is None
    assert found.evidence.startswith("Not judged: the models trained on different text. Text loss")
