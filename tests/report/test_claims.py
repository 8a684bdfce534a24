"""Every claim is judged from the numbers: shown, not shown, or not judged."""

from dataclasses import replace
from statistics import fmean

import pytest

from tests.report.examples import report, statements
from trainer.evaluation.outcomes import Outcomes, Result
from trainer.evaluation.results import PERPLEXITY, Arm, Cell, Drop
from trainer.evaluation.statistics import Estimate, estimate, wilson_interval
from trainer.report.claims import (
    ROLES,
    Claim,
    Measured,
    above,
    certainly_exceeds,
    cropping,
    fall,
    in_words,
    loss_change,
    losses_in_words,
    observe,
    reach,
    same_loss,
    within,
)

GOOD, HALF, BAD = (100, 99, 98, 97), (100, 80, 60, 55), (100, 60, 20, 10)
ASTRAY = (30, 20, 15, 10)  # never learned the task


def results(*cells):
    return Outcomes(report(*cells, training_length=64)).results()


def judge(claim, roles, **others):
    """The verdict and evidence of the one observation whose claim contains ``claim``.

    ``roles``: role to rates, or to (rates, losses).
    """
    table = []
    for role, numbers in roles.items():
        rates, losses = numbers if isinstance(numbers[0], tuple) else (numbers, (4.0,) * 4)
        table += statements(ROLES[role], rates, losses)
    matching = [
        o
        for o in observe(results(*table), {role: ROLES[role] for role in roles}, **others)
        if claim in o.claim
    ]
    assert len(matching) == 1, [o.claim for o in matching]
    return matching[0].shown, matching[0].evidence


def losses(*values):
    return GOOD, values


BOTH_WAYS = [
    ("RoPE loses more than half", {"rope": BAD}, {"rope": HALF}),
    ("HalfRoPE loses more than half", {"half_rope": BAD}, {"half_rope": GOOD}),
    ("RoPE's text loss rises", {"rope": losses(4, 5, 7, 9)}, {"rope": losses(4, 4, 4, 4.1)}),
    (
        "YaRN retrieves at least twice",
        {"rope": BAD, "rope_yarn": GOOD},
        {"rope": HALF, "rope_yarn": GOOD},
    ),
    (
        "YaRN keeps its text loss",
        {"rope_yarn": (BAD, (4, 4, 4, 4.1))},
        {"rope_yarn": (BAD, (4, 5, 6, 7))},
    ),
    (
        "YaRN keeps its text loss",
        {"rope_yarn": (100, 90, 60, 39)},  # to less than a half, but not to a third
        {"rope_yarn": (100, 90, 80, 60)},
    ),
    ("NoPE from scratch ends behind", {"rope": GOOD, "nope": ASTRAY}, {"rope": GOOD, "nope": GOOD}),
    (
        "NoPE from scratch ends behind",
        {"rope": losses(4, 4, 4, 4), "nope": losses(4.2, 4, 4, 4)},
        {"rope": losses(4, 4, 4, 4), "nope": losses(4.01, 4, 4, 4)},
    ),
    ("DroPE keeps", {"rope": BAD, "drope": GOOD}, {"rope": BAD, "drope": (90, 80, 70, 60)}),
    (
        "matches RoPE's",
        {"rope": losses(4, 4, 4, 4), "drope": losses(4.03, 4, 4, 4)},
        {"rope": losses(4, 4, 4, 4), "drope": losses(4.3, 4, 4, 4)},
    ),
    (
        "no worse than that of NoPE",
        {"nope": losses(4, 4, 4, 4), "drope": losses(4.07, 4, 4, 4)},
        {"nope": losses(4, 4, 4, 4), "drope": losses(4.3, 4, 4, 4)},
    ),
    (
        "DroPE retrieves at least twice",
        {"rope": BAD, "drope": GOOD},
        {"rope": (100, 90, 60, 10), "drope": GOOD},  # at 8 times, not at 4 times
    ),
    *(
        (
            f"DroPE retrieves more than {ROLES[rival]}",
            {rival: HALF, "drope": GOOD} | base,
            {rival: GOOD, "drope": HALF} | base,
        )
        for rival, base in (
            ("rope_pi", {"rope": BAD}),
            ("rope_ntk", {"rope": BAD}),
            ("rope_yarn", {"rope": BAD}),
            ("alibi", {}),
            ("nope", {}),
            ("rope_nope_window", {}),
        )
    ),
    (
        "temperature helps DroPE",
        {"drope": HALF, "drope_temperature": GOOD},
        {"drope": GOOD, "drope_temperature": HALF},
    ),
    (
        "temperature helps RoPE-ID",
        {"rope_id": HALF, "rope_id_temperature": GOOD},
        {"rope_id": GOOD, "rope_id_temperature": HALF},
    ),
    ("RoPE-ID keeps", {"rope_id": GOOD}, {"rope_id": HALF}),
    (
        "RoPE-ID retrieves at least twice",
        {"rope": BAD, "rope_id": GOOD},
        {"rope": HALF, "rope_id": GOOD},
    ),
    (
        "RoPE-ID retrieves at least twice",
        {"rope": (100, 90, 60, 10), "rope_id": GOOD},  # at the longest length alone
        {"rope": (100, 10, 20, 60), "rope_id": GOOD},
    ),
    (
        "High-frequency RoPE retrieves less",
        {"rope": BAD, "high_frequency": ASTRAY},
        {"rope": BAD, "high_frequency": GOOD},
    ),
]


