"""Prompts and limits are the benchmark's to the letter."""

from __future__ import annotations

from hashlib import sha256

import pytest

from trainer.evaluation.longbench import metrics
from trainer.evaluation.longbench.kinds import FOURTEEN, KINDS

# Beginning of the SHA-256 of the entry in dataset2prompt.json, and the one in dataset2maxlen.json.
PUBLISHED = {
    "narrativeqa": ("aada7ed24b06abac", 128),
    "qasper": ("0fbdd123fe7f83d6", 128),
    "multifieldqa_en": ("20b4666a2de8a1f7", 64),
    "hotpotqa": ("9ec4ae308865bd0c", 32),
    "2wikimqa": ("9ec4ae308865bd0c", 32),
    "musique": ("9ec4ae308865bd0c", 32),
    "gov_report": ("91c25d585b189ced", 512),
    "qmsum": ("dca23b678fe0183b", 512),
    "multi_news": ("2af3f28c40b902e6", 512),
    "trec": ("0eff8bebdba99d91", 64),
    "triviaqa": ("00a802e6377e72fc", 32),
    "samsum": ("a68d884234907eef", 128),
    "passage_count": ("986550b6c61009c6", 32),
    "passage_retrieval_en": ("39b96b7fa52bdd2a", 32),
    "lcc": ("6a1f24cf0bb83cd9", 64),
    "repobench-p": ("ee9ec182ea5ffeb7", 64),
}


def test_wording_and_limits_are_those_published():
    found = {
        name: (sha256(kind.template.encode()).hexdigest()[:16], kind.new_tokens)
        for name, kind in KINDS.items()
    }
    assert found == PUBLISHED


def test_measures_and_ends_are_those_of_the_benchmark():
    """``dataset2metric`` of its ``eval.py``, the tasks of which that takes the first line, and the
    one for which its ``pred.py`` ends an answer with a line."""
    names = [name for name, kind in KINDS.items() if kind.metric is metrics.qa_f1]
    assert names == (
        ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"]
    )
    others = {
        metrics.rouge_l: ["gov_report", "qmsum", "multi_news", "samsum"],
        metrics.classification: ["trec"],
        metrics.count: ["passage_count"],
        metrics.retrieval: ["passage_retrieval_en"],
        metrics.code_similarity: ["lcc", "repobench-p"],
    }
    for metric, expected in others.items():
        assert [name for name, kind in KINDS.items() if kind.metric is metric] == expected
    first_line = [name for name, kind in KINDS.items() if kind.first_line]
    assert first_line == ["trec", "triviaqa", "samsum"]
    assert [name for name, kind in KINDS.items() if kind.one_line] == ["samsum"]


def test_the_default_is_every_category_but_the_synthetic_one():
    """RoPE-ID, App. A.8: 3 + 3 + 3 + 3 + 2 tasks."""
    categories = [KINDS[name].category for name in FOURTEEN]
    sizes = {category: categories.count(category) for category in categories}
    assert list(sizes.values()) == [3, 3, 3, 3, 2]
    assert set(KINDS) - set(FOURTEEN) == {"passage_count", "passage_retrieval_en"}


@pytest.mark.parametrize("name", ["trec", "triviaqa", "samsum"])
def test_only_the_first_line_of_few_shot_answers_counts(name):
    assert KINDS[name].counted("\n\nDate\nQuestion: Who?\nType: Price") == "Date"
    assert KINDS["qasper"].counted("\none\ntwo") == "\none\ntwo"


@pytest.mark.parametrize(
    ("name", "text", "stops"),
    [
        ("trec", "Date", False),
        ("trec", "\n\nDate", False),
        ("trec", "\nDate\n", True),
        ("lcc", "# why\n", False),
        ("lcc", "# why\nreturn x", False),
        ("lcc", "# why\nreturn x\n", True),
        ("gov_report", "One.\n\nTwo.\n", False),
    ],
)
def test_an_answer_stops_where_more_would_not_be_scored(name, text, stops):
    kind = KINDS[name]
    assert kind.stop(text, ()) == stops
    if stops:
        classes = (["Date", "Price"],) if name == "trec" else ()
        ways = [kind.counted(text), kind.counted(text + "Price and return x")]
        assert len({kind.metric(way, "Date", *classes) for way in ways}) == 1
