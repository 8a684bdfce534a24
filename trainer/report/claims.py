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
from statistics import fmean
from typing import Literal, NamedTuple

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
    each: tuple[float, ...] = ()


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
        of_row = trials[(trials.model == row[0]) & (trials.method == row[1])]
        return {
            length / report.training_length: Point(
                report.row_name(row), length, value, tuple(of_row.value[of_row.length == length])
            )
            for length, value in estimates(report.rows, task, metric).get(row, {}).items()
        }

    def run(self, role: str) -> RunSummary | None:
        """Return the training run of a role."""
        return next((run for run in self.report.runs if run.name == self.models.get(role)), None)


Verdict = tuple[bool | None, str]
"""Whether a claim is shown (None: not judged), and the numbers."""
Predicate = Callable[[Evidence], Verdict | None]
"""Judges a claim; None without the numbers."""
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


def retrieves(
    a: str,
    b: str,
    times: float,
    at: Place = "longest",
    b_at: Place | None = None,
    *,
    learned: Sequence[str] | None = None,
) -> Predicate:
    """Return a predicate: ``a`` retrieves more than ``times`` ``b``.

    ``at``, ``b_at``: the training length, the longest length of both, or all from four times the
    training length on. ``learned``: roles that must have learned the task (None: both).
    """

    def judge(evidence: Evidence) -> Verdict | None:
        ours, theirs = evidence.points(a), evidence.points(b)
        factors = zip(_at(at, ours, theirs), _at(b_at or at, ours, theirs), strict=False)
        places = [(ours[x], theirs[y]) for x, y in factors]
        if not places:
            return None
        for role in (a, b) if learned is None else learned:
            trained = evidence.points(role).get(1.0)
            if trained is None:
                return None, f"{places[0][0].name} was not measured at its training length."
            if trained.value.mean < LEARNED:
                return None, f"{_rate(trained)} has not learned the task (below {LEARNED:.0%})."
        shown = all(certainly_exceeds(p.value, q.value, times) for p, q in places)
        return shown, " ".join(f"{_rate(p)}, {_rate(q)}." for p, q in places)

    return judge


def _at(place: Place, ours: Mapping[float, Point], theirs: Mapping[float, Point]) -> list[float]:
    """Return the factors of a place among those of both."""
    shared = [factor for factor in ours if factor in theirs]
    longer = [factor for factor in shared if factor > 1]
    if place == "trained":
        return [factor for factor in shared if factor == 1]
    return longer[-1:] if place == "longest" else [factor for factor in longer if factor >= 4]


def falls(role: str) -> Predicate:
    """Return a predicate: the role loses over half of its retrieval at the longest length."""
    return retrieves(role, role, 2, "trained", "longest")


def loss(a: str, b: str, margin: float, at: Place = "trained", *, rises: bool = False) -> Predicate:
    """Return a predicate: the loss of ``a`` is at most ``margin`` above that of ``b`` at its
    training length, with the whole interval over the windows of text on which both were measured;
    ``rises``: it is more than ``margin`` above."""

    def judge(evidence: Evidence) -> Verdict | None:
        ours, theirs = (evidence.points(role, PERPLEXITY) for role in (a, b))
        places = _at(at, ours, ours)
        if not places or 1.0 not in theirs:
            return None
        p, q = ours[places[-1]], theirs[1.0]
        if len(p.each) == len(q.each) > 1:
            difference = change(p.each, q.each)
        else:
            difference = Estimate(p.value.mean / q.value.mean - 1, -math.inf, math.inf)
        numbers = (
            f"Text loss: {q.name} {q.value.mean:.3f} at {q.length} tokens, {p.name} "
            f"{p.value.mean:.3f} at {p.length} tokens, {_signed(difference)}."
        )
        if a != b and not evidence.one_text:
            return None, f"The models trained on different text. {numbers}"
        return difference.low > margin if rises else difference.high <= margin, numbers

    return judge


def combined(rule: Callable[[list[bool | None]], bool], *parts: Predicate) -> Predicate:
    """Return a predicate: ``any`` or ``all`` of the parts are shown."""

    def judge(evidence: Evidence) -> Verdict | None:
        verdicts = [verdict for part in parts if (verdict := part(evidence)) is not None]
        if len(verdicts) < (len(parts) if rule is all else 1):
            return None
        shown = [shown for shown, _ in verdicts]
        text = " ".join(text for _, text in verdicts)
        return None if rule is all and None in shown else rule(shown), text

    return judge


def _rate(point: Point) -> str:
    rate = point.value
    limits = interval(rate.low, rate.high)
    return f"{point.name} {percent(rate.mean)}% ({limits}) at {point.length} tokens"


def _signed(difference: Estimate) -> str:
    text = f"{difference.mean:+.1%}"
    if math.isinf(difference.high):
        return text
    return f"{text} ({difference.low:+.1%} to {difference.high:+.1%})"


def learns_slower(evidence: Evidence) -> Verdict | None:
    """Judge whether the mean training loss of NoPE over the logged points is above RoPE's."""
    fast, slow = evidence.run("rope"), evidence.run("nope")
    if fast is None or slow is None:
        return None
    others = dict(fast.curve)
    pairs = [(a, others.get(step)) for step, a in slow.curve]
    finite = [(a, b) for a, b in pairs if is_known(a) and is_known(b)]
    if not finite:
        return None
    ours, theirs = zip(*finite, strict=True)
    difference = change(ours, theirs)
    return difference.low > SAME, (
        f"Mean training loss over {len(finite)} logged points: {slow.name} {fmean(ours):.3f}, "
        f"{fast.name} {fmean(theirs):.3f} nats/token, {_signed(difference)}."
    )


