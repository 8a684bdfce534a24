"""The papers' claims (``claims.yaml``: claim, source, predicate), judged by the numbers of runs.

A claim is *shown* if the whole 95% interval of a difference is on its side, and *not shown* if the
whole interval is on the other side. Everything between is *not judged*, and so is a claim about a
model that has not learned its text or task, or about a drop that changed nothing.

Intervals cover the trials, and the training: two trainings of one configuration differ, by their
seeds or by rounding alone. Models that differ in their seeds alone are judged together. "DroPE" is
the paper "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings",
"RoPE-ID" is "Frayed RoPE and Long Inputs".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import yaml

from trainer.evaluation.results import AS_IS, PERPLEXITY, STATEMENTS
from trainer.evaluation.statistics import Estimate, change, wilson
from trainer.report.report import Observation, Report, RunSummary
from trainer.report.tables import rate, values_by_text

LEARNED = 0.5
"""Retrieval at the training length below which a model has not learned the task."""
LEARNED_TEXT = 0.9
"""Share of a unigram model's loss above which a model has not learned its text."""
KEPT = 0.95
"""Share of the loss that a drop costs (DroPE, Sec. 5.1: "over 95%")."""
SAME = 0.01
RISEN = 0.05
"""Relative margins of losses."""
TRAINING_LOSS = 0.01
"""95% half-width of a loss over trainings, relative to it."""
TRAINING_CORRELATION = 0.005
"""Correlation of two trials that one training answers: the variance of its rate p over trainings,
divided by p (1 - p). docs/results/README.md measures both over seeds and threads."""

Lengths = Literal["trained", "longest", "far"]
"""The training length, the longest length beyond it, and all from 4 times it on."""


class Verdict(NamedTuple):
    """Whether a claim is shown (None: not judged), and the numbers."""

    shown: bool | None
    numbers: str


@dataclass(frozen=True)
class Evidence:
    """A report with one model for each recipe (:meth:`Report.over_seeds`), the names of ``models``
    by role, such as ``rope`` or ``drope``, and whether all trained on ``one_text``."""

    report: Report
    models: Mapping[str, str]
    one_text: bool = True

    def rows(self, key: str, task: str = STATEMENTS) -> pd.DataFrame:
        """Return the rows of results.csv of a role and method, by length.

        ``key``: ``rope`` for the model of this role as it is, ``rope+yarn`` with a method;
        ``drope*`` with a temperature if that was measured, as the paper evaluates DroPE. The column
        ``trainings`` counts seeds.
        """
        role, _, method = key.rstrip("*").partition("+")
        name = self.models.get(role, "")
        rows = self.report.curve((name, method or AS_IS), task)
        if key.endswith("*"):
            tempered = self.report.curve((name, "temperature"), task)
            rows = rows if tempered.empty else tempered
        rows = rows.assign(trainings=max(1, [*self.report.seeds.values()].count(name)))
        if task != STATEMENTS:
            return rows
        # n trials of one training count as n / (1 + (n - 1) ρ) (Kish, Survey Sampling, 1965).
        independent = rows.n / (1 + (rows.n - 1) * TRAINING_CORRELATION)
        intervals = [*map(wilson, rows.value, rows.trainings * independent)]
        return rows.assign(low=[x.low for x in intervals], high=[x.high for x in intervals])

    def windows(self, row: Any) -> pd.Series:
        """Return the losses of a row, as :meth:`rows` returns it, by window of text."""
        losses = values_by_text(self.report, PERPLEXITY)[row.model, row.method]
        return losses.loc[row.length].dropna()

    def name(self, row: Any) -> str:
        """Return the name of a row in tables."""
        name = self.report.row_name((row.model, row.method))
        return name if row.trainings == 1 else f"{name} (mean of {row.trainings} seeds)"

    def run(self, role: str) -> RunSummary | None:
        """Return the training run of a role."""
        name = self.models.get(role)
        means = self.report.seeds
        return next((r for r in self.report.runs if means.get(r.name, r.name) == name), None)


