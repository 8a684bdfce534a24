"""The papers' claims, judged by the numbers of a run.

A claim is *shown* if the numbers support it beyond the 95% interval of the difference and, for a
loss, beyond a stated margin; otherwise it is *not shown*. It is *not judged* if the numbers cannot
tell, as for the reach of a model that has not learned the task, or for a drop that cost nothing.
Claims about methods that a run does not have are left out. "DroPE" is the paper "Extending the
Context of Pretrained LLMs by Dropping Their Positional Embeddings", "RoPE-ID" is "Frayed RoPE and
Long Inputs".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from trainer.common.errors import did_you_mean
from trainer.common.words import percent
from trainer.evaluation.outcomes import Result
from trainer.evaluation.results import Arm, Drop, Observation, is_known
from trainer.evaluation.statistics import Estimate, change
from trainer.report.tables import interval

# A model with less retrieval at the training length has not learned the task: its reach is unknown.
LEARNED = 0.5

# Base method of each extension and temperature, which are the identity at factor 1.
_BASE_ROLES = {
    "rope_pi": "rope",
    "rope_ntk": "rope",
    "rope_yarn": "rope",
    "rope_temperature": "rope",
    "drope_temperature": "drope",
    "nope_temperature": "nope",
    "rope_id_temperature": "rope_id",
}


def certainly_exceeds(a: Result, b: Result, times: float) -> bool:
    """Whether the retrieval of ``a`` exceeds ``times`` the retrieval of ``b`` with 95% confidence.

    True if the lower limit of a − k b is positive. It is a − k b − sqrt((a − low a)² + k² (high b −
    b)²), after Newcombe (Statistics in Medicine 17, 1998, method 10) for differences and Zou and
    Donner (ibid. 27, 2008) for linear combinations. The formula takes the two as independent, which
    is cautious if both were asked the same questions.
    """
    p, q = _retrieval(a), _retrieval(b)
    least = math.hypot(p.mean - p.low, times * (q.high - q.mean))
    return p.mean - times * q.mean - least > 0


def loss_change(cell: Result, reference: Result) -> Estimate:
    """Return the relative difference of two losses: 0.01 if ``cell`` is 1% above ``reference``.

    Its interval is over the windows of text on which both were measured. If these are unknown, the
    interval is the value alone. One window leaves any value open.
    """
    if cell.loss is None or reference.loss is None:
        raise ValueError("a loss that was not measured cannot be compared")
    paired = len(cell.losses) == len(reference.losses)
    if paired and len(cell.losses) > 1:
        return change(cell.losses, reference.losses)
    only = cell.loss / reference.loss - 1
    if paired and cell.losses:
        return Estimate(only, -math.inf, math.inf)
    return Estimate(only, only, only)


def change_in_words(difference: Estimate) -> str:
    """Return ``+7.5% (+6.9% to +8.0%)``."""
    if difference.low == difference.high:
        return signed(difference.mean)
    if math.isinf(difference.high):
        return f"{signed(difference.mean)} (one window, which gives no interval)"
    low, high = signed(difference.low), signed(difference.high)
    return f"{signed(difference.mean)} ({low} to {high})"


def signed(share: float) -> str:
    """Return a share in percent with its sign; zero has none."""
    text = f"{share:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def in_words(cell: Result) -> str:
    """Return ``DroPE 95.6% (92.4–97.5)``."""
    rate = _retrieval(cell)
    return f"{cell.name} {percent(rate.mean)}% ({interval(rate)})"


def pair_in_words(a: Result, b: Result) -> str:
    """Return two retrieval rates with their intervals as text."""
    if a.length == b.length:
        return f"At {a.length} tokens {in_words(a)}, {in_words(b)}."
    return f"{in_words(a)} at {a.length} tokens, {in_words(b)} at {b.length}."


@dataclass(frozen=True)
class Measured:
    """Results of a run by the role of their method.

    ``one_text``: whether all models trained on the same text. Otherwise a model's loss says more
    about its text than about its encoding.
    """

    cells: Sequence[Result]
    roles: Mapping[str, str]
    one_text: bool = True

    def with_temperature(self, role: str) -> str:
        """Return the role with a temperature if that was measured, otherwise the role."""
        scaled = f"{role}_temperature"
        return scaled if any(c.name == self.roles.get(scaled) for c in self.cells) else role

    def find(self, role: str, length: int) -> Result | None:
        """Return the cell of a role's method at a length, if there is one."""
        method = self.roles.get(role)
        return next((c for c in self.cells if (c.name, c.length) == (method, length)), None)

    def cell(self, role: str, length: int) -> Result:
        """Return the cell of a role's method at a length. Raises ``KeyError`` if there is none."""
        cell = self.find(role, length)
        if cell is None:
            raise KeyError((role, length))
        return cell

    def trained(self, role: str, quantity: str = "retrieval") -> Result | None:
        """Return the cell with ``quantity`` at the training length.

        An extension or temperature that was not measured there is the identity: take its base.
        """
        for candidate in (role, _BASE_ROLES.get(role)):
            for cell in self.cells:
                same = candidate is not None and cell.name == self.roles.get(candidate)
                if same and cell.factor == 1 and getattr(cell, quantity) is not None:
                    return cell
        return None

    def beyond(self, *roles: str, quantity: str = "retrieval") -> list[int]:
        """Return the lengths beyond the training length at which all roles have ``quantity``."""
        lengths = sorted({cell.length for cell in self.cells if cell.factor > 1})
        return [
            length
            for length in lengths
            if all(getattr(self.find(role, length), quantity, None) is not None for role in roles)
        ]

    def not_learned(self, *roles: str) -> str | None:
        """Return why the reach of these methods cannot be judged, or None if it can."""
        for role in roles:
            cell = self.trained(role)
            if cell is None:
                return f"Not judged: {self.roles[role]} was not measured at its training length."
            if _retrieval(cell).mean < LEARNED:
                return (
                    f"Not judged: within its training length of {cell.length} tokens "
                    f"{in_words(cell)} has not learned the task (below {100 * LEARNED:g}%)."
                )
        return None


