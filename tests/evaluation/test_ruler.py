"""RULER's prompts and scores are those of NVIDIA's own programs, fill the length, and depend on
nothing else.

A prompt of tests/golden/ruler_prompts.json comes with what its program drew. Our task gets the same
draws, in the order in which it asks for them, and has to write the same text, byte for byte.
"""

import json
import math
import re
from collections import Counter
from functools import partial
from pydoc_data.topics import topics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tests.evaluation.conftest import task_inputs
from tests.golden.files import GOLDEN
from trainer.common.errors import UserError
from trainer.config import EvaluationConfig, LongBenchSettings, RulerSettings
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.ruler import (
    DEPTHS,
    LEAST_FREQUENT,
    READERS,
    SEARCHES,
    TASKS,
    WORDING,
    common_words,
    document_questions,
    essay,
    frequent_words,
    lines_of_example,
    ruler_tasks,
    variable_tracking,
    vocabulary,
)
from trainer.evaluation.scoring import string_match_all, string_match_part
from trainer.evaluation.tasks import check_names

SEED = 42
FILE = json.loads((GOLDEN / "ruler_prompts.json").read_text())
PROMPTS = {
    f"{prompt['task']}-{prompt['length']}-{prompt['trial']}": prompt for prompt in FILE["prompts"]
}
LENGTHS = (1024, 2048)
SCORES = json.loads((GOLDEN / "ruler_scores.json").read_text())


class Drawn(Random):
    """Returns what another program drew; its shuffles are the program's, seeded anew each time."""

    def give(self, **draws):
        self.draws = {name: list(values) for name, values in draws.items()}
        return self

    def choice(self, seq):
        value = self.draws["choice"].pop(0)
        assert value in seq
        return value

    def choices(self, population, *, k):
        value = self.draws["choices"].pop(0)
        assert len(value) == k
        assert set(value) <= set(population)
        return list(value)

    def randint(self, a, b):
        value = self.draws["randint"].pop(0)
        assert a <= value <= b
        return value

    def randrange(self, start, stop):
        return self.randint(start, stop - 1)

    def getrandbits(self, k):
        assert k == 128
        return self.draws["getrandbits"].pop(0)

    def sample(self, population, k):
        values = self.draws["sample"].pop(0)(population)
        assert len(values) == k
        assert set(values) <= set(population)
        return values

    def shuffle(self, x):
        Random(SEED).shuffle(x)

    def used_up(self):
        return not any(self.draws.values())


def drawn(prompt, name):
    return [value for method, value in prompt["draws"] if method == name]


def picking(places):
    return lambda population: [population[place] for place in places]


def same(values):
    return lambda _: values


def niah_draws(prompt):
    """Keys and values by turns; then where needles stand, and which keys are asked for."""
    adjectives_and_nouns = [part for key in drawn(prompt, "choice") for part in halves(key)]
    bits = drawn(prompt, "getrandbits")
    if not adjectives_and_nouns:
        bits = bits[::2] + bits[1::2]
    places, asked = drawn(prompt, "sample")
    depths = [depth / 100 for depth in places]
    return {
        "choice": adjectives_and_nouns,
        "randint": drawn(prompt, "randint"),
        "getrandbits": bits,
        "sample": [
            lambda population: depths if population is DEPTHS else picking(places)(population),
            picking(asked),
        ],
    }


def halves(key):
    """An adjective and a noun, which may have hyphens of their own."""
    return next(
        (key[:place], key[place + 1 :])
        for place, letter in enumerate(key)
        if letter == "-" and {key[:place], key[place + 1 :]} <= set(vocabulary())
    )


def vt_draws(prompt):
    """The chain that is asked for, then the names and the number of the example."""
    names, numbers = drawn(prompt, "choices"), drawn(prompt, "randint")
    lines = example_of(prompt)
    starts = [number for number, line in enumerate(lines) if line.startswith("VAR")]
    return {
        "choices": names[5:] + names[:5],
        "randint": [numbers[1], numbers[0]],
        "sample": [
            same([place - before for before, place in enumerate(starts)]),
            *map(picking, drawn(prompt, "sample")),
        ],
    }


def example_of(prompt):
    return prompt["text"].split("\n\n")[1].split("\nQuestion")[0].split("\n")


def cwe_draws(prompt):
    return {"sample": map(same, drawn(prompt, "sample"))}


def fwe_draws(prompt):
    """Words in the order of their ranks."""
    words = sorted(set(drawn(prompt, "choices")))
    Random(SEED).shuffle(words)
    return {"choices": words}


def qa_draws(prompt, item):
    """All others of the question's article, then paragraphs of all articles.

    Ours draws enough to leave out those that are there already, so they are drawn too.
    """
    (places,) = drawn(prompt, "sample")
    taken = [*item.paragraphs, *item.related]
    return {"sample": [list, lambda population: picking(places)(population) + taken]}


