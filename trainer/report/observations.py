"""The papers' observations held against the numbers of a run.

A claim is *shown* when the numbers support it beyond the 95% interval of the difference, and for a
loss also beyond a stated margin, *not shown* when they do not, and *not judged* when they cannot
tell, as for the reach of a model that has not learned the task, or for a drop that cost nothing.
Claims about methods that a run does not have are left out. "DroPE" is the paper "Extending the
Context of Pretrained LLMs by Dropping Their Positional Embeddings", "RoPE-ID" is "Frayed RoPE and
Long Inputs".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainer.common.errors import did_you_mean
from trainer.report.comparison import (
    Measured,
    certainly_exceeds,
    change_in_words,
    pair_in_words,
)
from trainer.report.judging import (
    Claim,
    above,
    cropping,
    fall,
    judge,
    reach,
    rising_loss,
    same_loss,
    slower,
)
from trainer.report.outcomes import Result
from trainer.report.results import Arm, Drop, Observation, is_known
from trainer.report.statistics import change

# Role to a short name for claims. A caller maps roles to the display names of its methods.
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
) -> tuple[Observation, ...]:
    """Judge every claim that the given methods allow.

    ``roles`` maps a role of ``ROLES`` to the name of its row in ``results``; ``arms`` maps
    a role to its training run (for the speed of learning); ``temperature`` a method's display name
    to its fitted coefficient. Raises ``ValueError`` for a role that is not in ``ROLES``.
    """
    for role in (*roles, *(arms or {})):
        if role not in ROLES:
            raise ValueError(f"{role!r} is not a role.{did_you_mean(role, ROLES)}")
    run = Measured(results, roles)
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
            larger, said = above(nope, rope, SAME_LOSS)
            worse, evidence = worse or larger, f"{evidence} {said}"
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
    of_each = {
        name: [x for x in drop.sequences.get(name, ()) if is_known(x)]
        for name in ("before", "after", "end")
    }
    if not all(of_each.values()):  # a run of an earlier version
        of_each = {"before": [before], "after": [after], "end": [end]}
    rise = change(of_each["after"], of_each["before"])
    if rise.low <= SAME_LOSS:
        yield claim.judged(
            None,
            f"Not judged: the loss does not rise at the drop by more than {SAME_LOSS:.0%} "
            f"({before:.3f} before, {after:.3f} after, {change_in_words(rise)}).",
        )
        return
    lost, won = (
        [a - b for a, b in zip(of_each["after"], of_each[other], strict=True)]
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
