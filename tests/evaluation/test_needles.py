"""Needle tasks say what they hide once, ask for it at the end, and are exactly as long as asked.

Excerpts of a haystack have the tokens asked for, and places between sentences where there are any.
"""

import re
import string
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.common.errors import UserError
from trainer.config import NeedleTaskSettings
from trainer.data.needles import WORDS
from trainer.data.tokenizer import END_OF_TEXT, train_tokenizer
from trainer.evaluation.held_out import HeldOut, Places
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.needles import (
    NEEDLE_TASKS,
    Haystack,
    draw_keys,
    draw_values,
    plain_words,
    word_list,
)

SENTENCES = [
    f"Chapter {i} has {i * 7919} words, and its hero says little. "
    f"Is it (as {i} says) long? It is \u201cvery\u201d long!\nNobody reads it"
    for i in range(60)
]
TEXTS = [" ".join(SENTENCES[i : i + 6]) for i in range(0, 60, 6)]


def metaspace(texts):
    """A tokenizer in the style of sentencepiece: words begin with a visible space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=list(string.printable),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


TOKENIZERS = {"bytes": train_tokenizer(TEXTS, 500, WORDS), "metaspace": metaspace(TEXTS)}

SETTINGS = NeedleTaskSettings(trials=6, depths=(0.0, 0.4, 1.0))
NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")
SEVERAL = ("multi_query", "multi_key", "multi_value")


@pytest.fixture(params=TOKENIZERS)
def haystack(request):
    tokenizer = TOKENIZERS[request.param]
    bos = "</s>" if request.param == "metaspace" else END_OF_TEXT
    first = tokenizer.token_to_id(bos)
    return Haystack(Encoder(tokenizer, (first,), first), TEXTS)


def folded(text):
    return " ".join(text.split())


def test_the_stream_is_the_documents_with_blank_lines_between_them(haystack):
    decoded = haystack.encoder.tokenizer.decode(haystack.tokens.tolist())
    assert folded(decoded) == folded("\n\n".join(TEXTS))
    if "Ġ" in haystack.encoder.tokenizer.get_vocab():
        assert decoded == "".join("\n\n" + text for text in TEXTS)


@pytest.mark.parametrize("length", [1, 50, 333])
def test_an_excerpt_begins_at_a_sentence_or_line(haystack, length):
    stream = haystack.tokens.tolist()
    for seed in range(20):
        begin = haystack.begin(length, np.random.default_rng(seed))
        assert 0 <= begin <= len(stream) - length
        before = haystack.encoder.tokenizer.decode(stream[:begin]).rstrip(" ")
        after = haystack.encoder.tokenizer.decode(stream[begin : begin + 9])
        assert before == "" or before[-1] in ".!?)\n" or after.startswith("\n")


def test_all_of_the_text_can_be_one_excerpt_and_no_more(haystack):
    size = len(haystack.tokens)
    assert haystack.begin(size, np.random.default_rng(0)) == 0
    with pytest.raises(UserError, match=rf"text: expected {size + 1} .* got {size}"):
        haystack.begin(size + 1, np.random.default_rng(0))


def test_sentences_go_on_where_others_end(haystack):
    begin = haystack.begin(300, np.random.default_rng(3))
    decode, text = haystack.encoder.tokenizer.decode, haystack.tokens[begin : begin + 300]
    put = haystack.encode(" Here it is.")
    for depth in np.linspace(0.05, 0.95, 40):
        place = haystack.place(begin, 300, depth)
        before, after = decode([*text[:place], *put, *text[place:]]).split(" Here it is.")
        assert before[-1] in '.!?")' or after[0] == "\n"
        assert after[0].isspace()
        assert folded(before + after) == folded(decode(text.tolist()))


@pytest.mark.parametrize("documents", [[], [" ", "\n"]])
def test_a_text_without_words_is_refused(documents):
    """An essay of RULER would never end."""
    text = HeldOut(SimpleNamespace(documents=lambda split, tokens: documents), None, (), None)
    with pytest.raises(UserError, match=r"text: expected a document"):
        _ = text.documents


def test_sentences_begin_at_lines_and_at_spaces_after_their_ends():
    """Tokens are characters: a blank line and these."""
    tokenizer = train_tokenizer([], 257, [])
    places = Haystack(Encoder(tokenizer, (), 0), ["a b. c\nd .e"]).places
    assert places.sentences.tolist() == [1, 6, 8]
    assert places.words.tolist() == [1, 3, 6, 8, 10]


def test_a_text_that_would_merge_with_the_one_before_it_is_encoded_alone():
    tokenizer = Tokenizer(models.WordLevel({"?": 0, ".": 1, "a": 2}, unk_token="?"))
    assert Haystack(Encoder(tokenizer, (), 0), ()).encode("a") == [2]


def with_places(sentences, words):
    """A haystack whose sentences and words begin at these tokens."""
    haystack = Haystack(None, ())
    haystack.places = Places(np.array(sentences, dtype=int), np.array(words, dtype=int))
    return haystack


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.floats(0, 1), st.integers(0, 20))
def test_a_place_is_near_its_depth_and_at_a_sentence_if_one_is_near(kinds, depth, begin):
    size = len(kinds)
    places = [i for i in range(1, size) if kinds[i]]
    around = [begin // 2, begin, *(begin + i for i in places), begin + size, begin + size + 1]
    haystack = with_places(around, range(begin + size + 9))
    place = haystack.place(begin, size, depth)
    assert abs(place - depth * size) <= 0.5 + 0.05 * size
    wanted = round(depth * size)
    if 0 < wanted < size and any(abs(p - wanted) <= 0.05 * size for p in places):
        assert place in places
        assert abs(place - wanted) == min(abs(p - wanted) for p in places)
    if depth in (0, 1):
        assert place == depth * size


def test_words_are_not_cut_where_no_sentence_is_near():
    haystack = with_places([105], [105, 119, 130])
    assert [haystack.place(100, 40, d) for d in (0.0, 0.5, 0.6, 1.0)] == [0, 19, 24, 40]


def text_of(haystack, prompt):
    return haystack.encoder.tokenizer.decode(list(prompt.tokens))


@pytest.mark.parametrize("length", [900, 1201])
@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_prompt_and_answer_have_exactly_the_length(haystack, name, length):
    task = NEEDLE_TASKS[name](haystack, SETTINGS)
    prompts = task.prompts(length)
    assert len(prompts) == (6 if name in SEVERAL else 18)
    for prompt in prompts:
        assert len(prompt.tokens) + prompt.new_tokens == length
        assert prompt.tokens[:1] == haystack.encoder.bos
        answer = haystack.encoder.tokenizer.encode(" " + ", ".join(prompt.answers)).ids
        assert len(answer) <= prompt.new_tokens


NUMBERS = [name for name in NEEDLE_TASKS if name != "sentence"]


@pytest.mark.parametrize("name", NUMBERS)
def test_needles_and_answers_are_in_the_text_once(haystack, name):
    needles = 4 if name in SEVERAL else 1
    for prompt in NEEDLE_TASKS[name](haystack, SETTINGS).prompts(900):
        text = text_of(haystack, prompt)
        needles_found = NEEDLE.findall(text)
        assert len(needles_found) == len(set(needles_found)) == needles
        assert len({value for _, value in needles_found}) == needles
        assert len({key for key, _ in needles_found}) == (1 if name == "multi_value" else needles)
        assert set(prompt.answers) <= {value for _, value in needles_found}
        for answer in prompt.answers:
            assert text.count(answer) == 1


@pytest.mark.parametrize("name", NUMBERS)
def test_the_question_names_the_keys_in_the_order_of_the_answers(haystack, name):
    for prompt in NEEDLE_TASKS[name](haystack, SETTINGS).prompts(900):
        text = text_of(haystack, prompt)
        keys = {value: key for key, value in NEEDLE.findall(text)}
        asked = list(dict.fromkeys(keys[answer] for answer in prompt.answers))
        named = asked[0] if len(asked) == 1 else "{}, {}, {}, and {}".format(*asked)
        number, verb = ("number", "is") if len(prompt.answers) == 1 else ("numbers", "are")
        assert text.endswith(
            f"The special magic {number} for {named} mentioned in the provided text {verb}:"
        )
        if name == "multi_value":
            assert {*prompt.answers} == {*keys}
            assert text.count(f"What are all the special magic numbers for {named} mentioned") == 1


def test_a_sentence_stands_in_a_book_and_is_asked_for_behind_it(haystack):
    """The needle, question and prompt of Kamradt (2023) and Fu et al. (2024)."""
    needle = (
        "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a "
        "sunny day."
    )
    task = NEEDLE_TASKS["sentence"](haystack, SETTINGS)
    prompts = task.prompts(900)
    for prompt in prompts:
        text = text_of(haystack, prompt)
        assert text.count(needle) == 1
        begin, _, after = text.partition("This is a very long story book: <book>")
        assert len(begin.strip()) <= len(END_OF_TEXT)
        book, _, question = after.partition(" </book>.")
        assert question == (
            "\nBased on the content of the book, Question: What is the best thing to do in San "
            "Francisco?\nAnswer:"
        )
        place = book.index(needle) / (len(book) - len(needle))
        assert place == pytest.approx(prompt.depth, abs=0.1)
    (answer,) = prompts[0].answers
    assert needle.endswith(f" {answer}")
    assert task.score(f" You should {answer}", (answer,)) == 1
    assert 0 < task.score(" Sit in a park on sunny days.", (answer,)) < 1


def test_needles_are_where_their_depth_says(haystack):
    for prompt in NEEDLE_TASKS["standard"](haystack, SETTINGS).prompts(1200):
        text = text_of(haystack, prompt)
        begin, end = NEEDLE.search(text).span()
        last = text.rindex("The special magic")
        if prompt.depth == 0:
            assert text[:begin].strip() == ""
        elif prompt.depth == 1:
            assert text[end:last].strip() == ""
        else:
            tokens = len(haystack.encoder.tokenizer.encode(text[:begin]).ids)
            assert tokens / 1200 == pytest.approx(prompt.depth, abs=0.1)
            assert text[end].isspace()
            assert text[:begin].rstrip()[-1] in '.!?")' or text[end] == "\n"


def test_several_needles_are_anywhere(haystack):
    settings = replace(SETTINGS, trials=60)
    for name in SEVERAL:
        depths = [p.depth for p in NEEDLE_TASKS[name](haystack, settings).prompts(900)]
        expected = 0.5 if name == "multi_key" else 1 / 5  # the first of four uniform ones
        assert np.mean(depths) == pytest.approx(expected, abs=0.1)


def test_trials_of_one_text_are_a_group_and_begin_alike(haystack):
    prompts = NEEDLE_TASKS["standard"](haystack, SETTINGS).prompts(900)
    for number in range(6):
        group = prompts[3 * number : 3 * number + 3]
        assert [(p.group, p.depth) for p in group] == [(number, d) for d in SETTINGS.depths]
        differs = np.array(group[1].tokens) != np.array(group[2].tokens)
        assert 0.3 < differs.argmax() / 900 < 0.5
        assert len({NEEDLE.search(text_of(haystack, p))[0] for p in group}) == 1


def test_the_noisy_task_is_the_standard_one_with_sinks_behind_the_needle(haystack):
    clean = NEEDLE_TASKS["standard"](haystack, SETTINGS).prompts(900)
    noisy = NEEDLE_TASKS["noisy"](haystack, SETTINGS).prompts(900)
    sink = haystack.encoder.first_token
    for a, b in zip(clean, noisy, strict=True):
        assert a.answers == b.answers
        assert b.tokens.count(sink) == 1 + 8
        place = b.tokens.index(sink, 1)
        assert b.tokens[place : place + 8] == (sink,) * 8
        assert haystack.encoder.tokenizer.decode(list(b.tokens[:place])).endswith(
            f"is: {b.answers[0]}."
        )


def test_the_first_number_counts_for_one_answer_and_the_share_for_several(haystack):
    """And the share of words for a sentence, of fifty tokens."""
    tasks = {name: make(haystack, SETTINGS) for name, make in NEEDLE_TASKS.items()}
    scores = {name: task.score(" 7, 1234567", ("1234567", "99")) for name, task in tasks.items()}
    several = {"multi_query": 0.5, "multi_value": 0.5, "sentence": 1.0}
    assert scores == dict.fromkeys(tasks, 0.0) | several
    stops = {name for name, task in tasks.items() if task.stop(" 7, 1", ("1234567",))}
    assert stops == {"standard", "noisy", "multi_key"}
    assert {prompt.new_tokens for prompt in tasks["sentence"].prompts(900)} == {50}


def test_sinks_are_the_first_token_where_none_begins_a_prompt():
    noisy = NEEDLE_TASKS["noisy"](Haystack(Encoder(TOKENIZERS["bytes"], (), 5), TEXTS), SETTINGS)
    assert {prompt.tokens.count(5) for prompt in noisy.prompts(900)} == {8}


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_trials_depend_on_seed_number_and_length_alone(haystack, name):
    task = NEEDLE_TASKS[name]
    prompts = task(haystack, SETTINGS).prompts(900)
    assert prompts == task(haystack, SETTINGS).prompts(900)
    fewer = task(haystack, replace(SETTINGS, trials=2)).prompts(900)
    assert fewer == prompts[: len(fewer)]
    other = task(haystack, replace(SETTINGS, seed=2)).prompts(900)
    assert not {p.tokens for p in other} & {p.tokens for p in prompts}
    if name != "sentence":
        assert not {p.answers for p in other} & {p.answers for p in prompts}
    longer = task(haystack, SETTINGS).prompts(1000)
    assert [p.answers for p in longer] == [p.answers for p in prompts]


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_a_length_without_room_for_text_is_refused(haystack, name):
    with pytest.raises(UserError, match=r"evaluation.lengths: expected at least .* got 10"):
        NEEDLE_TASKS[name](haystack, SETTINGS).prompts(10)


def test_numbers_of_five_digits_or_more_are_those_of_all_documents():
    documents = ["1234 12345, 7.", "a1234567b 99", "12345678"]
    assert Haystack(None, documents).numbers == "12345 1234567 12345678"


def test_questions_begin_with_the_tokens_before_prompts_and_documents_are_those_of_the_split():
    """``first_token`` stands for an empty context, whether or not it is put before texts."""
    read = []
    corpus = SimpleNamespace(
        tokenizer="t", first_token=5, documents=lambda *given: read.append(given) or ["A"]
    )
    text = HeldOut(corpus, "split", (7, 8), None)
    assert text.encoder == Encoder("t", (7, 8), 5)
    assert text.haystack.documents == ["A"]
    assert read == [("split", 1 << 22)]


def test_values_are_not_in_the_text_already():
    """Of all two-digit numbers one is left."""
    taken = " ".join(str(n) for n in range(10, 100) if n != 54)
    for seed in range(3):
        assert draw_values(1, 2, taken, np.random.default_rng(seed)) == ["54"]


@given(st.integers(1, 40), st.integers(0, 999))
def test_keys_and_values_are_different_ones(count, seed):
    random = np.random.default_rng(seed)
    keys, values = draw_keys(count, random), draw_values(count, 7, "", random)
    assert len(set(keys)) == len(set(values)) == count
    for key in keys:
        adjective, noun = re.fullmatch(r"([a-z]+)-([a-z]+)", key).groups()
        assert adjective in plain_words("adjective")
        assert noun in plain_words("noun")
        assert not {adjective, noun} & {*word_list("profanity")}
    assert all(re.fullmatch(r"[1-9]\d{6}", value) for value in values)