@pytest.mark.parametrize(("claim", "for_it", "against_it"), BOTH_WAYS)
def test_the_numbers_decide(claim, for_it, against_it):
    assert judge(claim, for_it)[0] is True
    assert judge(claim, against_it)[0] is False


@pytest.mark.parametrize(
    ("claim", "roles"),
    [
        ("RoPE loses more than half", {"rope": ASTRAY}),
        ("DroPE keeps", {"rope": ASTRAY, "drope": GOOD}),
        ("DroPE retrieves at least twice", {"rope": BAD, "drope": ASTRAY}),
        ("DroPE retrieves more than ALiBi", {"alibi": ASTRAY, "drope": GOOD}),
        ("RoPE-ID keeps", {"rope_id": ASTRAY}),
        ("High-frequency RoPE retrieves less", {"rope": ASTRAY, "high_frequency": BAD}),
    ],
)
def test_the_reach_of_a_model_that_did_not_learn_the_task_is_not_judged(claim, roles):
    shown, evidence = judge(claim, roles)
    assert shown is None
    assert "has not learned the task" in evidence
    assert "30.1% (24.8–36.0)" in evidence  # 77 of 256


def test_overlapping_intervals_are_not_taken_for_a_lead():
    roles = {"drope": (100, 99, 98, 97), "alibi": (100, 99, 97, 95)}
    shown, evidence = judge("DroPE retrieves more than ALiBi", roles)
    assert shown is False
    assert evidence.endswith("their 95% intervals leave it open.")


def test_evidence_gives_both_rates_with_intervals():
    _, evidence = judge("RoPE loses more than half", {"rope": BAD})
    low, high = wilson_interval(26, 256)
    assert f"RoPE 10.2% ({100 * low:.1f}–{100 * high:.1f}) at 512" in evidence
    assert "100.0% (98.5–100.0) at 64 tokens" in evidence


def test_drope_competes_with_its_temperature_where_it_has_one():
    roles = {"drope": HALF, "drope_temperature": GOOD, "alibi": HALF}
    shown, evidence = judge("DroPE retrieves more than ALiBi", roles)
    assert shown is True
    assert "DroPE with a temperature" in evidence


def test_an_extension_not_measured_at_the_training_length_counts_as_its_base():
    roles = {"rope": BAD, "drope": GOOD, "rope_pi": (None, 50, 50, 50)}
    assert judge("DroPE retrieves more than PI", roles)[0] is True


def test_a_fitted_coefficient_is_named():
    roles = {"drope": HALF, "drope_temperature": GOOD}
    name = ROLES["drope_temperature"]
    assert "c = 0.412" in judge("temperature helps", roles, temperature={name: 0.412})[1]


