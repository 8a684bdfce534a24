"""The papers' claims as data, judged by the numbers of a run.

A claim is *shown* if the numbers support it beyond the 95% interval of the difference and, for a
loss, beyond a stated margin; otherwise it is *not shown*. It is *not judged* if the numbers cannot
tell, as for the reach of a model that has not learned the task, or for a drop that cost nothing.
Claims about methods that a run does not have are left out. "DroPE" is the paper "Extending the
Context of Pretrained LLMs by Dropping Their Positional Embeddings", "RoPE-ID" is "Frayed RoPE and
Long Inputs".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trainer.common.words import percent
from trainer.evaluation.outcomes import Result
from trainer.evaluation.results import Arm, Drop, Observation, is_known
from trainer.evaluation.statistics import Estimate, change
from trainer.report.tables import interval

ROLES = {
    "rope": "RoPE",
    "rope_pi": "PI",
    "rope_ntk": "NTK-aware scaling",
    "rope_yarn": "YaRN",
    "rope_temperature": "RoPE with a temperature",
    "drope": "DroPE",
    "drope_temperature": "DroPE with a temperature",
    "nope": "NoPE from scratch",
    "nope_temperature": "NoPE from scratch with a temperature",
    "half_rope": "HalfRoPE",
    "high_frequency": "high-frequency RoPE",
    "rope_id": "RoPE-ID",
    "rope_id_temperature": "RoPE-ID with a temperature",
    "alibi": "ALiBi",
    "rope_nope_window": "RNoPE-SWA",
}
"""Names in claims by role; a run maps roles to the rows of its table."""
IDENTITIES = ("_pi", "_ntk", "_yarn", "_temperature")
"""Ends of roles whose method is the identity at factor 1."""
LEARNED = 0.5
"""Retrieval at the training length below which a model has not learned the task."""
KEPT = 0.95
"""Share of RoPE's retrieval, and of the loss that a drop costs (DroPE, Sec. 5.1: "over 95%")."""
HELD = 0.90
"""Share of a method's own retrieval at its training length."""
SAME, NEAR, RISEN = 0.01, 0.02, 0.05
"""Relative margins of losses. Two training seeds of a small model differ by about 1%; a longer
context should lower the loss, so 5% above is far outside of noise."""
OPEN = " This agrees with the claim, but the 95% interval leaves it open."


@dataclass(frozen=True)
class Run:
    """What claims are judged by: results of rows, by role; the drop; and training runs by role.

    ``fitted``: temperature coefficients by the name of a row. ``one_text``: whether all models
    trained on the same text. Otherwise a model's loss says more about its text than its encoding.
    """

    results: Sequence[Result]
    roles: Mapping[str, str]
    drop: Drop | None = None
    arms: Mapping[str, Arm] = field(default_factory=dict)
    fitted: Mapping[str, float] = field(default_factory=dict)
    one_text: bool = True

    def of(self, role: str, quantity: str = "retrieval") -> dict[float, Result]:
        """Return a role's results that have ``quantity`` (or ``loss``), by factor, ascending.

        An extension or temperature is the identity at factor 1: its base stands in there.
        """
        base = role.rpartition("_")[0] if role.endswith(IDENTITIES) else ""
        made = {}
        for name in (self.roles.get(base), self.roles.get(role)):
            for r in self.results:
                own = name == self.roles.get(role)
                if r.name == name and getattr(r, quantity) is not None and (own or r.factor == 1):
                    made[r.factor] = r
        return dict(sorted(made.items())) if role in self.roles else {}

    def best(self, role: str) -> str:
        """Return the role with a temperature if it has one: the paper evaluates DroPE with it."""
        return f"{role}_temperature" if self.of(f"{role}_temperature") else role


Verdict = tuple[bool | None, str]
"""Whether a claim is shown (None: not judged), and the numbers."""
Predicate = Callable[["Run"], Verdict | None]


def observe(run: Run) -> tuple[Observation, ...]:
    """Return the verdicts of all claims that the run has numbers for."""
    return tuple(
        Observation(text, source, *verdict)
        for source, claims in PREDICATES.items()
        for text, judge in claims.items()
        if (verdict := judge(run)) is not None
    )


