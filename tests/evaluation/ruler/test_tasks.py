"""All thirteen tasks keep to the length and depend on nothing else."""

import re

import pytest

from tests.evaluation.ruler.conftest import BOS, DOCUMENTS
from trainer.common.errors import UserError
from trainer.evaluation.ruler.kinds import CommonWords, Essay, FrequentWords, Needles
from trainer.evaluation.ruler.tasks import TASKS, RulerSettings, ruler_tasks, step
from trainer.evaluation.scoring import string_match_all, string_match_part

LENGTHS = (2048, 6144)
NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


def longest_unit(name, text, tokenizer):
    """Tokens of the largest thing that a haystack can grow by."""
    if name.startswith("qa"):
        units = re.split(r"(?=Document \d+:)", text)
    elif name in ("vt", "niah_single_1", "niah_multikey_2", "niah_multikey_3"):
        units = text.split("\n")[1:-1]
    elif name == "cwe":
        units = [3 * max(re.findall(r" \d+\. [^\d\n]+", text), key=len)]
    elif name == "fwe":
        units = [" qwanqa" * 5]  # several ranks can get their next word at once
    else:
        units = [" word"]
    return max(len(tokenizer.encode(unit + "\n").ids) for unit in units)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answer_fill_the_length(task, tokenizer, name, length):
    made = task(name)
    prompts = made.prompts(length)
    assert len(prompts) == 5
    for prompt in prompts:
        assert prompt.new_tokens == NEW_TOKENS.get(name, 128)
        empty = length - len(prompt.tokens) - prompt.new_tokens
        text = tokenizer.decode(list(prompt.tokens[1:]))
        assert 0 <= empty <= max(longest_unit(name, text, tokenizer), length / 256)
        assert prompt.tokens == (BOS, *tokenizer.encode(text, add_special_tokens=False).ids)
    assert made.score is (string_match_part if name.startswith("qa") else string_match_all)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_a_trial_depends_on_seed_task_length_and_number_alone(task, name, published):
    prompts = task(name, published=published).prompts(2048)
    assert task(name, published=published).prompts(2048) == prompts
    assert len({prompt.tokens for prompt in prompts}) == 5
    others = task(name, seed=2, published=published).prompts(2048)
    assert all(a.tokens != b.tokens for a, b in zip(prompts, others, strict=True))
    if not published:
        assert task(name, trials=2).prompts(2048) == prompts[:2]


@pytest.mark.parametrize("name", TASKS)
def test_too_short_a_length_names_the_least_one(task, name):
    made = task(name)
    with pytest.raises(
        UserError, match=f"for RULER's {name} with this tokenizer, got 100"
    ) as error:
        made.prompts(100)
    least = int(re.search(r"at least (\d+) tokens", str(error.value))[1])
    assert all(len(p.tokens) + p.new_tokens <= least for p in made.prompts(least))


def test_nothing_goes_before_without_a_first_token(task):
    with_one, without = (task("niah_single_1", bos=bos).prompts(1024) for bos in (BOS, None))
    assert [p.tokens[0] for p in with_one] == [BOS] * 5
    assert BOS not in {p.tokens[0] for p in without}


def test_tasks_without_their_files_are_noted(tokenizer):
    tasks, notes = ruler_tasks(RulerSettings(trials=3), tokenizer, DOCUMENTS, BOS)
    assert [task.name for task in tasks] == [name for name in TASKS if not name.startswith("qa")]
    assert notes == [
        "qa_1 was not run: it needs evaluation.ruler.squad_file, SQuAD's dev-v2.0.json.",
        "qa_2 was not run: it needs evaluation.ruler.hotpotqa_file, "
        "HotpotQA's hotpot_dev_distractor_v1.json.",
    ]


def test_a_file_with_fewer_questions_than_trials_is_noted(tokenizer, question_files):
    settings = RulerSettings(["qa_2"], trials=500, **question_files)
    (made,), (note,) = ruler_tasks(settings, tokenizer, DOCUMENTS, BOS)
    assert note == "qa_2 has 6 questions only: evaluation.ruler.hotpotqa_file holds no more."
    assert len(made.prompts(2048)) == 6


def test_documents_without_a_word_are_refused(tokenizer):
    with pytest.raises(UserError, match="hold no text"):
        ruler_tasks(RulerSettings(), tokenizer, ["", " \n"], BOS)


def test_settings_that_are_impossible():
    settings = RulerSettings(["vt", "niah_singel_1"], squad_file="/no/file.json")
    task, file = [*map(str, settings.problems())]
    assert (
        task
        == "evaluation.ruler.tasks: unknown task 'niah_singel_1'. Did you mean 'niah_single_1'?"
    )
    assert file == "evaluation.ruler.squad_file: there is no file '/no/file.json'."
    assert not RulerSettings().problems()
    assert RulerSettings().trials == 500
    assert len(RulerSettings().tasks) == 13


LENGTH = 2048


@pytest.fixture
def texts(task, tokenizer):
    """A function from a task's name to the texts of its trials and their prompts."""

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


def test_all_trials_have_the_first_ones_haystack_or_are_smaller_by_steps(texts):
    """Lines of noise: as many as the first trial takes, not one more, and steps of five."""
    shown, prompts = texts("niah_single_1", published=True)
    lines = [text.split("afterwards.\n")[1].count("\n") - 1 for text in shown]
    assert all((lines[0] - count) % 5 == 0 and count <= lines[0] for count in lines)
    room = LENGTH - prompts[0].new_tokens - len(prompts[0].tokens)
    line_tokens = (len(prompts[0].tokens) - 50) / lines[0]
    assert 0 <= room < 1.5 * line_tokens


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
    result = set()
    for q, text in enumerate(shown):
        documents = re.findall(r"Document (\d+):\n(.*?)\n", text)
        (number,) = (n for n, title in documents if title == f"Lake {q}-3")
        result.add((len(documents), number))
    sizes = {count for count, _ in result}
    assert (len(result) == len(sizes)) == published