@pytest.mark.parametrize(
    ("drop", "shown", "message"),
    [
        (Drop(800, 4.0, 6.0, 4.05), True, "98% of the rise is won back"),
        (Drop(800, 4.0, 6.0, 4.4), False, "80% of the rise is won back"),
        (Drop(800, 4.0, 3.9, 3.8), None, "does not rise"),
        (Drop(800, 7.006, 7.0061, 7.006), None, "(7.006 before, 7.006 after, 0.0%)"),
        (Drop(800, 4.0, float("nan"), 3.8), None, "missing"),
        (Drop(800, 4.0, 6.0, None), None, "missing"),
    ],
)
def test_recalibration_is_measured_by_the_rise_it_wins_back(drop, shown, message):
    (observation,) = observe((), {}, drop=drop)
    assert observation.shown is shown
    assert message in observation.evidence


@pytest.mark.parametrize(
    ("rises", "shown", "message"),
    [
        ((2.0, 2.0, 2.0, 2.0), True, "98% (95% interval 98% to 98%) of the rise is won back"),
        ((5.0, 2.0, 0.5, 0.5) * 2, False, "96% (95% interval 8"),  # by two sequences of eight
        ((0.5, -0.4, 0.6, -0.4), None, "does not rise at the drop by more than 1%"),
    ],
)
def test_the_recovered_share_has_an_interval_over_the_sequences(rises, shown, message):
    before = (4.0,) * len(rises)
    after = tuple(4.0 + rise for rise in rises)
    # Of each rise 98%, but where they differ a constant of 0.08.
    remaining = [0.02 * rise if len(set(rises)) == 1 else 0.08 for rise in rises]
    sequences = {"before": before, "after": after, "end": tuple(4.0 + x for x in remaining)}
    means = [fmean(sequences[name]) for name in ("before", "after", "end")]
    (observation,) = observe((), {}, drop=Drop(800, *means, sequences))
    assert observation.shown is shown
    assert message in observation.evidence


@pytest.mark.parametrize(
    ("spread", "shown"), [(0.01, True), (3.0, False)], ids=["alike", "one window of four"]
)
def test_a_rising_loss_is_sure_over_the_windows(spread, shown):
    """+12.5% in the mean: everywhere, or by one window that most resamples have once or never."""
    far = (4.5 - spread, 4.5 + spread, 4.5 - spread, 4.5 + spread)
    cells = [
        Cell("RoPE", "none", PERPLEXITY, 64, 1.0, last_loss=4.0, by_window=(4.0,) * 4),
        Cell("RoPE", "none", PERPLEXITY, 512, 8.0, last_loss=4.5, by_window=far),
    ]
    (observation,) = observe(results(*cells), {"rope": "RoPE"})
    assert observation.shown is shown
    assert "4.000, at 512" not in observation.evidence
    assert "nats/token, +12.5% (" in observation.evidence
    assert ("its 95% interval leaves it open" in observation.evidence) is not shown


@pytest.mark.parametrize(
    ("spread", "shown", "left_open"),
    [(0.0, True, False), (0.2, False, True), (-1.0, False, False)],
    ids=["sure", "in the mean", "too much"],
)
def test_a_loss_that_matches_is_sure_over_the_windows(spread, shown, left_open):
    """Half a percent above RoPE's, where at most one is within the margin."""
    windows_of_drope = (4.02 - spread, 4.02 + spread) * 2 if spread >= 0 else (4.4, 4.6) * 2
    cells = [
        Cell(name, "none", PERPLEXITY, 64, 1.0, last_loss=sum(windows) / 4, by_window=windows)
        for name, windows in (("RoPE", (4.0,) * 4), ("DroPE", windows_of_drope))
    ]
    observation = observe(results(*cells), {"rope": "RoPE", "drope": "DroPE"})
    (observation,) = (o for o in observation if "matches RoPE's" in o.claim)
    assert observation.shown is shown
    assert observation.evidence.endswith("leaves it open.") == left_open


@pytest.mark.parametrize(("slow", "shown"), [(5.0, True), (4.0, False)])
def test_speed_of_learning_is_the_mean_of_the_training_loss(slow, shown):
    rope = ((1, 4.1), (2, 3.9), (3, None), (4, 99.0), (5, 4.1), (6, 3.9))
    nope = ((1, slow), (2, slow), (3, 99.0), (5, slow), (6, slow))
    arms = {
        "rope": Arm("RoPE", "rope", 1, 2, 3, None, rope),
        "nope": Arm("NoPE", "nope", 1, 2, 3, None, nope),
    }
    (observation,) = observe((), {}, arms=arms)
    assert observation.shown is shown
    assert f"logged points: NoPE {slow:.3f}, RoPE 4.000" in observation.evidence