def certainly_exceeds(a: Result, b: Result, times: float) -> bool:
    """Whether the retrieval of ``a`` exceeds ``times`` the retrieval of ``b`` with 95% confidence.

    True if the lower limit of a − k b is positive. It is a − k b − sqrt((a − low a)² + k² (high b −
    b)²), after Newcombe (Statistics in Medicine 17, 1998, method 10) for differences and Zou and
    Donner (ibid. 27, 2008) for linear combinations. The formula takes the two as independent, which
    is cautious if both were asked the same questions.
    """
    assert a.retrieval is not None
    assert b.retrieval is not None
    p, q = a.retrieval, b.retrieval
    least = math.hypot(p.mean - p.low, times * (q.high - q.mean))
    return p.mean - times * q.mean - least > 0


def loss_change(a: Result, b: Result) -> Estimate:
    """Return the relative difference of two losses: 0.01 if ``a`` is 1% above ``b``.

    Its interval is over the windows of text on which both were measured. If these are unknown, the
    interval is the value alone. One window leaves any value open.
    """
    assert a.loss is not None
    assert b.loss is not None
    paired = len(a.losses) == len(b.losses)
    if paired and len(a.losses) > 1:
        return change(a.losses, b.losses)
    mean = a.loss / b.loss - 1
    return Estimate(mean, -math.inf, math.inf) if paired and a.losses else Estimate(*[mean] * 3)


def _rate(result: Result) -> str:
    assert result.retrieval is not None
    rate = result.retrieval
    return f"{result.name} {percent(rate.mean)}% ({interval(rate)}) at {result.length} tokens"


def _losses(a: Result, b: Result) -> str:
    difference = loss_change(a, b)
    near, far = (f"{r.name} {r.loss:.3f} at {r.length} tokens" for r in (b, a))
    return f"Text loss: {near}, {far}, {_signed(difference)}."


def _signed(difference: Estimate) -> str:
    text = f"{difference.mean:+.1%}"
    if difference.low == difference.high or math.isinf(difference.high):
        return text
    return f"{text} ({difference.low:+.1%} to {difference.high:+.1%})"


def _compare(
    run: Run, pairs: Sequence[tuple[Result, Result]], times: float, *roles: str
) -> Verdict:
    """Judge whether the first of every pair retrieves more than ``times`` the second.

    Not judged if one of the roles has not learned the task at its training length.
    """
    for role in roles:
        trained = run.of(role).get(1)
        if trained is None:
            return None, f"{run.roles[role]} was not measured at its training length."
        assert trained.retrieval is not None
        if trained.retrieval.mean < LEARNED:
            return None, f"{_rate(trained)} has not learned the task (below {LEARNED:.0%})."
    shown = all(certainly_exceeds(a, b, times) for a, b in pairs)
    agrees = all(
        a.retrieval.mean > times * b.retrieval.mean
        for a, b in pairs
        if a.retrieval is not None and b.retrieval is not None
    )
    evidence = " ".join(f"{_rate(a)}, {_rate(b)}." for a, b in pairs)
    return shown, evidence + (OPEN if agrees and not shown else "")


def reach(
    a: str, b: str, times: float, *, least: float | None = None, best: Sequence[str] = ()
) -> Predicate:
    """Return a predicate: ``a`` retrieves more than ``times`` ``b`` at the longest shared length.

    ``least``: compare at all factors from it on instead. ``best``: roles that are taken with a
    temperature where they have one.
    """

    def judge(run: Run) -> Verdict | None:
        first, second = (run.best(role) if role in best else role for role in (a, b))
        ours, theirs = run.of(first), run.of(second)
        shared = [factor for factor in ours if factor > 1 and factor in theirs]
        far = shared[-1:] if least is None else [factor for factor in shared if factor >= least]
        if not far:
            return None
        shown, evidence = _compare(run, [(ours[f], theirs[f]) for f in far], times, first, second)
        if shown is not None and (c := run.fitted.get(run.roles[first])) is not None:
            evidence += f" Its coefficient is c = {c:.3f}."
        return shown, evidence

    return judge


def kept(a: str, b: str, share: float) -> Predicate:
    """Return a predicate: at the training length ``a`` retrieves more than ``share`` of ``b``.

    Not judged if RoPE has not learned the task.
    """

    def judge(run: Run) -> Verdict | None:
        ours, theirs = run.of(a).get(1), run.of(b).get(1)
        if ours is None or theirs is None:
            return None
        return _compare(run, [(ours, theirs)], share, "rope")

    return judge


