"""Averages over categories (RoPE-ID, Table 7) and lengths of texts (DroPE, Tables 9 and 10)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from trainer.report.results import Cell

EDGES = (4000, 8000, 16000, 32000)
BUCKETS = ("0–4K", "4–8K", "8–16K", "16–32K", "32K+")


def label(category: str, words: int) -> str:
    """``category|bucket`` of a question.

    The bucket is that of the benchmark's ``length`` field, in words, as LongBench-E has it; DroPE
    does not say what its buckets count. Counted in tokens a text would change its bucket with the
    tokenizer.
    """
    return f"{category}|{BUCKETS[bisect_right(EDGES, words)]}"


@dataclass(frozen=True)
class Averages:
    """Unweighted means over tasks, 0 to 1: of all, of those of a category, and of what each scores
    on its texts of a bucket, where it has any."""

    all: float
    categories: dict[str, float]
    buckets: dict[str, float]


def averages(cells: Iterable[Cell]) -> Averages:
    """Averages of the LongBench cells of one model and method at one length, a cell a task.

    Raises:
        ValueError: there is no cell, or one without scores.
    """
    categories: dict[str, list[float]] = defaultdict(list)
    buckets: dict[str, list[float]] = defaultdict(list)
    means = []
    for cell in cells:
        if not cell.scores:
            raise ValueError(f"{cell.task} at {cell.length} has no scores to average")
        scores: dict[str, list[float]] = defaultdict(list)
        for name, score in zip(cell.labels, cell.scores, strict=True):
            category, bucket = name.split("|")
            scores[bucket].append(score)
        means.append(fmean(cell.scores))
        categories[category].append(means[-1])
        for bucket, found in scores.items():
            buckets[bucket].append(fmean(found))
    if not means:
        raise ValueError("there are no cells to average")
    return Averages(
        fmean(means),
        {name: fmean(scores) for name, scores in categories.items()},
        {name: fmean(buckets[name]) for name in BUCKETS if name in buckets},
    )
