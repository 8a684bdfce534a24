"""The papers' claims as data, judged by the rows of a run.

A claim is *shown* if the numbers support it beyond the 95% interval of the difference and, for a
loss, beyond a stated margin; otherwise it is *not shown*. It is *not judged* if the numbers cannot
tell: the drop changed nothing, or a model has not learned its text or its task. Claims about
methods that a run does not have are left out. "DroPE" is the paper "Extending the Context of
Pretrained LLMs by Dropping Their Positional Embeddings", "RoPE-ID" is "Frayed RoPE and Long
Inputs".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from trainer.config import PERPLEXITY, STATEMENTS
from trainer.evaluation.results import (
    AS_IS,
    Observation,
    Report,
    RunSummary,
    estimates,
    is_known,
    percent,
)
from trainer.evaluation.statistics import Estimate, change
from trainer.report.tables import interval

RIVALS = {
    "rope+pi": "PI",
    "rope+ntk": "NTK-aware scaling",
    "rope+yarn": "YaRN",
    "alibi": "ALiBi",
    "nope": "NoPE from scratch",
    "rope_nope_window": "RNoPE-SWA",
}
"""Names in claims of what DroPE is compared with, by role and method."""
LEARNED = 0.5
"""Retrieval at the training length below which a model has not learned the task."""
LEARNED_TEXT = 0.9
"""Share of a unigram model's loss above which a model has not learned its text."""
KEPT = 0.95
"""Share of RoPE's retrieval, and of the loss that a drop costs (DroPE, Sec. 5.1: "over 95%")."""
HELD = 0.90
"""Share of a method's own retrieval at its training length."""
SAME, NEAR, RISEN = 0.01, 0.02, 0.05
"""Relative margins of losses. Two training seeds of a small model differ by about 1%; a longer
context should lower the loss, so 5% above is far outside of noise."""


class Point(NamedTuple):
    """A score or loss of a row at one length; ``each``: losses of the windows, in their order."""

    name: str
    length: int
    value: Estimate
    each: list[float]


@dataclass(frozen=True)
class Evidence:
    """Evidence of claims.

    ``models``: names of models by role, such as ``rope`` or ``drope``. ``one_text``: whether all
    trained on the same text. Otherwise a model's loss says more about its text than its encoding.
    """

    report: Report
    models: Mapping[str, str]
    one_text: bool = True

    def points(self, key: str, task: str = STATEMENTS) -> dict[float, Point]:
        """Return the scores of a row, or its losses for :data:`PERPLEXITY`, by factor, ascending.

        ``key``: ``rope`` for the model of this role as it is, ``rope+yarn`` with a method;
        ``drope*`` with a temperature if that was measured, as the paper evaluates DroPE.
        """
        if key.endswith("*"):
            return self.points(f"{key[:-1]}+temperature", task) or self.points(key[:-1], task)
        role, _, method = key.partition("+")
        report, row = self.report, (self.models.get(role, ""), method or AS_IS)
        metric = "loss" if task == PERPLEXITY else "score"
        trials = report.trials[(report.trials.task == task) & (report.trials.metric == "loss")]
        losses = trials[(trials.model == row[0]) & (trials.method == row[1])]
        return {
            length / report.training_length: Point(
                report.row_name(row), length, value, losses.value[losses.length == length].tolist()
            )
            for length, value in estimates(report.rows, task, metric).get(row, {}).items()
        }

    def run(self, role: str) -> RunSummary | None:
        """Return the training run of a role."""
        return next((run for run in self.report.runs if run.name == self.models.get(role)), None)


Verdict = tuple[bool | None, str]
"""Whether a claim is shown (None: not judged), and the numbers."""
Place = Literal["trained", "longest", "from 4x"]


def observe(evidence: Evidence) -> tuple[Observation, ...]:
    """Return the verdicts of all claims that the evidence has numbers for."""
    untrained = _untrained(evidence)
    made = []
    for reason, of_kind in ((untrained, CLAIMS), (untrained or _undropped(evidence), DROP_CLAIMS)):
        for source, claims in of_kind.items():
            for text, judge in claims.items():
                if (verdict := judge(evidence)) is not None:
                    shown, numbers = (None, f"{reason} {verdict[1]}") if reason else verdict
                    made.append(Observation(text, source, shown, numbers))
    return tuple(made)


