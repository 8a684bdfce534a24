"""LongBench: prompts and limits to the letter, metrics of its programs, files, cuts and labels."""

from __future__ import annotations

import json
import zipfile
from functools import partial
from hashlib import sha256
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.conftest import task_inputs
from trainer.common.errors import UserError
from trainer.config import LongBenchSettings
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.longbench import (
    KINDS,
    classification,
    code_similarity,
    count,
    label,
    longbench_task,
    longbench_tasks,
    longest_common_subsequence,
    qa_f1,
    retrieval,
    rouge_l,
)

CLASSES = ["Date", "Other number", "number", "Price"]
classified = partial(classification, classes=CLASSES)


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "value"),
    [
        (qa_f1, "The Paris, of France!", "Paris", 0.5),  # paris of france: P 1/3, R 1
        (qa_f1, "an apple a day", "The apple", 2 / 3),
        (qa_f1, "Alice Alice Boris", "alice alice", 0.8),  # repeated words count
        (qa_f1, "'tis", "tis", 1),
        (qa_f1, "theatre", "the atre", 0),  # articles are whole words
        (qa_f1, "", "Paris", 0),
        (qa_f1, "the", "a", 0),
        # The example of Lin (2004), Sec. 3.2: the union of "w1 w2" and "w1 w3 w5" has 4 words.
        (rouge_l, "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 8 / 13),
        (rouge_l, "sat cat the", "the cat sat", 1 / 3),
        (rouge_l, "The cat", "the cat", 0.5),  # upper case is another word
        (rouge_l, "a a a a", "a", 1),  # sets of words
        (rouge_l, "a. b.", "b a", 1),  # each sentence finds its own
        (rouge_l, "", "a", 0),
        (rouge_l, ".", "a", 0),
        (rouge_l, "a", "", 0),
        (classified, "Date", "Date", 1),
        (classified, "It is a Date or a Price", "Date", 0.5),
        (classified, "date", "Date", 0),
        (classified, "Price", "Date", 0),
        (classified, "Other number", "Other number", 1),  # "number" is part of it
        (classified, "Other number", "number", 0.5),
        (code_similarity, "return x\nmore", "return x", 1),
        (code_similarity, "\n\n# why\n```python\n// no\nreturn x", "return x", 1),
        (code_similarity, "# only words", "return x", 0),
        (code_similarity, "", "return x", 0),
        (code_similarity, "abcd", "bcde", 0.75),  # 2 * 3 / 8
        (code_similarity, "abc", "abd", 0.67),  # 2 * 2 / 6, in whole percents
        (count, "There are 7 of 12, so 7.", "7", 2 / 3),
        (count, "seven", "7", 0),
        (count, "17", "7", 0),
        (retrieval, "Paragraph 12", "Paragraph 12", 1),
        (retrieval, "Paragraph 1 or 12", "Paragraph 12", 0.5),
        (retrieval, "none", "Paragraph 12", 0),
    ],
)
def test_metrics_by_hand(metric, prediction, answer, value):
    assert metric(prediction, answer) == pytest.approx(value, abs=1e-7)


# Computed with rouge 1.0.1, Rouge().get_scores(prediction, answer)[0]["rouge-l"]["f"].
ROUGE_1_0_1 = [
    (
        "The report says costs rose. It names three causes. None was planned.",
        "Costs rose for three causes. The report names none that was planned.",
        0.6666666616666668,
    ),
    ("one two three. two one four five", "two one three. five four one", 0.5999999950000001),
    (
        "Alice met Boris on Monday. \n\nThey spoke. . Then left",
        "On Monday Boris and Alice spoke.  They left the house. ",
        0.47619047120181407,
    ),
    ("b a c a b d. d b", "a b d a c b. c d", 0.999999995),
    ("x y z", "p q r", 0.0),
]


@pytest.mark.parametrize(("prediction", "answer", "value"), ROUGE_1_0_1)
def test_rouge_l_is_that_of_the_library_the_benchmark_uses(prediction, answer, value):
    assert rouge_l(prediction, answer) == pytest.approx(value, abs=1e-12)


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_the_common_subsequence_is_common_and_longest(x, y):
    def subsequences(text):
        return {c for n in range(len(text) + 1) for c in combinations(text, n)}

    common = subsequences(x) & subsequences(y)
    longest = tuple(longest_common_subsequence(x, y))
    assert longest in common
    assert len(longest) == max(map(len, common))


