"""Averages over tasks, of categories and of buckets, worked out by hand."""

from __future__ import annotations

import pytest

from trainer.evaluation.longbench.averages import Averages, averages, label
from trainer.evaluation.longbench.kinds import FOURTEEN, KINDS
from trainer.report.results import Cell


def cell(task, scores, labels):
    return Cell("M", "none", task, 4096, 1.0, tuple(scores), labels=tuple(labels))


@pytest.mark.parametrize(
    ("words", "bucket"),
    [
        (0, "0–4K"),
        (3999, "0–4K"),
        (4000, "4–8K"),
        (8000, "8–16K"),
        (16000, "16–32K"),
        (32000, "32K+"),
    ],
)
def test_buckets_begin_at_thousands_of_words(words, bucket):
    assert label("Code Completion", words) == f"Code Completion|{bucket}"


def test_every_task_counts_alike_however_many_questions_it_has():
    found = averages(
        [
            cell("a", [1, 0, 0, 1], ["QA|0–4K", "QA|0–4K", "QA|0–4K", "QA|4–8K"]),
            cell("b", [0.5], ["QA|4–8K"]),
            cell("c", [0.2, 0.4], ["Code|4–8K", "Code|8–16K"]),
        ]
    )
    assert found.all == pytest.approx((0.5 + 0.5 + 0.3) / 3)
    assert found.categories == pytest.approx({"QA": 0.5, "Code": 0.3})
    assert found.buckets == pytest.approx({"0–4K": 1 / 3, "4–8K": 1.7 / 3, "8–16K": 0.4})
    assert list(found.buckets) == ["0–4K", "4–8K", "8–16K"]


def test_the_mean_of_all_is_that_of_the_paper():
    """RoPE-ID, Table 7, RoPE at 1B and 4k: 14.61 is the mean over tasks, not over categories."""
    printed = {
        "Single-Document QA": 6.65,
        "Multi-Document QA": 4.32,
        "Summarization": 14.22,
        "Few-shot Learning": 27.27,
        "Code Completion": 23.55,
    }
    found = averages(
        cell(task, [printed[category] / 100], [f"{category}|0–4K"])
        for task in FOURTEEN
        for category in [KINDS[task].category]
    )
    assert {name: 100 * mean for name, mean in found.categories.items()} == pytest.approx(printed)
    assert 100 * found.all == pytest.approx(14.61, abs=0.005)


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="no cells"):
        averages([])
    with pytest.raises(ValueError, match="a at 4096"):
        averages([cell("a", [], [])])
    assert averages([cell("a", [1], ["QA|0–4K"])]) == Averages(1, {"QA": 1}, {"0–4K": 1})
