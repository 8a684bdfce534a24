"""Prompts of files: the wording, the cut in the middle, what is scored, what is left out."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.data.tokenizer import END_OF_TEXT
from trainer.evaluation.longbench.tasks import (
    KEY,
    LongBenchRow,
    LongBenchSettings,
    label,
    longbench_tasks,
    middle_out,
    read_rows,
    root,
)
from trainer.interchange import hub


def test_a_row_is_read_as_it_is_distributed(write_rows):
    # U+2028 is a line end to str.splitlines, and stands unescaped in such files.
    file = write_rows("qasper", {"context": "one\u2028two {braces}"}, {"answers": ["a", "b"]})
    first, second = read_rows(file, LongBenchRow, KEY)
    assert first == LongBenchRow("Who?", "one\u2028two {braces}", ["Alice"], 3)
    assert second.answers == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "Invalid JSON"),
        ("[]", "object"),
        ('{"context": "c", "answers": ["a"], "length": 1}', "input: Field required"),
        ('{"input": "i", "context": 5, "answers": ["a"], "length": 1}', "context: .*string"),
        ('{"input": "i", "context": "c", "answers": [], "length": 1}', "answers: .*at least 1"),
        ('{"input": "i", "context": "c", "answers": [1], "length": 1}', "answers.0: .*string"),
    ],
)
def test_the_first_malformed_line_is_named(write_rows, line, fault):
    file = write_rows("qasper", {}, {})
    file.write_text(file.read_text() + f"\n{line}\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"{KEY}: '{re.escape(str(file))}' line 4: .*{fault}"):
        read_rows(file, LongBenchRow, KEY)


def test_empty_and_binary_files_are_refused(tmp_path):
    file = tmp_path / "qasper.jsonl"
    for content, fault in [(b"\n", "is empty"), (b"\xff\xfe", "not UTF-8"), (None, "cannot be")]:
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UserError, match=fault):
            read_rows(file, LongBenchRow, KEY)


def test_the_hubs_archive_is_read_without_unpacking(write_rows, tmp_path, monkeypatch):
    file = write_rows("qasper", {"input": "Wo saß Ärne?"})
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.write(file, "data/qasper.jsonl")
    asked = []

    def download(*where, **kind):
        asked.append((where, kind))
        return str(archive)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    rows = read_rows(root(None) / "qasper.jsonl", LongBenchRow, KEY)
    assert [row.input for row in rows] == ["Wo saß Ärne?"]
    # What is on this machine is not asked for.
    where = ("THUDM/LongBench", "data.zip")
    assert asked == [(where, {"repo_type": "dataset", "local_files_only": True})]
    assert not (root(None) / "lcc.jsonl").is_file()


def test_without_a_network_the_hub_is_not_asked(monkeypatch):
    """Its client would try again for half a minute."""
    asked = []

    def nothing_here(*_, **options):
        asked.append(options)
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", nothing_here)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    with pytest.raises(UserError, match=r"could not be loaded .*\(no network: .*refused\)"):
        root(None)
    assert [options.get("local_files_only") for options in asked] == [True]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        root(None)


def test_without_hub_or_directory_one_sentence_says_what_to_give(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise OSError("no network\nand much more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(UserError) as caught:
        root(None)
    assert len(caught.value.problems) == 1
    assert "no network" in str(caught.value)
    assert "more" not in str(caught.value)
    (tmp_path / "no.zip").write_bytes(b"no archive")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: tmp_path / "no.zip")
    with pytest.raises(UserError, match="not a zip file"):
        root(None)
    assert root("here") == Path("here")


LABEL = "Multi-Document QA|4–8K words|0–4K tokens|0–2× ctx"


def settings(file, **more):
    return LongBenchSettings(str(file.parent), **more)


def test_a_short_text_is_asked_whole(write_rows, byte_tokenizer):
    file = write_rows("hotpotqa", {"context": "Passage 1: {x} é", "length": 4000})
    (task,), notes = longbench_tasks(settings(file, tasks=["hotpotqa"]), byte_tokenizer, 5, 2048)
    (prompt,) = task.prompts(4096)
    instruction = (
        "Answer the question based on the given passages. "
        "Only give me the answer and do not output any other words."
    )
    assert prompt.tokens[0] == 5
    assert byte_tokenizer.decode(prompt.tokens[1:]) == (
        f"{instruction}\n\nThe following are given passages.\nPassage 1: {{x}} é\n\n"
        f"{instruction}\n\nQuestion: Who?\nAnswer:"
    )
    assert (prompt.answers, prompt.new_tokens) == (("Alice",), 32)
    assert (task.name, prompt.label) == ("longbench_hotpotqa", LABEL)
    assert notes == []


@pytest.mark.parametrize("bos", [None, 5])
@pytest.mark.parametrize("length", [300, 301])
def test_a_long_text_loses_its_middle(write_rows, byte_tokenizer, bos, length):
    file = write_rows("lcc", {"context": "abc" * 500})
    (task,), _ = longbench_tasks(settings(file, tasks=["lcc"]), byte_tokenizer, bos, 2048)
    (prompt,) = task.prompts(length)
    whole = byte_tokenizer.encode(
        f"Please complete the code given below. \n{'abc' * 500}Next line of code:\n"
    ).ids
    whole = whole if bos is None else [bos, *whole]
    half = (length - 64) // 2
    assert list(prompt.tokens) == whole[:half] + whole[-half:]
    assert length - 1 <= len(prompt.tokens) + prompt.new_tokens <= length
    assert task.prompts(length) == [prompt]


@given(st.integers(0, 30), st.integers(2, 40))
def test_the_cut_keeps_both_ends_and_fits(size, room):
    ids = np.arange(size, dtype=np.int32)
    kept = middle_out(ids, room).tolist()
    if size <= room:
        assert kept == list(range(size))
    else:
        half = len(kept) // 2
        assert room - 1 <= 2 * half == len(kept) <= room
        assert kept[:half] == list(range(half))
        assert kept[half:] == list(range(size - half, size))


def test_a_length_without_room_for_a_question_is_refused(write_rows, byte_tokenizer):
    file = write_rows("gov_report", {})
    (task,), _ = longbench_tasks(settings(file, tasks=["gov_report"]), byte_tokenizer, None, 2048)
    with pytest.raises(UserError, match=r"evaluation.lengths: .* 514 or more, got 513"):
        task.prompts(513)
    (prompt,) = task.prompts(514)
    assert byte_tokenizer.decode(prompt.tokens) == "Y:"


def test_the_best_of_several_answers_counts(write_rows, byte_tokenizer):
    classes = ["Date", "Price"]
    rows = {"answers": ["Date"], "all_classes": classes}
    file = write_rows("trec", rows)
    write_rows("samsum", {})
    trec, samsum = longbench_tasks(
        settings(file, tasks=["trec", "samsum"]), byte_tokenizer, None, 2048
    )[0]
    assert trec.score("\nDate\nQuestion: a Price?", ("Date",)) == 1
    assert trec.score("a Date, a Price", ("Date",)) == 0.5
    assert trec.stop("Date\n", ("Date",))
    assert samsum.score("a b\nc", ("x", "c", "b a b")) == pytest.approx(1, abs=1e-7)


def test_only_samsum_may_not_begin_with_a_line_break_or_the_end(write_rows, byte_tokenizer):
    """As in the benchmark's pred.py, which has at least one token before either."""
    file = write_rows("samsum", {})
    for name in ("trec", "triviaqa", "qasper"):
        write_rows(name, {"all_classes": ["a"]})
    names = ["samsum", "trec", "triviaqa", "qasper"]
    tasks, _ = longbench_tasks(settings(file, tasks=names), byte_tokenizer, None, 2048)
    first, *others = (task.prompts(2048)[0].never_first for task in tasks)
    assert [byte_tokenizer.decode([token], skip_special_tokens=False) for token in first] == [
        *("\n", END_OF_TEXT),
    ]
    assert others == [(), (), ()]