def _retrieval(cell: Result) -> Estimate:
    if cell.retrieval is None:
        raise ValueError(f"{cell.name!r} has no retrieval at {cell.length} tokens")
    return cell.retrieval


_OPEN = " The rates agree with the claim, but their 95% intervals leave it open."
_OPEN_LOSS = " The change agrees with the claim, but its 95% interval leaves it open."


@dataclass(frozen=True)
class Claim:
    """Statement of a paper, and its place there."""

    text: str
    source: str

    def judged(self, shown: bool | None, evidence: str) -> Observation:
        """Return the claim with its verdict."""
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
    """Judge whether the first of every pair retrieves more than ``times`` the second.

    Not judged if a role in ``learned`` has not learned the task.
    """
    obstacle = run.not_learned(*learned)
    if obstacle:
        return claim.judged(None, obstacle)
    shown = all(certainly_exceeds(a, b, times) for a, b in pairs)
    evidence = " ".join(pair_in_words(a, b) for a, b in pairs) + note
    if not shown and all(_retrieval(a).mean > times * _retrieval(b).mean for a, b in pairs):
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
    """Judge whether the first role retrieves more than ``times`` the second at long lengths.

    Compared are all lengths from ``from_factor`` on, if given, otherwise the longest alone.
    """
    lengths = run.beyond(*roles)
    if from_factor is None:
        far = lengths[-1:]
    else:
        far = [n for n in lengths if run.cell(roles[0], n).factor >= from_factor]
    pairs = [(run.cell(roles[0], n), run.cell(roles[1], n)) for n in far]
    if pairs:
        yield judge(run, claim, pairs, times, roles, note=note)


def fall(run: Measured, claim: Claim, role: str) -> Iterator[Observation]:
    """Judge whether a role has lost over half of its retrieval at the longest length."""
    trained, beyond = run.trained(role), run.beyond(role)
    if trained and beyond:
        pair = (trained, run.cell(role, beyond[-1]))
        yield judge(run, claim, [pair], 2, (role,))