def at(rows: pd.DataFrame, lengths: Lengths) -> pd.DataFrame:
    """Return the rows at some of the lengths."""
    if lengths == "trained":
        return rows[rows.factor == 1]
    if lengths == "far":
        return rows[rows.factor >= 4]
    return rows[rows.factor > 1][-1:]


def pairs(
    a: pd.DataFrame, b: pd.DataFrame, lengths: Lengths, b_lengths: Lengths
) -> list[tuple[Any, Any]]:
    """Return the pairs of rows that a claim compares, in the order of their lengths, among the
    lengths that both have; rows of one without a row of the other are left out."""
    a, b = a[a.length.isin(b.length)], b[b.length.isin(a.length)]
    return list(zip(at(a, lengths).itertuples(), at(b, b_lengths).itertuples(), strict=False))


def exceeds(difference: Estimate, threshold: float = 0.0) -> bool | None:
    """Return whether a difference is above the threshold; None if its interval holds both."""
    if difference.low > threshold:
        return True
    return False if difference.high <= threshold else None


def all_of(answers: Sequence[bool | None]) -> bool | None:
    """Return whether all of several are true; None if that is open (Kleene's logic)."""
    return min(answers, key=[False, None, True].index)


def any_of(answers: Sequence[bool | None]) -> bool | None:
    """Return whether one of several is true; None if that is open."""
    return max(answers, key=[False, None, True].index)


def score_difference(p: Any, q: Any, times: float) -> Estimate:
    """Return p − k q for the scores of two rows and k = ``times``, with its 95% interval.

    The limits combine the distances of p and k q from their own (Newcombe, Statistics in Medicine
    17, 1998, method 10; Zou and Donner, ibid. 27, 2008). The two are taken as independent, which is
    cautious if both were asked the same questions.
    """
    mean = p.value - times * q.value
    below = math.hypot(p.value - p.low, times * (q.high - q.value))
    above = math.hypot(p.high - p.value, times * (q.value - q.low))
    return Estimate(mean, mean - below, mean + above)


# Predicates: called with evidence, they return a verdict, or None without the numbers


@dataclass(frozen=True)
class Retrieves:
    """Whether ``a`` at its place retrieves more than ``times`` ``b``; ``learned``: keys that must
    have learned the task (None: both)."""

    a: str
    lengths: Lengths
    times: float
    b: str
    b_lengths: Lengths
    learned: tuple[str, ...] | None = None

    def __call__(self, evidence: Evidence) -> Verdict | None:
        """Judge the evidence."""
        rows = evidence.rows(self.a), evidence.rows(self.b)
        both = pairs(*rows, self.lengths, self.b_lengths)
        if not both:
            return None
        learned = (self.a, self.b) if self.learned is None else self.learned
        for key in learned:
            problem = _unlearned(evidence, key)
            if problem:
                return Verdict(None, problem)
        differences = [score_difference(p, q, self.times) for p, q in both]
        times = "" if self.times == 1 else f"{self.times:g} × "
        numbers = " ".join(
            f"{_score(evidence, p)} − {times}{_score(evidence, q)} = "
            f"{100 * difference.mean:.1f} ({100 * difference.low:.1f} to "
            f"{100 * difference.high:.1f}) points."
            for (p, q), difference in zip(both, differences, strict=True)
        )
        return Verdict(all_of([exceeds(difference) for difference in differences]), numbers)


def _score(evidence: Evidence, row: Any) -> str:
    return f"{evidence.name(row)} {rate(row)} at {row.length} tokens"


def _unlearned(evidence: Evidence, key: str) -> str:
    """Return why a model counts as one that has not learned the task; else empty."""
    trained = [*at(evidence.rows(key), "trained").itertuples()]
    if not trained:
        role = key.rstrip("*").partition("+")[0]
        return f"{evidence.models[role]} was not measured at its training length."
    if trained[0].low > LEARNED:
        return ""
    return f"{_score(evidence, trained[0])} may not have learned the task ({LEARNED:.0%})."