def is_won_back(evidence: Evidence) -> Verdict | None:
    """Judge which share of the rise at the drop is gone at the end, over the sequences on which the
    losses were measured."""
    drop = evidence.report.drop
    if drop is None or evidence.run("drope") not in evidence.report.runs[:1]:
        return None  # the run itself comes first, and its drop may be another one
    measured = drop["loss_before"], drop["loss_after"], drop["loss_end"]
    losses = [loss for loss in measured if is_known(loss)]
    if len(losses) < len(measured):
        return None, "A loss before, after or at the end is missing."
    names = "before", "after", "end"
    each = [[x for x in drop["sequences"].get(name, ()) if is_known(x)] for name in names]
    before, after, end = each if all(each) else ([loss] for loss in losses)
    numbers = "Loss {:.3f} before, {:.3f} after, {:.3f} at the end".format(*losses)
    numbers = f"{numbers} (step {drop['step']})."
    if change(after, before).low <= SAME:
        return None, f"{numbers} The drop raises it by no more than {SAME:.0%}."
    lost, won = ([a - b for a, b in zip(after, other, strict=True)] for other in (before, end))
    share = change(won, lost)
    limits = f" ({1 + share.low:.0%} to {1 + share.high:.0%})" if len(won) > 1 else ""
    text = f"{numbers} {1 + share.mean:.0%}{limits} of the rise is won back."
    return 1 + share.low >= KEPT, text


CLAIMS: dict[str, dict[str, Predicate]] = {
    "DroPE, Obs. 1": {
        f"NoPE learns more slowly than RoPE: its training loss is over {SAME:.0%} higher": (
            learns_slower
        ),
    },
    "DroPE, Obs. 1 and Fig. 3": {
        "NoPE from scratch ends behind RoPE on the same budget, in retrieval or by over "
        f"{SAME:.0%} in text loss": combined(
            any,
            retrieves("rope", "nope", 1, "trained", learned=()),
            loss("nope", "rope", SAME, rises=True),
        ),
    },
    "DroPE, Obs. 2 and Table 1; RoPE-ID, Table 1": {
        "RoPE loses more than half of its retrieval beyond its training length": falls("rope"),
    },
    "DroPE, Sec. 1": {
        f"RoPE's text loss rises beyond its training length too, by more than {RISEN:.0%}": (
            loss("rope", "rope", RISEN, "longest", rises=True)
        ),
    },
    "DroPE, Sec. 4 and Fig. 5": {
        f"YaRN keeps its text loss (within {RISEN:.0%}) at the longest length, and yet loses more "
        "than half of its retrieval": (
            combined(all, falls("rope+yarn"), loss("rope+yarn", "rope+yarn", RISEN, "longest"))
        ),
    },
    "RoPE-ID, Table 1": {
        "HalfRoPE loses more than half of its retrieval beyond its training length": (
            falls("half_rope")
        ),
        "YaRN retrieves at least twice as much as RoPE at the longest length": (
            retrieves("rope+yarn", "rope", 2)
        ),
        "High-frequency RoPE retrieves less than RoPE already at the training length": (
            retrieves("rope", "high_frequency", 1, "trained", learned=["rope"])
        ),
        f"RoPE-ID keeps at least {HELD:.0%} of its retrieval at the longest length": (
            retrieves("rope_id*", "rope_id*", HELD, "longest", "trained")
        ),
        "RoPE-ID retrieves at least twice as much as RoPE at the longest length": (
            retrieves("rope_id*", "rope", 2)
        ),
        "A softmax temperature helps RoPE-ID at the longest length": (
            retrieves("rope_id+temperature", "rope_id", 1)
        ),
    },
}
"""Predicates by the place in a paper and by the claim."""
DROP_CLAIMS: dict[str, dict[str, Predicate]] = {
    "DroPE, Obs. 3 and Sec. 5.1": {
        f"Recalibration wins back at least {KEPT:.0%} of the loss that the drop costs": (
            is_won_back
        ),
        f"DroPE keeps at least {KEPT:.0%} of RoPE's retrieval at the training length": (
            retrieves("drope", "rope", KEPT, "trained", learned=["rope"])
        ),
    },
    "DroPE, Fig. 2 and Table 7": {
        f"DroPE's text loss at the training length matches RoPE's, within {SAME:.0%}": (
            loss("drope", "rope", SAME)
        ),
        f"DroPE's text loss is no worse than that of NoPE from scratch, within {NEAR:.0%}": (
            loss("drope", "nope", NEAR)
        ),
    },
    "DroPE, Obs. 3 and Table 3": {
        "DroPE retrieves at least twice as much as RoPE from 4× the training length on": (
            retrieves("drope", "rope", 2, "from 4x")
        ),
    },
    "DroPE, Table 1": {
        f"DroPE retrieves more than {name} at the longest length": (
            retrieves("drope*", rival if "+" in rival else f"{rival}*", 1)
        )
        for rival, name in RIVALS.items()
    },
    "DroPE, App. C.2": {
        "A softmax temperature helps DroPE at the longest length": (
            retrieves("drope+temperature", "drope", 1)
        ),
    },
}
"""The same for claims about a model whose encoding was dropped."""