DRAWS = {"vt": vt_draws, "cwe": cwe_draws, "fwe": fwe_draws}


def draws_of(prompt):
    if prompt["task"].startswith("qa"):
        return qa_draws(prompt, ITEMS[prompt["task"]][prompt["trial"]])
    return DRAWS.get(prompt["task"], niah_draws)(prompt)


def tidy(prompt):
    """Its text; but the program joins an empty piece with spaces where a needle has no sentence
    before it, which ours leaves out."""
    text = prompt["text"]
    if prompt["task"].startswith("niah"):
        text = text.replace("  ", " ").replace("\n ", "\n").replace(" \n", "\n")
    return text


ITEMS = {}
"""Questions of the tasks that read a file."""


@pytest.fixture(scope="module")
def question_files(tmp_path_factory):
    """The settings that name the files of questions that the programs read."""
    directory, files = tmp_path_factory.mktemp("files"), {}
    for task, (key, read) in READERS.items():
        path = directory / f"{key}.json"
        path.write_text(json.dumps(FILE[key.removesuffix("_file")]))
        files[key], ITEMS[task] = str(path), read(str(path))
    return files


@pytest.fixture(scope="module")
def tasks(question_files):
    """The thirteen with the texts that the programs read, by their names."""
    settings = RulerSettings(trials=2, **question_files)
    made = ruler_tasks(task_inputs(settings, Encoder(words_and_marks(), (), 0), [FILE["essay"]]))
    return {task.name: task for task in made}


def words_and_marks():
    """The tokenizer that the programs counted with."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    pieces = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pieces])
    return tokenizer


def question_of(prompt):
    """The function that asks it."""
    task = prompt["task"]
    if task in SEARCHES:
        return partial(SEARCHES[task].ask, documents=[FILE["essay"]])
    if task in READERS:
        return document_questions(ITEMS[task])
    if task == "vt":
        return partial(variable_tracking, example_lines=len(example_of(prompt)) - 5)
    return {"cwe": common_words, "fwe": frequent_words}[task]


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.usefixtures("tasks")
def test_text_answers_and_room_are_those_of_the_program(name):
    prompt = PROMPTS[name]
    rng = Drawn().give(**draws_of(prompt))
    text, answers = question_of(prompt)(rng, *(prompt[x] for x in ("trial", "units", "length")))
    new_tokens, _ = TASKS[prompt["task"]]
    assert text == tidy(prompt)
    assert text.endswith(prompt["prefix"])
    assert rng.used_up()
    assert list(answers) == prompt["outputs"]
    assert new_tokens == prompt["new_tokens"]
    tokens = words_and_marks().encode(text).tokens
    assert len(tokens) + new_tokens == prompt["tokens"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_at_least_as_long_as_those_of_the_program(tasks, name, length):
    """Of the larger of two prompts: how many tokens the drawn words have makes 1 percent of it."""
    theirs = [
        prompt["tokens"]
        for prompt in FILE["prompts"]
        if (prompt["task"], prompt["length"]) == (name, length)
    ]
    ours = [len(prompt.tokens) + prompt.new_tokens for prompt in tasks[name].prompts(length)]
    assert 0.99 * max(theirs) < max(ours) <= length


STRIPPED = [
    ["x\x0by", ["x\ny"]],
    ["x\x1fy", ["x\x1fy"]],
    ["answer  ", ["answer "]],
    [" answer", [" answer"]],
]
"""Where it matters that the program strips a prediction and makes newlines of its control
characters: where answers have either, as none of the benchmark's does."""


@pytest.mark.parametrize("name", TASKS)
def test_scores_are_those_of_the_program(tasks, name):
    """In percent, rounded as the program rounds them."""
    pairs, expected = SCORES["pairs"], SCORES["scores"][SCORES["tasks"][name]]
    assert len(pairs) == len(expected) == 400
    result = [round(100 * tasks[name].score(text, answers), 2) for text, answers in pairs]
    different = [
        pair for pair, ours, theirs in zip(pairs, result, expected, strict=True) if ours != theirs
    ]
    assert different == STRIPPED
    assert len(set(expected)) > 1


BOS = 0
DOCUMENTS = [" ".join(text.split()) for _, text in sorted(topics.items())][:60]
NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*DOCUMENTS, *[WORDING["noise"]] * 50], 2000, ())


@pytest.fixture(scope="module")
def task(tokenizer, question_files):
    """A function that makes one task by its name."""

    def make(name, trials=4, bos=(BOS,)):
        settings = RulerSettings([name], trials, **question_files)
        (made,) = ruler_tasks(task_inputs(settings, Encoder(tokenizer, bos, BOS), DOCUMENTS))
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
        made.at(100)