def rising_loss(run: Measured, claim: Claim, role: str, margin: float) -> Iterator[Observation]:
    """Judge whether the loss at the longest length is over ``margin`` above the trained one."""
    trained, beyond = run.trained(role, "loss"), run.beyond(role, quantity="loss")
    if trained and beyond:
        longest = run.cell(role, beyond[-1])
        yield claim.judged(*above(longest, trained, margin))


def same_loss(
    run: Measured, claim: Claim, roles: tuple[str, str], margin: float
) -> Iterator[Observation]:
    """Judge whether the first role's trained loss is at most ``margin`` above the second's."""
    a, b = (run.trained(role, "loss") for role in roles)
    if a and b:
        holds, losses = within(a, b, margin)
        if run.one_text:
            yield claim.judged(holds, losses)
        else:
            yield claim.judged(None, f"Not judged: the models trained on different text. {losses}")


def cropping(run: Measured, claim: Claim, role: str, margin: float) -> Iterator[Observation]:
    """Judge whether a role keeps its loss at the longest length but loses half of its retrieval.

    The loss may be up to ``margin`` above the base method's at the training length.
    """
    loss, retrieval = run.trained(role, "loss"), run.trained(role)
    both = sorted(set(run.beyond(role)) & set(run.beyond(role, quantity="loss")))
    if loss and retrieval and both:
        longest = run.cell(role, both[-1])
        pair = (retrieval, longest)
        holds, losses = within(longest, loss, margin)
        fallen = judge(run, claim, [pair], 2, (role,), note=f" {losses}")
        shown = None if fallen.shown is None else fallen.shown and holds
        yield claim.judged(shown, fallen.evidence)


def slower(claim: Claim, fast: Arm, slow: Arm, margin: float) -> Iterator[Observation]:
    """Judge whether ``slow`` has an over ``margin`` higher mean training loss on shared steps."""
    curves = [dict(arm.curve) for arm in (slow, fast)]
    pairs = [(curves[0][step], curves[1][step]) for step in curves[0] if step in curves[1]]
    finite = [(a, b) for a, b in pairs if is_known(a) and is_known(b)]
    if finite:
        of_slow, of_fast = zip(*finite, strict=True)
        a, b, difference = fmean(of_slow), fmean(of_fast), change(of_slow, of_fast)
        evidence = (
            f"Mean training loss over {len(finite)} logged points: {slow.name} {a:.3f}, "
            f"{fast.name} {b:.3f} nats/token, {change_in_words(difference)}."
        )
        left_open = _OPEN_LOSS if difference.low <= margin < difference.mean else ""
        yield claim.judged(difference.low > margin, evidence + left_open)


def above(a: Result, b: Result, margin: float) -> tuple[bool, str]:
    """Return whether the loss of ``a`` is over ``margin`` above that of ``b``, and both as text.

    The whole interval of their difference must be above the margin.
    """
    difference = loss_change(a, b)
    left_open = _OPEN_LOSS if difference.low <= margin < difference.mean else ""
    return difference.low > margin, losses_in_words(a, b) + left_open


def within(a: Result, b: Result, margin: float) -> tuple[bool, str]:
    """Return whether the loss of ``a`` is at most ``margin`` above ``b``, and both as text."""
    difference = loss_change(a, b)
    left_open = _OPEN_LOSS if difference.mean <= margin < difference.high else ""
    return difference.high <= margin, losses_in_words(a, b) + left_open


def losses_in_words(a: Result, b: Result) -> str:
    """Return ``Text loss at 64 tokens: DroPE 4.388, RoPE 4.083 nats/token, +7.5% (...).``"""
    end = f"nats/token, {change_in_words(loss_change(a, b))}."
    if a.length == b.length:
        head = f"Text loss at {a.length} tokens: {a.name} {a.loss:.3f}, {b.name} {b.loss:.3f}"
        return f"{head} {end}"
    head = f"Text loss of {a.name} at {a.length} tokens {a.loss:.3f}, at {b.length} {b.loss:.3f}"
    return f"{head} {end}" if a.name == b.name else f"{head} ({b.name}) {end}"


# Role to its name in claims. Callers map roles to the display names of their methods.
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

