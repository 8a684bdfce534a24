"""All thirteen tasks keep to the length and depend on nothing else."""

import pytest

from tests.evaluation.ruler.conftest import BOS, DOCUMENTS
from trainer.common.errors import UserError
from trainer.config import RulerSettings
from trainer.evaluation.ruler import TASKS, ruler_tasks
from trainer.evaluation.scoring import string_match_all, string_match_part

NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.mark.parametrize("name", TASKS)
def test_a_trial_depends_on_task_length_and_number_alone(task, name):
    prompts = task(name).prompts(2048)
    assert task(name).prompts(2048) == prompts
    assert len({prompt.tokens for prompt in prompts}) == 5
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


@pytest.mark.parametrize("name", TASKS)
def test_prompts_fill_the_length(task, name):
    """Up to two units: a paragraph of qa_1 has 38 tokens, one of qa_2 up to 30."""
    for prompt in task(name, trials=20).prompts(2048):
        assert 0.95 * 2048 < len(prompt.tokens) + prompt.new_tokens <= 2048


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
