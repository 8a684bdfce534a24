"""A page's answer: one model against the model that it came from and the best other."""

from dataclasses import dataclass

import pandas as pd

from trainer.evaluation.results import AS_IS, PERPLEXITY, STATEMENTS
from trainer.evaluation.statistics import mean_estimate
from trainer.report.claims import LEARNED
from trainer.report.report import Report, RowKey
from trainer.report.tables import factor_label, percent, perplexity, values_by_text


@dataclass(frozen=True)
class Answer:
    """Rows that the first screen compares in ``task``.

    ``subject``: the model that dropped its encoding, or else the first one, with its best method.
    ``origin``: the model that it came from, as it is. ``rival``: the best row of
    other models.
    """

    task: str
    subject: RowKey
    origin: RowKey | None
    rival: RowKey | None

    @property
    def rows(self) -> list[RowKey]:
        """Its rows, the subject first."""
        return [row for row in (self.subject, self.origin, self.rival) if row is not None]


def answer_of(report: Report) -> Answer | None:
    """Return what the first screen compares: scores, or else losses; None without either."""
    tasks = [*report.scored, PERPLEXITY]
    rows = report.rows.dropna(subset="value")
    task = next((task for task in tasks if (rows.task == task).any()), None)
    if task is None:
        return None
    rows = rows[rows.task == task]
    lengths = rows.groupby(["model", "method"]).length.transform("nunique")
    rows = rows[lengths == lengths.max()]
    far = rows[rows.length == rows.length.max()]
    model = next((name for name in far.model if name in report.origins), far.model.iloc[0])
    subject = _best(far[far.model == model], task)
    came_from = report.origins.get(model, ""), AS_IS
    is_origin = (far.model == came_from[0]) & (far.method == AS_IS)
    others = far[(far.model != model) & ~is_origin]
    rival = None if others.empty else _best(others, task)
    origin = None if report.curve(came_from, task).empty else came_from
    return Answer(task, subject, origin, rival)


def _best(rows: pd.DataFrame, task: str) -> RowKey:
    """Return the model and method of the highest score, or of the lowest loss."""
    best = rows.value.idxmin() if task == PERPLEXITY else rows.value.idxmax()
    row = rows.loc[best]
    return row.model, row.method


def sentence(report: Report) -> str:
    """Return the answer in words, with the values at each length; empty without numbers."""
    answer = answer_of(report)
    if answer is None:
        return ""
    guessed = 0.0
    if answer.task == STATEMENTS:
        guessed = max(report.chances.values())
    lows = report.rows.low[report.rows.task == answer.task]
    if answer.task != PERPLEXITY and lows.max() <= guessed:
        floor = f"{percent(guessed)}%, the score of guesses"
        return f"No model has learned the task for certain: no 95% interval is above {floor}."
    curve = report.curve(answer.subject, answer.task)
    last = curve.iloc[-1]
    lengths = [*curve.length]
    if len(lengths) > 5:  # a sentence stays short
        lengths = [*lengths[:1], *lengths[-3:]]
    name = report.row_name
    parts = [f"{name(answer.subject)} {_values(report, answer, answer.subject, lengths)}"]
    standings = []
    for row, what in ((answer.origin, "which it came from"), (answer.rival, "the best other")):
        if row is not None:
            standings.append(f"{_standing(report, answer, row)} {name(row)}, {what}")
            parts.append(f"{name(row)} {_values(report, answer, row, lengths)}")
    title = report.tasks[answer.task]
    numbers = f"{title} at {_listed(lengths)} tokens: {'; '.join(parts)}."
    trained = report.rows[report.rows.length == report.training_length]
    if answer.task == STATEMENTS and trained.low[trained.task == STATEMENTS].max() <= LEARNED:
        where = f"above 50% at the training length, {report.training_length:,} tokens"
        return f"No model has learned the task for certain: no 95% interval is {where}. {numbers}"
    if not standings:
        return numbers
    where = f"At {last.length:,} tokens, {factor_label(last.factor)} the training length"
    return f"{where}, {name(answer.subject)} is {', and '.join(standings)}. {numbers}"


def _standing(report: Report, answer: Answer, row: RowKey) -> str:
    """Return whether the subject is ahead of a row at the longest length, beyond the 95% interval
    of the differences over texts."""
    values = values_by_text(report, answer.task)
    values = values.loc[values.index.get_level_values("length").max()]
    differences = (values[answer.subject] - values[row]).dropna()
    if len(differences) < 2:
        return "not comparable with"
    if answer.task == PERPLEXITY:
        differences = -differences
    difference = mean_estimate(differences)
    if difference.low > 0:
        return "ahead of"
    return "behind" if difference.high < 0 else "level with"


def _values(report: Report, answer: Answer, row: RowKey, lengths: list[int]) -> str:
    curve = report.curve(row, answer.task).set_index("length").value.reindex(lengths)
    if answer.task == PERPLEXITY:
        words = curve.map(perplexity).map("{:.1f}".format)
        return _listed([*words.mask(curve.isna(), "not finite")])
    return f"{_listed([f'{100 * score:.0f}' for score in curve])}%"


def _listed(values: list[int] | list[str]) -> str:
    """Return ``64, 128 and 256``."""
    *words, last = map(str, values)
    return f"{', '.join(words)} and {last}" if words else last