@pytest.mark.parametrize("name", ["cwe", "fwe"])
def test_every_list_of_words_has_as_many_as_fit(task, name):
    """A word of cwe stands there three times, with a number, in about 1 percent of the room."""
    for prompt in task(name, trials=20).prompts(6144):
        assert 0.99 * 6144 < len(prompt.tokens) + prompt.new_tokens <= 6144


@pytest.mark.parametrize("name", TASKS)
def test_a_trial_depends_on_task_length_and_number_alone(task, name):
    prompts = task(name).prompts(2048)
    assert task(name).prompts(2048) == prompts
    assert len({prompt.tokens for prompt in prompts}) == 4
    assert task(name, trials=2).prompts(2048) == prompts[:2]
    without = task(name, bos=()).prompts(2048)
    assert BOS not in {prompt.tokens[0] for prompt in without}


@pytest.mark.parametrize(
    ("key", "settings"),
    [("ruler", RulerSettings(["vt", "niah"])), ("longbench", LongBenchSettings(tasks=["niah"]))],
)
def test_an_unknown_task_is_refused_before_anything_runs(key, settings):
    with pytest.raises(UserError, match=rf"evaluation\.{key}\.tasks: .*got \['niah'\]"):
        check_names(EvaluationConfig(**{key: settings}))


def test_settings_of_a_task_that_has_none_of_its_own_are_refused():
    with pytest.raises(UserError, match=r"evaluation\.settings: .*got \['standard'\]"):
        check_names(EvaluationConfig(settings={"standard": {"trials": 4}}))


def test_tasks_without_their_files_are_noted(tokenizer):
    inputs = task_inputs(RulerSettings(trials=3), Encoder(tokenizer, (BOS,), BOS), DOCUMENTS)
    tasks, notes = ruler_tasks(inputs), inputs.notes
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


def test_an_example_has_as_many_lines_as_fit_500_tokens(tokenizer):
    lines = lines_of_example(tokenizer)
    sizes = []
    for count in (lines, lines + 1):
        text, _ = variable_tracking(Random(0), 0, 5, 0, example_lines=count)
        example = text.partition("they are: ")[0] + "they are: "
        sizes.append(len(tokenizer.encode(example).ids))
    assert sizes[0] <= 500 < sizes[1]


def test_a_prompt_may_fill_the_length_to_its_last_token(tasks):
    task = tasks["niah_single_1"]
    (size, *_) = [len(p.tokens) + p.new_tokens for p in task.prompts(1024)]
    assert size in [len(p.tokens) + p.new_tokens for p in task.prompts(size)]


@pytest.mark.parametrize(("length", "often"), [(4096, 30), (4095, 6)])
def test_words_of_long_lists_stand_there_more_often(length, often):
    text, answers = common_words(Random(0), 0, 40, length)
    words = text.split("\n")[4].split()
    assert {words.count(answer) for answer in answers} == {often}


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
    for prompt in task("qa_2").prompts(16384):
        text = tokenizer.decode(list(prompt.tokens[1:]))
        counts = Counter(re.findall(r"Document \d+:\n(.*)", text))
        assert len(counts) == 200
        assert max(counts.values()) - min(counts.values()) == 1


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("squad_file", {"data": [{"paragraphs": [{"context": "C", "qas": []}]}]}),
        ("squad_file", {"data": [{"paragraphs": [{"context": "C"}]}]}),
        ("hotpotqa_file", []),
        ("hotpotqa_file", [{"question": "Q"}]),
    ],
)
def test_a_file_without_questions_or_with_damaged_ones_is_named(tmp_path, key, content):
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(content))
    settings = RulerSettings(tasks=["qa_1", "qa_2"], **{key: str(file)})
    with pytest.raises(UserError, match=rf"{key}.*questions\.json|questions\.json.*{key}"):
        ruler_tasks(task_inputs(settings, Encoder(words_and_marks(), (), 0), [FILE["essay"]]))


def test_each_question_of_a_file_is_asked_once_however_many_are_wanted(tmp_path, tokenizer):
    file = tmp_path / "questions.json"
    rows = [
        {"question": f"Which is {n}?", "answer": f"{n}", "context": [["A", [f"It is {n}."]]]}
        for n in range(2)
    ]
    file.write_text(json.dumps(rows))
    settings = RulerSettings(["qa_2"], 5, hotpotqa_file=str(file))
    (made,) = ruler_tasks(task_inputs(settings, Encoder(tokenizer, (), 0), DOCUMENTS))
    assert [prompt.answers for prompt in made.prompts(512)] == [("0",), ("1",)]