# Beginning of the SHA-256 of the prompt in dataset2prompt.json, tokens in dataset2maxlen.json.
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
    assert {
        name: (sha256(kind["template"].encode()).hexdigest()[:16], kind["new_tokens"])
        for name, kind in KINDS.items()
    } == PUBLISHED


def test_metrics_and_line_ends_are_those_of_the_benchmark():
    """``dataset2metric`` and the first lines of its ``eval.py``, the line ends of ``pred.py``."""
    qa = "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa"
    metrics = {
        **dict.fromkeys(qa.split(), "qa_f1"),
        **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "rouge_l"),
        **{"trec": "classification", "passage_count": "count", "passage_retrieval_en": "retrieval"},
        **dict.fromkeys(("lcc", "repobench-p"), "code_similarity"),
    }
    assert {name: kind["metric"] for name, kind in KINDS.items()} == metrics
    first_line = {name for name, kind in KINDS.items() if "first_line" in kind}
    assert first_line == {"trec", "triviaqa", "samsum"}
    assert [name for name, kind in KINDS.items() if "one_line" in kind] == ["samsum"]


BYTES = train_tokenizer([], 257, [])
"""A tokenizer of bytes, so that tokens can be counted by hand."""
ROW = {
    "input": "Who?", "context": "Alice sat there.", "answers": ["Alice"], "length": 3,
    "dataset": "", "language": "en", "all_classes": ["Date", "Price"], "_id": "0f",
}  # fmt: skip


UNCLASSED = {key: value for key, value in ROW.items() if key != "all_classes"}


def task_of(name, bos=(), **changes):
    return longbench_task(name, [ROW | changes], Encoder(BYTES, bos, 5), 2048)


@pytest.mark.parametrize(
    ("name", "text", "answers", "score"),
    [
        ("trec", "\nDate\nQuestion: a Price?", ["Date"], 1),
        ("trec", "a Date, a Price", ["Date"], 0.5),
        ("triviaqa", "\n\nDate\nQuestion: Who?", ["Date"], 1),
        ("samsum", "a b\nc", ["x", "c", "b a b"], 1),
        ("qasper", "\none\ntwo", ["one two"], 1),
    ],
)
def test_the_best_answer_counts_and_only_the_first_line_of_few_shot_tasks(
    name, text, answers, score
):
    assert task_of(name).score(text, answers) == pytest.approx(score, abs=1e-7)


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
    task = task_of(name)
    assert task.stop(text, ()) == stops
    if stops:
        more = f"{text}Price and return x"
        assert task.score(text, ["Date"]) == task.score(more, ["Date"])


def test_a_short_text_is_asked_whole():
    task = task_of("hotpotqa", (5,), context="Passage 1: {x} é", answers=["Alice", "Bo"])
    (prompt,) = task.prompts(4096)
    instruction = (
        "Answer the question based on the given passages. "
        "Only give me the answer and do not output any other words."
    )
    assert prompt.tokens[0] == 5
    assert BYTES.decode(prompt.tokens[1:]) == (
        f"{instruction}\n\nThe following are given passages.\nPassage 1: {{x}} é\n\n"
        f"{instruction}\n\nQuestion: Who?\nAnswer:"
    )
    assert (prompt.answers, prompt.new_tokens) == (("Alice", "Bo"), 32)
    assert task.name == "longbench_hotpotqa"


@pytest.mark.parametrize("bos", [(), (5,)])
@pytest.mark.parametrize("length", [300, 301])
def test_a_long_text_loses_its_middle(bos, length):
    task = task_of("lcc", bos, context="abc" * 500)
    (prompt,) = task.prompts(length)
    whole = BYTES.encode(
        f"Please complete the code given below. \n{'abc' * 500}Next line of code:\n"
    ).ids
    whole = [*bos, *whole]
    half = (length - 64) // 2
    assert list(prompt.tokens) == whole[:half] + whole[-half:]
    assert length - 1 <= len(prompt.tokens) + prompt.new_tokens <= length
    assert task.prompts(length) == [prompt]