def held(role: str, share: float) -> Predicate:
    """Return a predicate: the role keeps ``share`` of its retrieval at the longest length."""

    def judge(run: Run) -> Verdict | None:
        best = run.best(role)
        results = run.of(best)
        if 1 not in results or max(results) <= 1:
            return None
        return _compare(run, [(results[max(results)], results[1])], share, best)

    return judge


def fall(role: str) -> Predicate:
    """Return a predicate: the role loses over half of its retrieval at the longest length."""

    def judge(run: Run) -> Verdict | None:
        results = run.of(role)
        if 1 not in results or max(results) <= 1:
            return None
        return _compare(run, [(results[1], results[max(results)])], 2, role)

    return judge


def rises(role: str, margin: float) -> Predicate:
    """Return a predicate: the loss at the longest length is over ``margin`` above the trained."""

    def judge(run: Run) -> Verdict | None:
        results = run.of(role, "loss")
        if 1 not in results or max(results) <= 1:
            return None
        return above(results[max(results)], results[1], margin)

    return judge


def matches(a: str, b: str, margin: float) -> Predicate:
    """Return a predicate: the trained loss of ``a`` is at most ``margin`` above that of ``b``."""

    def judge(run: Run) -> Verdict | None:
        ours, theirs = run.of(a, "loss").get(1), run.of(b, "loss").get(1)
        if ours is None or theirs is None:
            return None
        if not run.one_text:
            return None, f"The models trained on different text. {_losses(ours, theirs)}"
        return within(ours, theirs, margin)

    return judge


def crops(role: str, margin: float) -> Predicate:
    """Return a predicate: the role keeps its loss at the longest length, within ``margin``, and
    loses half of its retrieval."""

    def judge(run: Run) -> Verdict | None:
        losses, retrieval = run.of(role, "loss"), run.of(role)
        both = [factor for factor in losses if factor > 1 and factor in retrieval]
        if not both or 1 not in losses or 1 not in retrieval:
            return None
        fallen, rates = _compare(run, [(retrieval[1], retrieval[both[-1]])], 2, role)
        is_kept, text = within(losses[both[-1]], losses[1], margin)
        return (None if fallen is None else bool(fallen and is_kept)), f"{rates} {text}"

    return judge


def above(a: Result, b: Result, margin: float) -> tuple[bool, str]:
    """Return whether the loss of ``a`` is over ``margin`` above ``b``, with its whole interval."""
    difference = loss_change(a, b)
    is_open = difference.low <= margin < difference.mean
    return difference.low > margin, _losses(a, b) + OPEN * is_open


def within(a: Result, b: Result, margin: float) -> tuple[bool, str]:
    """Return whether the loss of ``a`` is at most ``margin`` above ``b``, with its interval."""
    difference = loss_change(a, b)
    is_open = difference.mean <= margin < difference.high
    return difference.high <= margin, _losses(a, b) + OPEN * is_open


def _learns_slower(run: Run) -> Verdict | None:
    if not {"rope", "nope"} <= run.arms.keys():
        return None
    fast, slow = run.arms["rope"], run.arms["nope"]
    others = dict(fast.curve)
    pairs = [(a, others[step]) for step, a in slow.curve if step in others]
    finite = [(a, b) for a, b in pairs if is_known(a) and is_known(b)]
    if not finite:
        return None
    ours, theirs = zip(*finite, strict=True)
    difference = change(ours, theirs)
    return difference.low > SAME, (
        f"Mean training loss over {len(finite)} logged points: {slow.name} {fmean(ours):.3f}, "
        f"{fast.name} {fmean(theirs):.3f} nats/token, {_signed(difference)}."
        + OPEN
        * (difference.low <= SAME < difference.mean)
    )


def _ends_behind(run: Run) -> Verdict | None:
    rope, nope = run.of("rope").get(1), run.of("nope").get(1)
    if rope is None or nope is None:
        return None
    shown, evidence = certainly_exceeds(rope, nope, 1), f"{_rate(rope)}, {_rate(nope)}."
    if rope.loss is not None and nope.loss is not None:
        larger, text = above(nope, rope, SAME)
        shown, evidence = shown or larger, f"{evidence} {text}"
    return shown, evidence