def _untrained(evidence: Evidence) -> str:
    """Return why nothing can be judged if no model has learned its text; else empty."""
    unigram = evidence.report.unigram_loss
    trained = [evidence.points(role, PERPLEXITY).get(1.0) for role in evidence.models]
    least = min((point.value.mean for point in trained if point), default=0.0)
    if unigram is None or least <= LEARNED_TEXT * unigram:
        return ""
    return (
        f"No model has learned its text: the lowest loss is {least:.3f} nats/token, and the "
        f"frequencies of tokens alone give {unigram:.3f}."
    )


def _undropped(evidence: Evidence) -> str:
    """Return why claims about the drop cannot be judged if it changed nothing; else empty."""
    drop = evidence.report.drop
    if drop is None:
        return ""
    before, after = drop["loss_before"], drop["loss_after"]
    if not (is_known(before) and is_known(after)) or after > (1 + SAME) * before:
        return ""
    return f"The drop changed little: loss {before:.3f} to {after:.3f}."


def certainly_exceeds(p: Estimate, q: Estimate, times: float) -> bool:
    """Whether the score ``p`` exceeds ``times`` the score ``q`` with 95% confidence.

    True if the lower limit of p − k q is positive. It is p − k q − sqrt((p − low p)² + k² (high q −
    q)²), after Newcombe (Statistics in Medicine 17, 1998, method 10) for differences and Zou and
    Donner (ibid. 27, 2008) for linear combinations. The formula takes the two as independent, which
    is cautious if both were asked the same questions.
    """
    least = math.hypot(p.mean - p.low, times * (q.high - q.mean))
    return p.mean - times * q.mean - least > 0


def compared(
    ours: Mapping[float, Point], theirs: Mapping[float, Point], at: Place, their_at: Place
) -> list[tuple[Point, Point]]:
    """Return the pairs of points that a claim compares, among the lengths that both have.

    ``at``, ``their_at``: the training length, the longest length beyond it, or all from four times
    the training length on.
    """
    shared = [factor for factor in ours if factor in theirs]
    longer = [factor for factor in shared if factor > 1]
    factors = {
        "trained": [factor for factor in shared if factor == 1],
        "longest": longer[-1:],
        "from 4x": [factor for factor in longer if factor >= 4],
    }
    return [(ours[x], theirs[y]) for x, y in zip(factors[at], factors[their_at], strict=False)]


def retrieves(
    evidence: Evidence,
    a: str,
    b: str,
    times: float,
    at: Place = "longest",
    b_at: Place | None = None,
    learned: Sequence[str] | None = None,
) -> Verdict | None:
    """Judge whether ``a`` retrieves more than ``times`` ``b``.

    ``at``, ``b_at``: see :func:`compared`. ``learned``: roles that must have learned the task
    (None: both).
    """
    pairs = compared(evidence.points(a), evidence.points(b), at, b_at or at)
    if not pairs:
        return None
    for role in (a, b) if learned is None else learned:
        trained = evidence.points(role).get(1.0)
        if trained is None:
            return None, f"{pairs[0][0].name} was not measured at its training length."
        if trained.value.mean < LEARNED:
            return None, f"{_rate(trained)} has not learned the task (below {LEARNED:.0%})."
    shown = all(certainly_exceeds(p.value, q.value, times) for p, q in pairs)
    return shown, " ".join(f"{_rate(p)}, {_rate(q)}." for p, q in pairs)


def falls(evidence: Evidence, role: str) -> Verdict | None:
    """Judge whether the role loses over half of its retrieval at the longest length."""
    return retrieves(evidence, role, role, 2, "trained", "longest")


