"""One function for each kind of claim, from measurements to an ``Observation``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from trainer.report.comparison import (
    Measured,
    certainly_exceeds,
    change_in_words,
    loss_change,
    pair_in_words,
)
from trainer.report.outcomes import Result
from trainer.report.results import Arm, Observation, is_known
from trainer.report.statistics import change

_OPEN = " The rates agree with the claim, but their 95% intervals leave it open."
_OPEN_LOSS = " The change agrees with the claim, but its 95% interval leaves it open."


@dataclass(frozen=True)
class Claim:
    """What a paper says, and where."""

    text: str
    source: str

    def judged(self, shown: bool | None, evidence: str) -> Observation:
        """The claim with its verdict."""
        return Observation(self.text, self.source, shown, evidence)


def judge(
    run: Measured,
    claim: Claim,
    pairs: Sequence[tuple[Result, Result]],
    times: float,
    learned: Sequence[str],
    *,
    note: str = "",
) -> Observation:
    """In every pair the first retrieves more than ``times`` the second, beyond the intervals; not
    judged when a role in ``learned`` has not learned the task."""
    obstacle = run.not_learned(*learned)
    if obstacle:
        return claim.judged(None, obstacle)
    shown = all(certainly_exceeds(a, b, times) for a, b in pairs)
    evidence = " ".join(pair_in_words(a, b) for a, b in pairs) + note
    if not shown and all(_rate(a) > times * _rate(b) for a, b in pairs):
        evidence += _OPEN
    return claim.judged(shown, evidence)


def reach(
    run: Measured,
    claim: Claim,
    roles: tuple[str, str],
    times: float,
    *,
    from_factor: float | None = None,
    note: str = "",
) -> Iterator[Observation]:
    """Beyond the training length the first role retrieves more than ``times`` the second: at every
    length from ``from_factor`` on, or at the longest when that is None or was not reached."""
    lengths = run.beyond(*roles)
    far = [
        n for n in lengths if from_factor and (c := run.at(roles[0], n)) and c.factor >= from_factor
    ]
    pairs = [(run.cell(roles[0], n), run.cell(roles[1], n)) for n in far or lengths[-1:]]
    if pairs:
        yield judge(run, claim, pairs, times, roles, note=note)


def fall(run: Measured, claim: Claim, role: str) -> Iterator[Observation]:
    """At the longest length a role has lost more than half of its retrieval."""
    trained, beyond = run.trained(role), run.beyond(role)
    if trained and beyond:
        pair = (trained, run.cell(role, beyond[-1]))
        yield judge(run, claim, [pair], 2, (role,))


def rising_loss(run: Measured, claim: Claim, role: str, margin: float) -> Iterator[Observation]:
    """At the longest length the loss is more than ``margin`` above the training length's."""
    trained, beyond = run.trained(role, "loss"), run.beyond(role, quantity="loss")
    if trained and beyond:
        longest = run.cell(role, beyond[-1])
        yield claim.judged(*above(longest, trained, margin))


def same_loss(
    run: Measured, claim: Claim, roles: tuple[str, str], margin: float
) -> Iterator[Observation]:
    """At the training length the first role's loss is at most ``margin`` above the second's."""
    a, b = (run.trained(role, "loss") for role in roles)
    if a and b:
        yield claim.judged(*within(a, b, margin))


def cropping(run: Measured, claim: Claim, role: str, margin: float) -> Iterator[Observation]:
    """At the longest length a role's loss is within ``margin`` of its base at the training length,
    while it has lost more than half of the retrieval."""
    loss, retrieval = run.trained(role, "loss"), run.trained(role)
    both = sorted(set(run.beyond(role)) & set(run.beyond(role, quantity="loss")))
    if loss and retrieval and both:
        longest = run.cell(role, both[-1])
        pair = (retrieval, longest)
        holds, said = within(longest, loss, margin)
        fallen = judge(run, claim, [pair], 2, (role,), note=f" {said}")
        shown = None if fallen.shown is None else fallen.shown and holds
        yield claim.judged(shown, fallen.evidence)


def slower(claim: Claim, fast: Arm, slow: Arm, margin: float) -> Iterator[Observation]:
    """The training loss averaged over the steps both logged is more than ``margin`` higher."""
    curves = [dict(arm.curve) for arm in (slow, fast)]
    pairs = [(curves[0][step], curves[1][step]) for step in curves[0] if step in curves[1]]
    finite = [(a, b) for a, b in pairs if is_known(a) and is_known(b)]
    if finite:
        of_slow, of_fast = zip(*finite, strict=True)
        a, b, found = fmean(of_slow), fmean(of_fast), change(of_slow, of_fast)
        evidence = (
            f"Averaged over the {len(finite)} logged points of training the loss of {slow.name} is "
            f"{a:.3f}, that of {fast.name} {b:.3f} nats/token, {change_in_words(found)}."
        )
        left_open = _OPEN_LOSS if found.low <= margin < found.mean else ""
        yield claim.judged(found.low > margin, evidence + left_open)


def above(a: Result, b: Result, margin: float) -> tuple[bool, str]:
    """Whether the loss of ``a`` is more than ``margin`` above that of ``b``, beyond the interval of
    their difference, and the losses in words."""
    found = loss_change(a, b)
    left_open = _OPEN_LOSS if found.low <= margin < found.mean else ""
    return found.low > margin, losses_in_words(a, b) + left_open


def within(a: Result, b: Result, margin: float) -> tuple[bool, str]:
    """The same for at most ``margin`` above it."""
    found = loss_change(a, b)
    left_open = _OPEN_LOSS if found.mean <= margin < found.high else ""
    return found.high <= margin, losses_in_words(a, b) + left_open


def losses_in_words(a: Result, b: Result) -> str:
    """``Text loss at 64 tokens: DroPE 4.388, RoPE 4.083 nats/token, +7.5% (+6.9% to +8.0%).``"""
    end = f"nats/token, {change_in_words(loss_change(a, b))}."
    if a.length == b.length:
        head = f"Text loss at {a.length} tokens: {a.name} {a.loss:.3f}, {b.name} {b.loss:.3f}"
        return f"{head} {end}"
    head = f"Text loss of {a.name} at {a.length} tokens {a.loss:.3f}, at {b.length} {b.loss:.3f}"
    return f"{head} {end}" if a.name == b.name else f"{head} ({b.name}) {end}"


def _rate(result: Result) -> float:
    return 0.0 if result.retrieval is None else result.retrieval.mean