@dataclass(frozen=True)
class LossRises:
    """Whether the loss of ``a`` at its place is over ``margin`` above that of ``b`` at the training
    length, over the windows of text on which both were measured, and over their trainings, which
    are taken as independent."""

    a: str
    lengths: Lengths
    margin: float
    b: str

    def __call__(self, evidence: Evidence) -> Verdict | None:
        """Judge the evidence."""
        rows = evidence.rows(self.a, PERPLEXITY), evidence.rows(self.b, PERPLEXITY)
        both = pairs(*rows, self.lengths, "trained")
        if not both:
            return None
        p, q = both[0]
        ours, theirs = evidence.windows(p).align(evidence.windows(q), join="inner")
        if len(ours) < 2:
            return Verdict(None, "Measured on fewer than two common windows.")
        variance = 1 / p.trainings  # in units of one training's
        if q.model != p.model:  # one model has the same training at every length
            variance += 1 / q.trainings
        difference = widened(change([*ours], [*theirs]), TRAINING_LOSS * math.sqrt(variance))
        numbers = (
            f"Text loss: {evidence.name(q)} {q.value:.3f} at {q.length} tokens, "
            f"{evidence.name(p)} {p.value:.3f} at {p.length} tokens, {_signed(difference)}."
        )
        if self.a != self.b and not evidence.one_text:
            return Verdict(None, f"The models trained on different text. {numbers}")
        return Verdict(exceeds(difference, self.margin), numbers)


class LossStays(LossRises):
    """Whether that loss is at most ``margin`` above: the contrary of :class:`LossRises`."""

    def __call__(self, evidence: Evidence) -> Verdict | None:
        """Judge the evidence."""
        rises = super().__call__(evidence)
        if rises is None or rises.shown is None:
            return rises
        return Verdict(not rises.shown, rises.numbers)


def widened(estimate: Estimate, half_width: float) -> Estimate:
    """Return an estimate whose interval also covers an independent error."""
    mean, low, high = estimate
    below, above = math.hypot(mean - low, half_width), math.hypot(high - mean, half_width)
    return Estimate(mean, mean - below, mean + above)


def _signed(difference: Estimate) -> str:
    return f"{difference.mean:+.1%} ({difference.low:+.1%} to {difference.high:+.1%})"


def learns_slower(evidence: Evidence) -> Verdict | None:
    """Judge whether NoPE's mean training loss over the logged points is above RoPE's."""
    rope, nope = evidence.run("rope"), evidence.run("nope")
    if rope is None or nope is None:
        return None
    curves = pd.DataFrame({"rope": dict(rope.curve), "nope": dict(nope.curve)}, dtype=float)
    curves = curves[np.isfinite(curves).all(axis=1)]
    if curves.empty:
        return None
    difference = change(curves.nope.tolist(), curves.rope.tolist())
    difference = widened(difference, TRAINING_LOSS * math.sqrt(2))  # of two trainings
    numbers = (
        f"Mean training loss over {len(curves)} logged points: {nope.name} "
        f"{curves.nope.mean():.3f}, {rope.name} {curves.rope.mean():.3f} nats/token, "
        f"{_signed(difference)}."
    )
    return Verdict(exceeds(difference, SAME), numbers)