def loss(
    evidence: Evidence,
    a: str,
    b: str,
    margin: float,
    at: Place = "trained",
    *,
    rises: bool = False,
) -> Verdict | None:
    """Judge whether the loss of ``a`` is at most ``margin`` above that of ``b`` at its training
    length, with the whole interval over the windows of text on which both were measured; ``rises``:
    whether it is more than ``margin`` above."""
    ours, theirs = (evidence.points(role, PERPLEXITY) for role in (a, b))
    pairs = compared(ours, theirs, at, "trained")
    if not pairs:
        return None
    ((p, q),) = pairs
    if not len(p.each) == len(q.each) > 1:
        return None, "Measured on fewer than two common windows."
    difference = change(p.each, q.each)
    numbers = (
        f"Text loss: {q.name} {q.value.mean:.3f} at {q.length} tokens, {p.name} "
        f"{p.value.mean:.3f} at {p.length} tokens, {_signed(difference)}."
    )
    if a != b and not evidence.one_text:
        return None, f"The models trained on different text. {numbers}"
    return difference.low > margin if rises else difference.high <= margin, numbers


def _rate(point: Point) -> str:
    rate = point.value
    limits = interval(rate.low, rate.high)
    return f"{point.name} {percent(rate.mean)}% ({limits}) at {point.length} tokens"


def _signed(difference: Estimate) -> str:
    return f"{difference.mean:+.1%} ({difference.low:+.1%} to {difference.high:+.1%})"


def learns_slower(evidence: Evidence) -> Verdict | None:
    """Judge whether the mean training loss of NoPE over the logged points is above RoPE's."""
    fast, slow = evidence.run("rope"), evidence.run("nope")
    if fast is None or slow is None:
        return None
    curves = pd.DataFrame({"fast": dict(fast.curve), "slow": dict(slow.curve)}, dtype=float)
    curves = curves[np.isfinite(curves).all(axis=1)]
    if curves.empty:
        return None
    difference = change(curves.slow.tolist(), curves.fast.tolist())
    return difference.low > SAME, (
        f"Mean training loss over {len(curves)} logged points: {slow.name} "
        f"{curves.slow.mean():.3f}, {fast.name} {curves.fast.mean():.3f} nats/token, "
        f"{_signed(difference)}."
    )


def is_won_back(evidence: Evidence) -> Verdict | None:
    """Judge which share of the rise at the drop is gone at the end, over the sequences on which the
    losses were measured."""
    drop = evidence.report.drop
    if drop is None or evidence.run("drope") not in evidence.report.runs[:1]:
        return None  # the run itself comes first, and its drop may be another one
    losses = {name: drop[f"loss_{name}"] for name in ("before", "after", "end")}
    if not all(map(is_known, losses.values())):
        return None, "A loss before, after or at the end is missing."
    before, after, end = (
        np.array(drop["sequences"].get(name) or [loss], float) for name, loss in losses.items()
    )
    numbers = "Loss {before:.3f} before, {after:.3f} after, {end:.3f} at the end".format(**losses)
    numbers = f"{numbers} (step {drop['step']})."
    if change(after.tolist(), before.tolist()).low <= SAME:
        return None, f"{numbers} The drop raises it by no more than {SAME:.0%}."
    share = change((after - end).tolist(), (after - before).tolist())
    limits = f" ({1 + share.low:.0%} to {1 + share.high:.0%})" if len(before) > 1 else ""
    text = f"{numbers} {1 + share.mean:.0%}{limits} of the rise is won back."
    return 1 + share.low >= KEPT, text


def ends_behind(evidence: Evidence) -> Verdict | None:
    """Judge whether NoPE is behind RoPE in retrieval or in text loss."""
    both = (
        retrieves(evidence, "rope", "nope", 1, "trained", learned=()),
        loss(evidence, "nope", "rope", SAME, rises=True),
    )
    known = [verdict for verdict in both if verdict is not None]
    shown = any(shown for shown, _ in known)
    return (shown, " ".join(numbers for _, numbers in known)) if known else None


def keeps_only_loss(evidence: Evidence, role: str) -> Verdict | None:
    """Judge whether the role keeps its text loss at the longest length and not its retrieval."""
    retrieval, kept = falls(evidence, role), loss(evidence, role, role, RISEN, "longest")
    if retrieval is None or kept is None:
        return None
    numbers = f"{retrieval[1]} {kept[1]}"
    return (None if retrieval[0] is None else retrieval[0] and kept[0]), numbers