KEPT = 0.95  # of RoPE's retrieval, and of the loss that a drop costs (DroPE, Sec. 5.1: "over 95%")
HELD = 0.90  # of a method's own retrieval at its training length
SAME_LOSS = 0.01  # relative; two training seeds of a small model differ by about as much
NEAR_LOSS = 0.02
RISEN_LOSS = 0.05  # a longer context should lower the loss, so this is far outside of noise


def observe(
    results: Sequence[Result],
    roles: Mapping[str, str],
    *,
    drop: Drop | None = None,
    arms: Mapping[str, Arm] | None = None,
    temperature: Mapping[str, float | None] | None = None,
    one_text: bool = True,
) -> tuple[Observation, ...]:
    """Judge every claim about the given methods.

    ``roles`` maps a role of ``ROLES`` to the name of its row in ``results``; ``arms`` maps
    a role to its training run (for the speed of learning); ``temperature`` a method's display name
    to its fitted coefficient; ``one_text``: whether all models trained on the same text. Raises
    ``ValueError`` for a role that is not in ``ROLES``.
    """
    for role in (*roles, *(arms or {})):
        if role not in ROLES:
            raise ValueError(f"{role!r} is not a role.{did_you_mean(role, ROLES)}")
    run = Measured(results, roles, one_text)
    return (
        *_rope(run),
        *_nope(run, arms or {}),
        *_drop(drop),
        *_drope(run),
        *_temperature(run, temperature or {}),
        *_rope_id(run),
    )


def _rope(run: Measured) -> Iterator[Observation]:
    for role, source in (
        ("rope", "DroPE, Obs. 2 and Table 1; RoPE-ID, Table 1"),
        ("half_rope", "RoPE-ID, Table 1"),
    ):
        text = f"{ROLES[role]} loses more than half of its retrieval beyond its training length"
        yield from fall(run, Claim(text, source), role)
    text = f"RoPE's text loss rises beyond its training length too, by more than {RISEN_LOSS:.0%}"
    yield from rising_loss(run, Claim(text, "DroPE, Sec. 1"), "rope", RISEN_LOSS)
    text = "YaRN retrieves at least twice as much as RoPE at the longest length"
    yield from reach(run, Claim(text, "RoPE-ID, Table 1"), ("rope_yarn", "rope"), 2)
    text = (
        f"YaRN keeps its text loss (within {RISEN_LOSS:.0%}) at the longest length, and yet loses "
        "more than half of its retrieval"
    )
    yield from cropping(run, Claim(text, "DroPE, Sec. 4 and Fig. 5"), "rope_yarn", RISEN_LOSS)


def _nope(run: Measured, arms: Mapping[str, Arm]) -> Iterator[Observation]:
    if "rope" in arms and "nope" in arms:
        text = (
            f"NoPE learns more slowly than RoPE: its training loss is over {SAME_LOSS:.0%} higher"
        )
        yield from slower(Claim(text, "DroPE, Obs. 1"), arms["rope"], arms["nope"], SAME_LOSS)
    rope, nope = run.trained("rope"), run.trained("nope")
    if rope and nope:
        worse = certainly_exceeds(rope, nope, 1)
        evidence = pair_in_words(rope, nope)
        if rope.loss is not None and nope.loss is not None:
            larger, losses = above(nope, rope, SAME_LOSS)
            worse, evidence = worse or larger, f"{evidence} {losses}"
        text = (
            "NoPE from scratch ends behind RoPE on the same budget, in retrieval or by over "
            f"{SAME_LOSS:.0%} in text loss"
        )
        yield Claim(text, "DroPE, Obs. 1 and Fig. 3").judged(worse, evidence)