def test_a_classification_without_classes_is_refused(write_rows, byte_tokenizer):
    file = write_rows("trec", {})
    with pytest.raises(UserError, match=r"trec\.jsonl' line 1: all_classes"):
        longbench_tasks(settings(file, tasks=["trec"]), byte_tokenizer, None, 2048)


def test_tasks_without_a_file_are_named_in_notes(write_rows, byte_tokenizer, tmp_path):
    file = write_rows("qasper", {})
    tasks, notes = longbench_tasks(settings(file), byte_tokenizer, None, 2048)
    assert [task.name for task in tasks] == ["longbench_qasper"]
    assert len(notes) == 13
    assert notes[0] == (
        f"LongBench's narrativeqa was not run: there is no file '{tmp_path / 'narrativeqa.jsonl'}'."
    )
    file.unlink()
    with pytest.raises(UserError, match=r"holds none of the tasks' files, such as .*\.jsonl"):
        longbench_tasks(settings(file), byte_tokenizer, None, 2048)


def test_a_limit_draws_the_same_questions_every_time(write_rows, byte_tokenizer):
    file = write_rows("qasper", *({"answers": [f"{i:03}"]} for i in range(100)))

    def asked(**more):
        (task,), _ = longbench_tasks(
            settings(file, tasks=["qasper"], **more), byte_tokenizer, None, 2048
        )
        return [prompt.answers[0] for prompt in task.prompts(2048)]

    ten = asked(limit=10)
    assert len(ten) == 10
    assert ten == sorted(ten) == asked(limit=10) != asked(limit=10, seed=1)
    assert asked(limit=200) == asked() == [f"{i:03}" for i in range(100)]


def test_all_problems_of_settings_are_told_at_once(tmp_path):
    wrong = LongBenchSettings(str(tmp_path / "none"), ["quasper", "lcc"])
    problems = [*map(str, wrong.problems())]
    assert len(problems) == 2
    assert "evaluation.longbench.tasks: unknown task 'quasper'. Did you mean 'qasper'?" in problems
    assert "there is no directory" in problems[1]
    assert LongBenchSettings(tasks=[]).problems()
    assert not LongBenchSettings(str(tmp_path)).problems()


@pytest.mark.parametrize(
    ("words", "bucket"),
    [
        (0, "0–4K words"),
        (3999, "0–4K words"),
        (4000, "4–8K words"),
        (8000, "8–16K words"),
        (16000, "16–32K words"),
        (32000, "32K+ words"),
    ],
)
def test_buckets_of_words_begin_at_thousands(words, bucket):
    assert label("Code Completion", words, 0, 2048).split("|")[:2] == ["Code Completion", bucket]


@pytest.mark.parametrize(
    ("tokens", "bucket", "contexts"),
    [
        (4095, "0–4K tokens", "0–2× ctx"),
        (4096, "4–8K tokens", "2–4× ctx"),
        (8192, "8–16K tokens", "4–8× ctx"),
        (16384, "16–32K tokens", "8–16× ctx"),
        (32768, "32K+ tokens", "16×+ ctx"),
    ],
)
def test_buckets_of_tokens_are_drope_s_in_both_of_its_units(tokens, bucket, contexts):
    """The heads of Tables 9 and 10, of SmolLM with its 2,048 tokens."""
    assert label("QA", 0, tokens, 2048).split("|")[2:] == [bucket, contexts]


def test_contexts_are_those_of_the_model():
    assert label("QA", 0, 5000, 1024).endswith("4–8K tokens|4–8× ctx")
