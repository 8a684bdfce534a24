"""Sizes and orders as in the benchmark's programs, beside those that each trial has of its own."""

import re

import pytest

from tests.evaluation.ruler.conftest import BOS
from trainer.evaluation.ruler.essay import Essay
from trainer.evaluation.ruler.niah import Needles
from trainer.evaluation.ruler.published import step
from trainer.evaluation.ruler.tasks import TASKS
from trainer.evaluation.ruler.word_extraction import CommonWords, FrequentWords

LENGTH = 2048


@pytest.fixture
def texts(task, tokenizer):
    """A function from a task's name to the texts of its trials and what they may be answered in."""

    def read(name, published, length=LENGTH):
        prompts = task(name, published=published).prompts(length)
        assert all(len(p.tokens) + p.new_tokens <= length and p.tokens[0] == BOS for p in prompts)
        return [tokenizer.decode(list(prompt.tokens[1:])) for prompt in prompts], prompts

    return read


@pytest.mark.parametrize(
    ("kind", "short", "long"),
    [
        (Needles(Essay(["A text."])), 500, 500),
        (Needles(distractors=True), 5, 25),
        (CommonWords(), 10, 10),
        (FrequentWords(), (2048 - FrequentWords.new_tokens) // 32, 510),
    ],
)
def test_steps_are_those_of_the_programs(kind, short, long):
    assert step(kind, LENGTH) == short
    assert step(kind, 8 * LENGTH + FrequentWords.new_tokens - 64) == long


@pytest.mark.parametrize("name", TASKS)
def test_draws_stay_a_trials_own(task, name):
    prompts = task(name, published=True).prompts(LENGTH)
    assert len({prompt.tokens for prompt in prompts}) == 5
    assert task(name, published=True).prompts(LENGTH) == prompts


def test_all_trials_have_the_first_ones_haystack_or_are_smaller_by_steps(texts):
    """Lines of noise: as many as the first trial takes, not one more, and steps of five."""
    shown, prompts = texts("niah_single_1", published=True)
    lines = [text.split("afterwards.\n")[1].count("\n") - 1 for text in shown]
    assert all((lines[0] - count) % 5 == 0 and count <= lines[0] for count in lines)
    room = LENGTH - prompts[0].new_tokens - len(prompts[0].tokens)
    one = (len(prompts[0].tokens) - 50) / lines[0]
    assert 0 <= room < 1.5 * one


def places(text, words):
    """Where each of the words stands in a numbered list."""
    listed = re.findall(r"(\d+)\. (\S+)", text.split("Memorize the ones")[-1])
    return [[number for number, word in listed if word == wanted] for wanted in words]


@pytest.mark.parametrize("published", [True, False])
def test_common_words_stand_at_the_same_places_in_all_trials_of_a_size(texts, published):
    shown, prompts = texts("cwe", published)
    where = {
        (len(re.findall(r"\d+\. ", text)), str(places(text, prompt.answers)))
        for text, prompt in zip(shown, prompts, strict=True)
    }
    sizes = {count for count, _ in where}
    assert len(where) == (len(sizes) if published else len(prompts))


@pytest.mark.parametrize("published", [True, False])
def test_the_right_document_has_the_same_number_in_all_trials_of_a_size(texts, published):
    shown, _ = texts("qa_2", published, length=700)  # beyond it paragraphs come twice
    found = set()
    for q, text in enumerate(shown):
        documents = re.findall(r"Document (\d+):\n(.*?)\n", text)
        (number,) = (n for n, title in documents if title == f"Lake {q}-3")
        found.add((len(documents), number))
    sizes = {count for count, _ in found}
    assert (len(found) == len(sizes)) == published
