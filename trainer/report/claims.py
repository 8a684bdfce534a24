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
from typing import Any, Literal

import numpy as np
import pandas as pd

from trainer.config import PERPLEXITY, STATEMENTS
from trainer.evaluation.results import AS_IS
from trainer.evaluation.statistics import Estimate, change
from trainer.report.report import Observation, Report, RunSummary
from trainer.report.tables import rate

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


@dataclass(frozen=True)
class Evidence:
    """Evidence of claims.

    ``models``: names of models by role, such as ``rope`` or ``drope``. ``one_text``: whether all
    trained on the same text. Otherwise a model's loss says more about its text than its encoding.
    """

    report: Report
    models: Mapping[str, str]
    one_text: bool = True

    def rows(self, key: str, task: str = STATEMENTS) -> pd.DataFrame:
        """Return the rows of results.csv of one model and method, by length.

        ``key``: ``rope`` for the model of this role as it is, ``rope+yarn`` with a method;
        ``drope*`` with a temperature if that was measured, as the paper evaluates DroPE.
        """
        role, _, method = key.rstrip("*").partition("+")
        model = self.models.get(role, "")
        tempered = self.report.curve((model, "temperature"), task)
        if key.endswith("*") and len(tempered):
            return tempered
        return self.report.curve((model, method or AS_IS), task)

    def name(self, row: Any) -> str:
        """Return the name of a row in tables."""
        return self.report.row_name((row.model, row.method))

    def run(self, role: str) -> RunSummary | None:
        """Return the training run of a role."""
        return next((run for run in self.report.runs if run.name == self.models.get(role)), None)


Verdict = tuple[bool | None, str]
"""Whether a claim is shown (None: not judged), and the numbers."""
Place = Literal["trained", "longest", "from 4x"]
"""The training length, the longest length beyond it, or all from four times the training length."""


def observe(evidence: Evidence) -> tuple[Observation, ...]:
    """Return the verdicts of all claims that the evidence has numbers for."""
    untrained = _untrained(evidence)
    undropped = untrained or _undropped(evidence.report.drop)
    made = []
    for reason, claims in ((untrained, CLAIMS), (undropped, DROP_CLAIMS)):
        for source, of_source in claims.items():
            for text, test in of_source.items():
                if (verdict := test(evidence)) is not None:
                    shown, numbers = (None, f"{reason} {verdict[1]}") if reason else verdict
                    made.append(Observation(text, source, shown, numbers))
    return tuple(made)


def _untrained(evidence: Evidence) -> str:
    """Return why nothing can be judged if no model has learned its text; else empty."""
    unigram = evidence.report.unigram_loss
    trained = [at(evidence.rows(role, PERPLEXITY), "trained") for role in evidence.models]
    least = min((loss for rows in trained for loss in rows.value), default=0.0)
    if unigram is None or least <= LEARNED_TEXT * unigram:
        return ""
    return (
        f"No model has learned its text: the lowest loss is {least:.3f} nats/token, and the "
        f"frequencies of tokens alone give {unigram:.3f}."
    )


def _undropped(drop: Mapping[str, Any] | None) -> str:
    """Return why claims about the drop cannot be judged if it changed nothing; else empty."""
    if drop is None:
        return ""
    before, after = np.array([drop["loss_before"], drop["loss_after"]], float)
    is_small = after <= (1 + SAME) * before
    return f"The drop changed little: loss {before:.3f} to {after:.3f}." if is_small else ""


def at(rows: pd.DataFrame, place: Place) -> pd.DataFrame:
    """Return the rows at a place."""
    beyond = rows[rows.factor > 1]
    if place == "longest":
        return beyond[-1:]
    return beyond[beyond.factor >= 4] if place == "from 4x" else rows[rows.factor == 1]


def pairs(a: pd.DataFrame, b: pd.DataFrame, place: Place, b_place: Place) -> list[tuple[Any, Any]]:
    """Return the pairs of rows that a claim compares, among the lengths that both have."""
    lengths = {*a.length} & {*b.length}
    a, b = (rows[rows.length.isin(lengths)] for rows in (a, b))
    return list(zip(at(a, place).itertuples(), at(b, b_place).itertuples(), strict=False))


