"""RULER's tasks fill the length and depend on nothing else; parts that no golden prompt shows."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pydoc_data.topics import topics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.config import RulerSettings
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.ruler import (
    LEAST_FREQUENT,
    NOISE,
    TASKS,
    common_words,
    essay,
    frequent_words,
    ruler_tasks,
    vocabulary,
)
from trainer.evaluation.scoring import string_match_all, string_match_part

BOS = 0
DOCUMENTS = [" ".join(text.split()) for _, text in sorted(topics.items())][:60]
NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*DOCUMENTS, *[NOISE] * 50], 2000, ())


@pytest.fixture(scope="module")
def question_files(tmp_path_factory):
    """Twenty questions in the form of SQuAD, and six of HotpotQA with ten paragraphs each."""
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Town {a}.{p} has {a + 1}{p}0 people. " + "It is old. " * 9,
                    "qas": [
                        {"question": "Nothing?", "answers": [], "is_impossible": True},
                        {
                            "question": f"How many people has town {a}.{p}?",
                            "answers": [{"text": f"{a + 1}{p}0"}],
                        },
                    ],
                }
                for p in range(4)
            ]
        }
        for a in range(5)
    ]
    lakes = [
        {
            "question": f"Who owns lake {q}?",
            "answer": f"owner {q}",
            "context": [[f"Lake {q}-{p}", [f"Its owner is owner {q}."]] for p in range(10)],
        }
        for q in range(6)
    ]
    directory = tmp_path_factory.mktemp("questions")
    paths = {"squad_file": directory / "squad.json", "hotpotqa_file": directory / "hotpot.json"}
    paths["squad_file"].write_text(json.dumps({"data": articles}))
    paths["hotpotqa_file"].write_text(json.dumps(lakes))
    return {key: str(path) for key, path in paths.items()}


@pytest.fixture(scope="module")
def task(tokenizer, question_files):
    """A function that makes one task by its name."""

    def make(name, trials=4, bos=BOS):
        settings = RulerSettings([name], trials, **question_files)
        ((made,), _) = ruler_tasks(settings, tokenizer, DOCUMENTS, bos)
        return made

    return make


@pytest.mark.parametrize("name", TASKS)
def test_prompts_fill_the_length_and_a_short_one_is_refused(task, tokenizer, name):
    made = task(name, trials=8)
    for prompt in made.prompts(2048):
        assert prompt.new_tokens == NEW_TOKENS.get(name, 128)
        assert 0.95 * 2048 < len(prompt.tokens) + prompt.new_tokens <= 2048
        text = tokenizer.decode(list(prompt.tokens[1:]))
        assert prompt.tokens == (BOS, *tokenizer.encode(text, add_special_tokens=False).ids)
    assert made.score is (string_match_part if name.startswith("qa") else string_match_all)
    with pytest.raises(UserError, match=r"evaluation\.lengths: expected at least"):
        made.prompts(100)


@pytest.mark.parametrize("name", TASKS)
def test_a_trial_depends_on_task_length_and_number_alone(task, name):
    prompts = task(name).prompts(2048)
    assert task(name).prompts(2048) == prompts
    assert len({prompt.tokens for prompt in prompts}) == 4
    assert task(name, trials=2).prompts(2048) == prompts[:2]
    without = task(name, bos=None).prompts(2048)
    assert BOS not in {prompt.tokens[0] for prompt in without}


def test_tasks_without_their_files_are_noted(tokenizer):
    tasks, notes = ruler_tasks(RulerSettings(trials=3), tokenizer, DOCUMENTS, BOS)
    assert [task.name for task in tasks] == [name for name in TASKS if not name.startswith("qa")]
    assert [note.split()[0] for note in notes] == ["qa_1", "qa_2"]


def test_words_are_counted_across_documents_and_begin_again():
    documents = ["One two. Three four? Five", "Six (seven.) Eight nine!", ""]
    sentences = ["One two.", "Three four?", "Five", "Six (seven.)", "Eight nine!"]
    assert essay(documents, 9) == sentences
    assert essay(documents, 10) == [*sentences, "One"]
    assert essay(documents, 7) == sentences[:4]
    assert essay(documents, 8) == [*sentences[:4], "Eight"]


def test_the_example_is_about_500_tokens(task, tokenizer):
    for prompt in task("vt").prompts(6144):
        example = tokenizer.decode(list(prompt.tokens[1:])).split("\n\nMemorize")[0]
        assert 450 < len(tokenizer.encode(example).ids) < 530


def test_lists_longer_than_the_vocabulary_are_of_compounds():
    text, answers = common_words(Random(0), 0, len(vocabulary()) + 1, 200_000)
    words = Counter(re.findall(r"\d+\. (\D+?)(?= \d+\. |$)", text.split("\n")[4]))
    assert len(words) == len(vocabulary()) + 1
    assert sorted(word for word, n in words.items() if n == 30) == sorted(answers)


@given(st.integers(LEAST_FREQUENT, 20_000), st.integers(100, 10_000))
@pytest.mark.slow
def test_the_three_answers_are_never_tied_with_the_fourth_word(units, length):
    text, answers = frequent_words(Random(units), 0, units, length)
    counts = Counter(text.split("coded words. ", 1)[1].split("\nQuestion")[0].split())
    assert {word for word, _ in counts.most_common(4)} == {"...", *answers}
    assert sorted(counts.values())[-4] > sorted([0, *counts.values()])[-5]
    total = 6 / math.pi**2 * units * sum(1 / k**2 for k in range(1, 6))
    assert sum(counts.values()) > total - 5


def test_a_length_beyond_all_paragraphs_repeats_them(task, tokenizer):
    for prompt in task("qa_2").prompts(6144):
        text = tokenizer.decode(list(prompt.tokens[1:]))
        counts = Counter(re.findall(r"Document \d+:\n(.*)", text))
        assert len(counts) == 60
        assert max(counts.values()) - min(counts.values()) == 1