def test_claims_about_absent_methods_are_left_out():
    assert observe((), {}) == ()
    claims = [o.claim for o in observe(results(*statements("ALiBi", GOOD)), {"alibi": "ALiBi"})]
    assert claims == []
    claims = [o.claim for o in observe(results(*statements("RoPE", GOOD)), {"rope": "RoPE"})]
    assert all(claim.startswith("RoPE") for claim in claims)


def test_a_run_without_retrieval_is_judged_by_its_losses():
    none = (None,) * 4
    shown, _ = judge("matches RoPE's", {"rope": (none, (4,) * 4), "drope": (none, (4,) * 4)})
    assert shown is True


def test_a_loss_that_only_one_has_is_not_compared():
    roles = {"rope": losses(4, 4, 4, 4), "nope": losses(None, 4, 4, 4)}
    shown, evidence = judge("NoPE from scratch ends behind", roles)
    assert shown is False
    assert "Text loss" not in evidence


def test_an_unknown_role_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="Did you mean 'drope'"):
        observe((), {"dropee": "DroPE"})


@pytest.mark.parametrize(
    ("a", "b", "exceeds"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 873, Table II, method 10: lower limits
        # 0.0524, 0.1705, 0.0582, -0.0381, 0, 0.6791.
        ((56, 70), (48, 80), True),
        ((9, 10), (3, 10), True),
        ((6, 7), (2, 7), True),
        ((5, 56), (0, 29), False),
        ((0, 10), (0, 20), False),
        ((10, 10), (0, 20), True),
        # Which other limits would get wrong: the upper one of the first, the lower one of the
        # second. The lower limits are -0.018 and -0.016.
        ((10, 10), (14, 20), False),
        ((2, 10), (0, 20), False),
    ],
)
def test_exceeding_is_newcombes_lower_limit_above_0(a, b, exceeds):
    def result(hits, trials):
        return Result("m", 64, 1.0, estimate([1.0] * hits + [0.0] * (trials - hits)))

    assert certainly_exceeds(result(*a), result(*b), 1) == exceeds


def test_retained_retrieval_is_judged_at_the_longest_length():
    """Not of the length before it, at which half is lost."""
    assert judge("RoPE-ID keeps", {"rope_id": (100, 50, 50, 100)})[0] is True
    assert judge("RoPE-ID keeps", {"rope_id": (100, 100, 100, 50)})[0] is False


@pytest.mark.parametrize("places", [(0,), (2, 3)], ids=["the training length", "longer ones"])
def test_claims_about_lengths_that_are_missing_are_left_out(places):
    """At the training length alone some can be judged; beyond it alone there is nothing to hold
    against it, but for what two methods reach."""
    roles = {role: ROLES[role] for role in ROLES}
    table = [cell for name in roles.values() for cell in statements(name, GOOD)]
    table = [
        cell for cell in table if cell.length in [(64, 128, 256, 512)[place] for place in places]
    ]
    claims = [o.claim for o in observe(results(*table), roles)]
    assert len(claims) == len(set(claims))
    beyond = [claim for claim in claims if "longest" in claim or "beyond" in claim or "4×" in claim]
    assert (len(beyond), len(claims)) == {(0,): (0, 5), (2, 3): (11, 11)}[places]


def test_unmeasured_quantities_are_refused_or_not_judged():
    measured, unmeasured = Result("m", 64, 1.0, None, 4.0), Result("n", 64, 1.0)
    for a, b in ((measured, unmeasured), (unmeasured, measured)):
        with pytest.raises(ValueError, match="a loss that was not measured"):
            loss_change(a, b)
    with pytest.raises(ValueError, match="'n' has no retrieval at 64 tokens"):
        in_words(unmeasured)
    with pytest.raises(KeyError):
        Measured((measured,), {"rope": "m"}).cell("rope", 128)
    assert Measured((measured,), {"rope": "m"}).not_learned("rope") == (
        "Not judged: m was not measured at its training length."
    )
    # Windows that are not the same are not paired: the means are compared.
    some, more = (Result("m", 64, 1.0, None, 4.0, (4.0,) * n) for n in (1, 2))
    assert loss_change(some, more).low == loss_change(some, more).high == 0
    # One window leaves a change open in either direction.
    one = Result("n", 64, 1.0, None, 5.0, (5.0,))
    for judged in (above(one, some, 0.01), within(some, one, 0.01)):
        assert not judged[0]
        assert judged[1].endswith("leaves it open.")
    assert "+25.0% (one window, which gives no interval)" in above(one, some, 0.01)[1]


