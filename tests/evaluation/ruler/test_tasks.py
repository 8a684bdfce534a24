"""All thirteen tasks keep to the length and depend on nothing else."""

import re

import pytest

from tests.evaluation.ruler.conftest import BOS, DOCUMENTS
from trainer.common.errors import UserError
from trainer.config import RulerSettings
from trainer.evaluation.ruler import (
    TASKS,
    CommonWords,
    Essay,
    FrequentWords,
    Needles,
    ruler_tasks,
    step,
)
from trainer.evaluation.scoring import string_match_all, string_match_part

NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.mark.parametrize("name", TASKS)
def test_a_trial_depends_on_seed_task_length_and_number_alone(task, name):
    prompts = task(name).prompts(2048)
    assert task(name).prompts(2048) == prompts
    assert len({prompt.tokens for prompt in prompts}) == 5
    others = task(name, seed=2).prompts(2048)
    assert all(a.tokens != b.tokens for a, b in zip(prompts, others, strict=True))
    assert task(name, trials=2).prompts(2048) == prompts[:2]


def test_nothing_goes_before_without_a_first_token(task):
    with_one, without = (task("niah_single_1", bos=bos).prompts(1024) for bos in (BOS, None))
    assert [p.tokens[0] for p in with_one] == [BOS] * 5
    assert BOS not in {p.tokens[0] for p in without}


def test_tasks_without_their_files_are_noted(tokenizer):
    tasks, notes = ruler_tasks(RulerSettings(trials=3), tokenizer, DOCUMENTS, BOS)
    assert [task.name for task in tasks] == [name for name in TASKS if not name.startswith("qa")]
    assert [note.split()[0] for note in notes] == ["qa_1", "qa_2"]


def test_a_file_with_fewer_questions_than_trials_is_noted(tokenizer, question_files):
    settings = RulerSettings(["qa_2"], trials=500, **question_files)
    (made,), notes = ruler_tasks(settings, tokenizer, DOCUMENTS, BOS)
    assert notes == []
    assert len(made.prompts(2048)) == 6


LENGTH = 2048


@pytest.fixture
def texts(task, tokenizer):
    """A function from a task's name to the texts of its trials and their prompts."""

    def read(name, length=LENGTH):
        prompts = task(name).prompts(length)
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


def test_all_trials_have_the_first_ones_haystack_or_are_smaller_by_steps(texts):
    """Lines of noise: as many as the first trial takes, not one more, and steps of five."""
    shown, prompts = texts("niah_single_1")
    lines = [text.split("afterwards.\n")[1].count("\n") - 1 for text in shown]
    assert all((lines[0] - count) % 5 == 0 and count <= lines[0] for count in lines)
    room = LENGTH - prompts[0].new_tokens - len(prompts[0].tokens)
    line_tokens = (len(prompts[0].tokens) - 50) / lines[0]
    assert 0 <= room < 1.5 * line_tokens


def places(text, words):
    """Where each of the words stands in a numbered list."""
    listed = re.findall(r"(\d+)\. (\S+)", text.split("Memorize the ones")[-1])
    return [[number for number, word in listed if word == wanted] for wanted in words]


@pytest.mark.parametrize("name", TASKS)
def test_prompts_keep_to_the_length_and_a_short_one_is_refused(task, tokenizer, name):
    made = task(name)
    for prompt in made.prompts(2048):
        assert prompt.new_tokens == NEW_TOKENS.get(name, 128)
        assert len(prompt.tokens) + prompt.new_tokens <= 2048
        text = tokenizer.decode(list(prompt.tokens[1:]))
        assert prompt.tokens == (BOS, *tokenizer.encode(text, add_special_tokens=False).ids)
    assert made.score is (string_match_part if name.startswith("qa") else string_match_all)
    with pytest.raises(UserError, match=r"evaluation\.lengths: expected more tokens"):
        made.prompts(100)