Claims = dict[str, dict[str, Callable[[Evidence], Verdict | None]]]
CLAIMS: Claims = {
    "DroPE, Obs. 1": {
        f"NoPE learns more slowly than RoPE: its training loss is over {SAME:.0%} higher": (
            learns_slower
        ),
    },
    "DroPE, Obs. 1 and Fig. 3": {
        "NoPE from scratch ends behind RoPE on the same budget, in retrieval or by over "
        f"{SAME:.0%} in text loss": ends_behind,
    },
    "DroPE, Obs. 2 and Table 1; RoPE-ID, Table 1": {
        "RoPE loses more than half of its retrieval beyond its training length": (
            lambda e: falls(e, "rope")
        ),
    },
    "DroPE, Sec. 1": {
        f"RoPE's text loss rises beyond its training length too, by more than {RISEN:.0%}": (
            lambda e: loss(e, "rope", "rope", RISEN, "longest", rises=True)
        ),
    },
    "DroPE, Sec. 4 and Fig. 5": {
        f"YaRN keeps its text loss (within {RISEN:.0%}) at the longest length, and yet loses more "
        "than half of its retrieval": lambda e: keeps_only_loss(e, "rope+yarn"),
    },
    "RoPE-ID, Table 1": {
        "HalfRoPE loses more than half of its retrieval beyond its training length": (
            lambda e: falls(e, "half_rope")
        ),
        "YaRN retrieves at least twice as much as RoPE at the longest length": (
            lambda e: retrieves(e, "rope+yarn", "rope", 2)
        ),
        "High-frequency RoPE retrieves less than RoPE already at the training length": (
            lambda e: retrieves(e, "rope", "high_frequency", 1, "trained", learned=["rope"])
        ),
        f"RoPE-ID keeps at least {HELD:.0%} of its retrieval at the longest length": (
            lambda e: retrieves(e, "rope_id*", "rope_id*", HELD, "longest", "trained")
        ),
        "RoPE-ID retrieves at least twice as much as RoPE at the longest length": (
            lambda e: retrieves(e, "rope_id*", "rope", 2)
        ),
        "A softmax temperature helps RoPE-ID at the longest length": (
            lambda e: retrieves(e, "rope_id+temperature", "rope_id", 1)
        ),
    },
}
"""Judges by the place in a paper and by the claim; they return None without the numbers."""
DROP_CLAIMS: Claims = {
    "DroPE, Obs. 3 and Sec. 5.1": {
        f"Recalibration wins back at least {KEPT:.0%} of the loss that the drop costs": (
            is_won_back
        ),
        f"DroPE keeps at least {KEPT:.0%} of RoPE's retrieval at the training length": (
            lambda e: retrieves(e, "drope", "rope", KEPT, "trained", learned=["rope"])
        ),
    },
    "DroPE, Fig. 2 and Table 7": {
        f"DroPE's text loss at the training length matches RoPE's, within {SAME:.0%}": (
            lambda e: loss(e, "drope", "rope", SAME)
        ),
        f"DroPE's text loss is no worse than that of NoPE from scratch, within {NEAR:.0%}": (
            lambda e: loss(e, "drope", "nope", NEAR)
        ),
    },
    "DroPE, Obs. 3 and Table 3": {
        "DroPE retrieves at least twice as much as RoPE from 4× the training length on": (
            lambda e: retrieves(e, "drope", "rope", 2, "from 4x")
        ),
    },
    "DroPE, Table 1": {
        f"DroPE retrieves more than {name} at the longest length": (
            partial(retrieves, a="drope*", b=rival if "+" in rival else f"{rival}*", times=1)
        )
        for rival, name in RIVALS.items()
    },
    "DroPE, App. C.2": {
        "A softmax temperature helps DroPE at the longest length": (
            lambda e: retrieves(e, "drope+temperature", "drope", 1)
        ),
    },
}
"""The same for claims about a model whose encoding was dropped."""