def _is_won_back(run: Run) -> Verdict | None:
    drop = run.drop
    if drop is None:
        return None
    known = {"before": drop.loss_before, "after": drop.loss_after, "end": drop.loss_end}
    losses = {name: loss for name, loss in known.items() if is_known(loss)}
    if len(losses) < len(known):
        return None, "A loss before, after or at the end is missing."
    each = {name: [x for x in drop.sequences.get(name, ()) if is_known(x)] for name in losses}
    if not all(each.values()):
        each = {name: [loss] for name, loss in losses.items()}
    said = "{before:.3f} before, {after:.3f} after, {end:.3f} at the end".format(**losses)
    said = f"Loss {said} (step {drop.step})."
    if change(each["after"], each["before"]).low <= SAME:
        return None, f"{said} The drop raises it by no more than {SAME:.0%}."
    lost, won = (
        [a - b for a, b in zip(each["after"], each[other], strict=True)]
        for other in ("before", "end")
    )
    share = change(won, lost)
    limits = f" ({1 + share.low:.0%} to {1 + share.high:.0%})" if len(won) > 1 else ""
    return 1 + share.low >= KEPT, f"{said} {1 + share.mean:.0%}{limits} of the rise is won back."


RIVALS = ("rope_pi", "rope_ntk", "rope_yarn", "alibi", "nope", "rope_nope_window")
PREDICATES: dict[str, dict[str, Predicate]] = {
    "DroPE, Obs. 1": {
        f"NoPE learns more slowly than RoPE: its training loss is over {SAME:.0%} higher": (
            _learns_slower
        ),
    },
    "DroPE, Obs. 1 and Fig. 3": {
        "NoPE from scratch ends behind RoPE on the same budget, in retrieval or by over "
        f"{SAME:.0%} in text loss": _ends_behind,
    },
    "DroPE, Obs. 2 and Table 1; RoPE-ID, Table 1": {
        "RoPE loses more than half of its retrieval beyond its training length": fall("rope"),
    },
    "DroPE, Sec. 1": {
        f"RoPE's text loss rises beyond its training length too, by more than {RISEN:.0%}": (
            rises("rope", RISEN)
        ),
    },
    "DroPE, Sec. 4 and Fig. 5": {
        f"YaRN keeps its text loss (within {RISEN:.0%}) at the longest length, and yet loses more "
        "than half of its retrieval": crops("rope_yarn", RISEN),
    },
    "DroPE, Obs. 3 and Sec. 5.1": {
        f"Recalibration wins back at least {KEPT:.0%} of the loss that the drop costs": (
            _is_won_back
        ),
        f"DroPE keeps at least {KEPT:.0%} of RoPE's retrieval at the training length": (
            kept("drope", "rope", KEPT)
        ),
    },
    "DroPE, Fig. 2 and Table 7": {
        f"DroPE's text loss at the training length matches RoPE's, within {SAME:.0%}": (
            matches("drope", "rope", SAME)
        ),
        f"DroPE's text loss is no worse than that of NoPE from scratch, within {NEAR:.0%}": (
            matches("drope", "nope", NEAR)
        ),
    },
    "DroPE, Obs. 3 and Table 3": {
        "DroPE retrieves at least twice as much as RoPE from 4× the training length on": (
            reach("drope", "rope", 2, least=4)
        ),
    },
    "DroPE, Table 1": {
        f"DroPE retrieves more than {ROLES[rival]} at the longest length": (
            reach("drope", rival, 1, best=("drope", rival))
        )
        for rival in RIVALS
    },
    "DroPE, App. C.2": {
        "A softmax temperature helps DroPE at the longest length": (
            reach("drope_temperature", "drope", 1)
        ),
    },
    "RoPE-ID, Table 1": {
        "HalfRoPE loses more than half of its retrieval beyond its training length": (
            fall("half_rope")
        ),
        "YaRN retrieves at least twice as much as RoPE at the longest length": (
            reach("rope_yarn", "rope", 2)
        ),
        "High-frequency RoPE retrieves less than RoPE already at the training length": (
            kept("rope", "high_frequency", 1)
        ),
        f"RoPE-ID keeps at least {HELD:.0%} of its retrieval at the longest length": (
            held("rope_id", HELD)
        ),
        "RoPE-ID retrieves at least twice as much as RoPE at the longest length": (
            reach("rope_id", "rope", 2, best=("rope_id",))
        ),
        "A softmax temperature helps RoPE-ID at the longest length": (
            reach("rope_id_temperature", "rope_id", 1)
        ),
    },
}
"""Predicates by the place in a paper and by the claim; a predicate is None without the numbers."""