def _drop(drop: Drop | None) -> Iterator[Observation]:
    if drop is None:
        return
    text = f"Recalibration wins back at least {KEPT:.0%} of the loss that the drop costs"
    claim = Claim(text, "DroPE, Obs. 3 and Sec. 5.1")
    before, after, end = drop.loss_before, drop.loss_after, drop.loss_end
    if not (is_known(before) and is_known(after) and is_known(end)):
        yield claim.judged(None, "Not judged: a loss before, after or at the end is missing.")
        return
    by_time = {
        name: [x for x in drop.sequences.get(name, ()) if is_known(x)]
        for name in ("before", "after", "end")
    }
    if not all(by_time.values()):  # a run of an earlier version
        by_time = {"before": [before], "after": [after], "end": [end]}
    rise = change(by_time["after"], by_time["before"])
    if rise.low <= SAME_LOSS:
        yield claim.judged(
            None,
            f"Not judged: the loss does not rise at the drop by more than {SAME_LOSS:.0%} "
            f"({before:.3f} before, {after:.3f} after, {change_in_words(rise)}).",
        )
        return
    lost, won = (
        [a - b for a, b in zip(by_time["after"], by_time[other], strict=True)]
        for other in ("before", "end")
    )
    share = change(won, lost)
    limits = ""
    if len(won) > 1:
        limits = f" (95% interval {1 + share.low:.0%} to {1 + share.high:.0%})"
    evidence = (
        f"At step {drop.step} the loss rises from {before:.3f} to {after:.3f} nats/token and "
        f"ends at {end:.3f}: {1 + share.mean:.0%}{limits} of the rise is won back."
    )
    yield claim.judged(1 + share.low >= KEPT, evidence)


def _drope(run: Measured) -> Iterator[Observation]:
    rope, drope = run.trained("rope"), run.trained("drope")
    if rope and drope:
        text = f"DroPE keeps at least {KEPT:.0%} of RoPE's retrieval at the training length"
        yield judge(run, Claim(text, "DroPE, Obs. 3"), [(drope, rope)], KEPT, ("rope",))
    source = "DroPE, Fig. 2 and Table 7"
    text = f"DroPE's text loss at the training length matches RoPE's, within {SAME_LOSS:.0%}"
    yield from same_loss(run, Claim(text, source), ("drope", "rope"), SAME_LOSS)
    text = f"DroPE's text loss is no worse than that of NoPE from scratch, within {NEAR_LOSS:.0%}"
    yield from same_loss(run, Claim(text, source), ("drope", "nope"), NEAR_LOSS)
    text = "DroPE retrieves at least twice as much as RoPE from 4× the training length on"
    claim = Claim(text, "DroPE, Obs. 3 and Table 3")
    yield from reach(run, claim, ("drope", "rope"), 2, from_factor=4)
    # The paper evaluates DroPE and NoPE with a fitted temperature.
    best = run.with_temperature("drope")
    for rival in ("rope_pi", "rope_ntk", "rope_yarn", "alibi", "nope", "rope_nope_window"):
        claim = Claim(
            f"DroPE retrieves more than {ROLES[rival]} at the longest length", "DroPE, Table 1"
        )
        yield from reach(run, claim, (best, run.with_temperature(rival)), 1)


def _temperature(run: Measured, fitted: Mapping[str, float | None]) -> Iterator[Observation]:
    for role, source in (("drope", "DroPE, App. C.2"), ("rope_id", "RoPE-ID, Table 1")):
        scaled = f"{role}_temperature"
        c = fitted.get(run.roles.get(scaled, ""))
        note = "" if c is None else f" Its coefficient is c = {c:.3f}."
        text = f"A softmax temperature helps {ROLES[role]} at the longest length"
        yield from reach(run, Claim(text, source), (scaled, role), 1, note=note)


def _rope_id(run: Measured) -> Iterator[Observation]:
    best = run.with_temperature("rope_id")
    trained, beyond = run.trained(best), run.beyond(best)
    if trained and beyond:
        claim = Claim(
            f"RoPE-ID keeps at least {HELD:.0%} of its retrieval at the longest length",
            "RoPE-ID, Table 1",
        )
        yield judge(run, claim, [(run.cell(best, beyond[-1]), trained)], HELD, (best,))
    text = "RoPE-ID retrieves at least twice as much as RoPE at the longest length"
    yield from reach(run, Claim(text, "RoPE-ID, Table 1"), (best, "rope"), 2)
    rope, fast = run.trained("rope"), run.trained("high_frequency")
    if rope and fast:
        text = "High-frequency RoPE retrieves less than RoPE already at the training length"
        yield judge(run, Claim(text, "RoPE-ID, Table 1"), [(rope, fast)], 1, ("rope",))
