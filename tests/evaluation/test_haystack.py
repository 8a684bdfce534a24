"""Excerpts have the tokens asked for, and places between sentences where there are any."""

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.common.errors import UserError
from trainer.data.needles import WORDS
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.needles import Haystack

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


@pytest.fixture(params=TOKENIZERS)
def haystack(request):
    tokenizer = TOKENIZERS[request.param]
    bos = "</s>" if request.param == "metaspace" else "<|endoftext|>"
    return Haystack(tokenizer, TEXTS, (tokenizer.token_to_id(bos),))


def folded(text):
    return " ".join(text.split())


def test_the_stream_is_the_documents_with_blank_lines_between_them(haystack):
    decoded = haystack.tokenizer.decode(haystack.tokens.tolist())
    assert folded(decoded) == folded("\n\n".join(TEXTS))
    if "Ġ" in haystack.tokenizer.get_vocab():
        assert decoded == "".join("\n\n" + text for text in TEXTS)


@pytest.mark.parametrize("length", [1, 50, 333])
def test_an_excerpt_begins_at_a_sentence_or_line(haystack, length):
    stream = haystack.tokens.tolist()
    for seed in range(20):
        begin = haystack.begin(length, np.random.default_rng(seed))
        assert 0 <= begin <= len(stream) - length
        before = haystack.tokenizer.decode(stream[:begin]).rstrip(" ")
        after = haystack.tokenizer.decode(stream[begin : begin + 9])
        assert before == "" or before[-1] in ".!?)\n" or after.startswith("\n")


def test_all_of_the_text_can_be_one_excerpt_and_no_more(haystack):
    size = len(haystack.tokens)
    assert haystack.begin(size, np.random.default_rng(0)) == 0
    with pytest.raises(UserError, match=rf"text: expected {size + 1} .* got {size}"):
        haystack.begin(size + 1, np.random.default_rng(0))


def test_sentences_go_on_where_others_end(haystack):
    begin = haystack.begin(300, np.random.default_rng(3))
    decode, text = haystack.tokenizer.decode, haystack.tokens[begin : begin + 300]
    put = haystack.encode(" Here it is.")
    for depth in np.linspace(0.05, 0.95, 40):
        place = haystack.place(begin, 300, depth)
        before, after = decode([*text[:place], *put, *text[place:]]).split(" Here it is.")
        assert before[-1] in '.!?")' or after[0] == "\n"
        assert after[0].isspace()
        assert folded(before + after) == folded(decode(text.tolist()))


def with_places(sentences, words):
    """A haystack whose sentences and words begin at these tokens."""
    haystack = Haystack(None, (), ())
    haystack.places = np.array(sentences, dtype=int), np.array(words, dtype=int)
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