def certainly_exceeds(p: Any, q: Any, times: float) -> bool:
    """Whether the score of row ``p`` exceeds ``times`` that of row ``q`` with 95% confidence.

    True if the lower limit of p − k q is positive. It is p − k q − sqrt((p − low p)² + k² (high q −
    q)²), after Newcombe (Statistics in Medicine 17, 1998, method 10) for differences and Zou and
    Donner (ibid. 27, 2008) for linear combinations. The formula takes the two as independent, which
    is cautious if both were asked the same questions.
    """
    least = math.hypot(p.value - p.low, times * (q.high - q.value))
    return p.value - times * q.value - least > 0


def retrieves(
    evidence: Evidence,
    a: str,
    b: str,
    times: float,
    place: Place = "longest",
    b_place: Place | None = None,
    learned: Sequence[str] | None = None,
) -> Verdict | None:
    """Judge whether ``a`` retrieves more than ``times`` ``b``, which may be at another place.

    ``learned``: keys that must have learned the task (None: both).
    """

    def score(row: Any) -> str:
        return f"{evidence.name(row)} {rate(row)} at {row.length} tokens"

    both = pairs(evidence.rows(a), evidence.rows(b), place, b_place or place)
    if not both:
        return None
    for key in (a, b) if learned is None else learned:
        trained = [*at(evidence.rows(key), "trained").itertuples()]
        if not trained:
            return None, f"{evidence.name(both[0][0])} was not measured at its training length."
        if trained[0].value < LEARNED:
            return None, f"{score(trained[0])} has not learned the task (below {LEARNED:.0%})."
    shown = all(certainly_exceeds(p, q, times) for p, q in both)
    return shown, " ".join(f"{score(p)}, {score(q)}." for p, q in both)


def loss(
    evidence: Evidence,
    a: str,
    b: str,
    margin: float,
    place: Place = "trained",
    *,
    rises: bool = False,
) -> Verdict | None:
    """Judge whether the loss of ``a`` is at most ``margin`` above that of ``b`` at its training
    length. ``rises``: judge whether it is more than ``margin`` above.

    The whole interval must show it, over the windows of text on which both were measured.
    """
    both = pairs(evidence.rows(a, PERPLEXITY), evidence.rows(b, PERPLEXITY), place, "trained")
    if not both:
        return None
    ((p, q),) = both
    trials = evidence.report.trials[evidence.report.trials.task == PERPLEXITY]
    windows = trials.groupby(["model", "method", "length"]).value
    ours, theirs = (windows.get_group((row.model, row.method, row.length)) for row in (p, q))
    if not len(ours) == len(theirs) > 1:
        return None, "Measured on fewer than two common windows."
    difference = change(ours.tolist(), theirs.tolist())
    numbers = (
        f"Text loss: {evidence.name(q)} {q.value:.3f} at {q.length} tokens, {evidence.name(p)} "
        f"{p.value:.3f} at {p.length} tokens, {_signed(difference)}."
    )
    if a != b and not evidence.one_text:
        return None, f"The models trained on different text. {numbers}"
    return difference.low > margin if rises else difference.high <= margin, numbers


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
    columns = ["before", "after", "end"]
    losses = pd.DataFrame(drop["sequences"], dtype=float).reindex(columns=columns)
    if losses.empty or losses.isna().any(axis=None):
        return None, "A loss before, after or at the end is missing."
    numbers = "Loss {:.3f} before, {:.3f} after, {:.3f} at the end".format(*losses.mean())
    numbers = f"{numbers} (step {drop['step']})."
    if change(losses.after.tolist(), losses.before.tolist()).low <= SAME:
        return None, f"{numbers} The drop raises it by no more than {SAME:.0%}."
    won, lost = losses.after - losses.end, losses.after - losses.before
    share = change(won.tolist(), lost.tolist())
    limits = f" ({1 + share.low:.0%} to {1 + share.high:.0%})" if len(losses) > 1 else ""
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