def test_a_length_without_room_for_a_question_is_refused():
    task = task_of("gov_report")
    with pytest.raises(UserError, match=r"evaluation.lengths: expected at least 514 .*, got 513"):
        task.prompts(513)
    (prompt,) = task.prompts(514)
    assert BYTES.decode(prompt.tokens) == "Y:"


def test_only_samsum_may_not_begin_with_a_line_break():
    """As in the benchmark's pred.py; then answers cannot begin with their end either."""
    names = "samsum", "trec", "triviaqa", "qasper"
    first, *others = (task_of(name).never_first for name in names)
    assert BYTES.decode(first, skip_special_tokens=False) == "\n"
    assert others == [(), (), ()]


def test_questions_are_labelled_by_their_length_in_contexts():
    names = [label(n).split("×")[0] for n in (0.1, 1.99, 2, 7.9, 8, 16, 99)]
    assert names == ["0–2", "0–2", "2–4", "4–8", "8–16", "16", "16"]


def test_tasks_are_read_from_their_files(tmp_path):
    line = json.dumps(UNCLASSED | {"context": "é\u2028"}, ensure_ascii=False) + "\n"
    (tmp_path / "qasper.jsonl").write_text(line, encoding="utf-8")
    encoder = Encoder(BYTES, (), 5)
    settings = LongBenchSettings(str(tmp_path), ["qasper"])
    (task,) = longbench_tasks(task_inputs(settings, encoder, training_length=2048))
    assert task.name == "longbench_qasper"
    (prompt,) = task.prompts(4096)
    assert "é\u2028" in BYTES.decode(prompt.tokens)
    with pytest.raises(FileNotFoundError, match="narrativeqa"):
        longbench_tasks(task_inputs(LongBenchSettings(str(tmp_path)), encoder))


def test_fourteen_tasks_are_read_by_default_from_the_archive_of_the_hub(tmp_path, monkeypatch):
    """All but the two of passages."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in KINDS:
            archive.writestr(f"data/{name}.jsonl", json.dumps(ROW))

    def download(repository, file, *, repo_type):
        assert (repository, repo_type) == ("THUDM/LongBench", "dataset")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    made = longbench_tasks(task_inputs(LongBenchSettings(), Encoder(BYTES, (), 5)))
    wanted = [f"longbench_{name}" for name in PUBLISHED if not name.startswith("passage")]
    assert [task.name for task in made] == wanted


def test_a_text_that_is_cut_is_labelled_by_its_whole_length(tmp_path):
    (tmp_path / "lcc.jsonl").write_text(json.dumps(ROW | {"context": "abc" * 500}))
    settings = LongBenchSettings(str(tmp_path), ["lcc"])
    inputs = task_inputs(settings, Encoder(BYTES, (), 5), training_length=200)
    (task,) = longbench_tasks(inputs)
    assert [prompt.label for prompt in task.prompts(300)] == ["4–8× ctx"]


@pytest.mark.parametrize("name", ["qasper", "trec"])
def test_a_file_without_questions_is_an_error(tmp_path, name):
    (tmp_path / f"{name}.jsonl").write_text("\n")
    settings = LongBenchSettings(str(tmp_path), [name])
    with pytest.raises(UserError, match=rf"^evaluation\.longbench: .* {name}\.jsonl, got none$"):
        longbench_tasks(task_inputs(settings, Encoder(BYTES, (), 5)))


@pytest.mark.parametrize(
    ("name", "line"),
    [("qasper", "{"), ("qasper", '{"input": ""}'), ("trec", json.dumps(UNCLASSED))],
)
def test_a_damaged_line_is_told_with_its_file_and_number(tmp_path, name, line):
    (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(ROW)}\n\n{line}")
    settings = LongBenchSettings(str(tmp_path), [name])
    with pytest.raises(UserError, match=rf"{name}\.jsonl: line 3: expected a question"):
        longbench_tasks(task_inputs(settings, Encoder(BYTES, (), 5)))


def test_a_task_depends_on_all_that_its_score_reads():
    """The classes of a file are in no prompt."""
    first, same, other = (
        task_of("trec", all_classes=classes).at(4096).fingerprint
        for classes in (["Date", "Price"], ["Date", "Price"], ["Date", "Price", "City"])
    )
    assert first == same != other