def test_losses_in_words_name_the_lengths_and_models_that_differ():
    near, far = (Result("a", n, n / 64, None, loss, (loss,) * 2) for n, loss in ((64, 4), (128, 5)))
    other = Result("b", 64, 1.0, None, 4.5, (4.5,) * 2)
    message = "Text loss of a at 128 tokens 5.000, at 64"
    assert losses_in_words(far, near).startswith(f"{message} 4.000 nats/token, +25.0%")
    assert losses_in_words(far, other).startswith(f"{message} 4.500 (b) nats/token, +11.1%")
    assert losses_in_words(near, other).startswith("Text loss at 64 tokens: a 4.000, b 4.500 nats")


CLAIM = Claim("what a paper says", "where")
MARGIN = 0.05


def measured_run(**rates_and_losses):
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
    (verdict,) = cropping(measured_run(rope=(rates, losses)), CLAIM, "rope", MARGIN)
    assert verdict.shown is shown
    if shown is not None:
        assert "at 64 tokens, rope" in verdict.evidence
        assert f"Text loss of rope at 256 tokens {losses[-1]:.3f}, at 64 4.000" in verdict.evidence


def test_cropping_is_judged_at_the_longest_length_that_has_both():
    """At 256 tokens the loss was not measured: at 128 it has kept more than half."""
    measured = measured_run(rope=(LOST, (4.0, 4.0, None)))
    (verdict,) = cropping(measured, CLAIM, "rope", MARGIN)
    assert verdict.shown is False
    assert "at 128" in verdict.evidence
    for missing in ((None, 4.0, 4.0), (4.0, None, None)):
        assert not [*cropping(measured_run(rope=(LOST, missing)), CLAIM, "rope", MARGIN)]
    assert not [*cropping(measured_run(rope=((None,) * 3, FLAT)), CLAIM, "rope", MARGIN)]


@pytest.mark.parametrize(
    ("near", "shown"),
    [((0.9, 0.8, 0.8), True), ((0.9, 0.3, 0.8), False), ((0.9, 0.8, 0.3), False)],
)
def test_a_claim_of_several_lengths_needs_all_of_them(near, shown):
    measured = measured_run(far=(near, FLAT), base=((0.9, 0.2, 0.2), FLAT))
    (verdict,) = reach(measured, CLAIM, ("far", "base"), 2, from_factor=2)
    assert verdict.shown is shown
    (last,) = reach(measured, CLAIM, ("far", "base"), 2)  # the longest alone
    assert last.shown is (near[-1] > 0.4)
    assert not [*reach(measured, CLAIM, ("far", "base"), 2, from_factor=8)]  # none was measured


def test_a_fall_is_from_the_training_length_to_the_longest():
    for rates, shown in (((0.9, 0.9, 0.2), True), ((0.9, 0.2, 0.9), False)):
        (verdict,) = fall(measured_run(rope=(rates, FLAT)), CLAIM, "rope")
        assert verdict.shown is shown


@pytest.mark.parametrize(("loss", "shown"), [(3.0, True), (4.1, True), (4.3, False)])
def test_the_same_loss_is_at_most_a_margin_above_the_others(loss, shown):
    measured = measured_run(a=(KEPT, (loss, 9, 9)), b=(KEPT, (4.0, 1, 1)))
    (verdict,) = same_loss(measured, CLAIM, ("a", "b"), MARGIN)
    assert verdict.shown is shown
    (verdict,) = same_loss(replace(measured, one_text=False), CLAIM, ("a", "b"), MARGIN)
    assert verdict.shown is None
    assert verdict.evidence.startswith(
        "Not judged: the models trained on different text. Text loss"
    )