def keeps_only_loss(evidence: Evidence) -> Verdict | None:
    """Judge whether YaRN keeps its text loss at the longest length and not its retrieval."""
    key = "rope+yarn"
    retrieval, kept = falls(key)(evidence), loss(evidence, key, key, RISEN, "longest")
    if retrieval is None or kept is None:
        return None
    numbers = f"{retrieval[1]} {kept[1]}"
    return (None if retrieval[0] is None else retrieval[0] and kept[0]), numbers


def falls(key: str) -> Callable[[Evidence], Verdict | None]:
    """Return a test whether ``key`` loses over half of its retrieval at the longest length."""
    return partial(retrieves, a=key, b=key, times=2, place="trained", b_place="longest")


RIVALS = {
    "rope+pi": "PI",
    "rope+ntk": "NTK-aware scaling",
    "rope+yarn": "YaRN",
    "alibi*": "ALiBi",
    "nope*": "NoPE from scratch",
    "rope_nope_window*": "RNoPE-SWA",
}
"""Names in claims of what DroPE is compared with, by key."""
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
        "RoPE loses more than half of its retrieval beyond its training length": falls("rope"),
    },
    "DroPE, Sec. 1": {
        f"RoPE's text loss rises beyond its training length too, by more than {RISEN:.0%}": (
            partial(loss, a="rope", b="rope", margin=RISEN, place="longest", rises=True)
        ),
    },
    "DroPE, Sec. 4 and Fig. 5": {
        f"YaRN keeps its text loss (within {RISEN:.0%}) at the longest length, and yet loses more "
        "than half of its retrieval": keeps_only_loss,
    },
    "RoPE-ID, Table 1": {
        "HalfRoPE loses more than half of its retrieval beyond its training length": (
            falls("half_rope")
        ),
        "YaRN retrieves at least twice as much as RoPE at the longest length": (
            partial(retrieves, a="rope+yarn", b="rope", times=2)
        ),
        "High-frequency RoPE retrieves less than RoPE already at the training length": partial(
            retrieves, a="rope", b="high_frequency", times=1, place="trained", learned=["rope"]
        ),
        f"RoPE-ID keeps at least {HELD:.0%} of its retrieval at the longest length": (
            partial(retrieves, a="rope_id*", b="rope_id*", times=HELD, b_place="trained")
        ),
        "RoPE-ID retrieves at least twice as much as RoPE at the longest length": (
            partial(retrieves, a="rope_id*", b="rope", times=2)
        ),
        "A softmax temperature helps RoPE-ID at the longest length": (
            partial(retrieves, a="rope_id+temperature", b="rope_id", times=1)
        ),
    },
}
"""Tests by the place in a paper and by the claim; they return None without the numbers."""
DROP_CLAIMS: Claims = {
    "DroPE, Obs. 3 and Sec. 5.1": {
        f"Recalibration wins back at least {KEPT:.0%} of the loss that the drop costs": (
            is_won_back
        ),
        f"DroPE keeps at least {KEPT:.0%} of RoPE's retrieval at the training length": (
            partial(retrieves, a="drope", b="rope", times=KEPT, place="trained", learned=["rope"])
        ),
    },
    "DroPE, Fig. 2 and Table 7": {
        f"DroPE's text loss at the training length matches RoPE's, within {SAME:.0%}": (
            partial(loss, a="drope", b="rope", margin=SAME)
        ),
        f"DroPE's text loss is no worse than that of NoPE from scratch, within {NEAR:.0%}": (
            partial(loss, a="drope", b="nope", margin=NEAR)
        ),
    },
    "DroPE, Obs. 3 and Table 3": {
        "DroPE retrieves at least twice as much as RoPE from 4× the training length on": (
            partial(retrieves, a="drope", b="rope", times=2, place="from 4x")
        ),
    },
    "DroPE, Table 1": {
        f"DroPE retrieves more than {name} at the longest length": (
            partial(retrieves, a="drope*", b=rival, times=1)
        )
        for rival, name in RIVALS.items()
    },
    "DroPE, App. C.2": {
        "A softmax temperature helps DroPE at the longest length": (
            partial(retrieves, a="drope+temperature", b="drope", times=1)
        ),
    },
}
"""The same for claims about a model whose encoding was dropped."""