def is_won_back(evidence: Evidence) -> Verdict | None:
    """Judge which share of the rise at the drop is gone at the end, over the sequences on which the
    losses were measured."""
    drop = evidence.report.drop
    main_run = evidence.report.runs[:1]
    if drop is None or evidence.run("drope") not in main_run:
        return None  # the drop is the main run's, and not of the model that has the role
    columns = ["before", "after", "end"]
    losses = pd.DataFrame(drop["sequences"], dtype=float).reindex(columns=columns)
    if losses.empty or losses.isna().any(axis=None):
        return Verdict(None, "A loss before, after or at the end is missing.")
    numbers = "Loss {:.3f} before, {:.3f} after, {:.3f} at the end".format(*losses.mean())
    numbers = f"{numbers} (step {drop['step']})."
    if change(losses.after.tolist(), losses.before.tolist()).low <= SAME:
        return Verdict(None, f"{numbers} The drop raises it by no more than {SAME:.0%}.")
    won, lost = losses.after - losses.end, losses.after - losses.before
    loss_error = TRAINING_LOSS * losses.end.mean() / lost.mean()
    share = widened(change(won.tolist(), lost.tolist()), loss_error)
    limits = f"{1 + share.mean:.0%} ({1 + share.low:.0%} to {1 + share.high:.0%})"
    return Verdict(exceeds(share, KEPT - 1), f"{numbers} {limits} of the rise is won back.")


def ends_behind(evidence: Evidence) -> Verdict | None:
    """Judge whether NoPE is behind RoPE in retrieval or in text loss."""
    retrieval = Retrieves("rope", "trained", 1, "nope", "trained", learned=())(evidence)
    losses = LossRises("nope", "trained", SAME, "rope")(evidence)
    known = [verdict for verdict in (retrieval, losses) if verdict is not None]
    if not known:
        return None
    numbers = " ".join(verdict.numbers for verdict in known)
    return Verdict(any_of([verdict.shown for verdict in known]), numbers)


def keeps_only_loss(evidence: Evidence) -> Verdict | None:
    """Judge whether YaRN keeps its text loss at the longest length and not its retrieval."""
    retrieval = Retrieves("rope+yarn", "trained", 2, "rope+yarn", "longest")(evidence)
    losses = LossStays("rope+yarn", "longest", RISEN, "rope+yarn")(evidence)
    if retrieval is None or losses is None:
        return None
    shown = all_of([retrieval.shown, losses.shown])
    return Verdict(shown, f"{retrieval.numbers} {losses.numbers}")


class Claim(NamedTuple):
    """A claim about a model that ``kept`` its encoding or never had one, or whose encoding was
    ``dropped``; its place in a paper, and its predicate."""

    about: str
    text: str
    source: str
    test: Callable[[Evidence], Verdict | None]


TESTS: Mapping[str, Callable[..., Any]] = {
    "retrieves": Retrieves,
    "loss_rises": LossRises,
    "loss_stays": LossStays,
    "learns_slower": learns_slower,
    "is_won_back": is_won_back,
    "ends_behind": ends_behind,
    "keeps_only_loss": keeps_only_loss,
}
"""Predicates by the names in ``claims.yaml``; those with ``fields`` are classes."""


def read_claims() -> list[Claim]:
    """Return the claims of ``claims.yaml``."""
    table = yaml.safe_load(resources.files(__package__).joinpath("claims.yaml").read_text("utf-8"))
    claims = []
    for about, rows in table.items():
        for row in rows:
            test = TESTS[row["test"]]
            if "fields" in row:
                test = test(**row["fields"])
            claims.append(Claim(about, row["claim"], row["source"], test))
    return claims


CLAIMS = read_claims()


def observe(evidence: Evidence) -> tuple[Observation, ...]:
    """Return the verdicts of all claims that the evidence has numbers for."""
    untrained = _untrained(evidence)
    problems = {"kept": untrained, "dropped": untrained or _undropped(evidence.report.drop)}
    observations = []
    for claim in CLAIMS:
        verdict = claim.test(evidence)
        if verdict is not None:
            if problems[claim.about]:
                verdict = Verdict(None, problems[claim.about])
            observations.append(Observation(claim.text, claim.source, *verdict))
    return tuple(observations)


def _untrained(evidence: Evidence) -> str:
    """Return why nothing can be judged if no model has learned its text; else empty."""
    unigram = evidence.report.unigram_loss
    trained = [at(evidence.rows(role, PERPLEXITY), "trained") for role in evidence.models]
    losses = chain.from_iterable(rows.value for rows in trained)
    least = min(losses, default=0.0)
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
