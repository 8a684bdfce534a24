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
from trainer.evaluation.needles import Excerpt, Haystack

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
def test_an_excerpt_is_a_piece_of_the_stream_from_a_sentence_or_line_on(haystack, length):
    stream = haystack.tokens.tolist()
    for seed in range(20):
        excerpt = haystack.excerpt(length, np.random.default_rng(seed))
        begins = [
            i for i in range(len(stream)) if stream[i : i + length] == excerpt.tokens
        ]  # short ones may occur several times
        assert len(excerpt.tokens) == length
        befores = [haystack.tokenizer.decode(stream[:i]).rstrip(" ") for i in begins]
        afters = [haystack.tokenizer.decode(stream[i : i + 9]) for i in begins]
        assert any(
            before == "" or before[-1] in ".!?\n" or after.startswith("\n")
            for before, after in zip(befores, afters, strict=True)
        )


def test_all_of_the_text_can_be_one_excerpt_and_no_more(haystack):
    size = len(haystack.tokens)
    whole = haystack.excerpt(size, np.random.default_rng(0))
    assert whole.tokens == haystack.tokens.tolist()
    with pytest.raises(UserError, match=rf"text: expected {size + 1} .* got {size}"):
        haystack.excerpt(size + 1, np.random.default_rng(0))


def test_sentences_go_on_where_others_end(haystack):
    excerpt = haystack.excerpt(300, np.random.default_rng(3))
    decode = haystack.tokenizer.decode
    put = haystack.encode(" Here it is.")
    assert len(excerpt.sentences) > 10
    for place in excerpt.sentences.tolist():
        text = decode(list(excerpt.with_insertions([(place, put)])))
        before, after = text.split(" Here it is.")
        assert before[-1] in '.!?")' or after[0] == "\n"
        assert after[0].isspace()
        assert folded(before + after) == folded(decode(excerpt.tokens))


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.floats(0, 1))
def test_a_place_is_near_its_depth_and_at_a_sentence_if_one_is_near(kinds, depth):
    size = len(kinds)
    places = np.array([i for i in range(1, size) if kinds[i]], dtype=int)
    excerpt = Excerpt(list(range(size)), places, np.arange(1, size))
    place = excerpt.place(depth)
    assert abs(place - depth * size) <= 0.5 + 0.05 * size
    wanted = round(depth * size)
    if 0 < wanted < size and any(abs(p - wanted) <= 0.05 * size for p in places):
        assert place in places
        assert abs(place - wanted) == min(abs(places - wanted))
    if depth in (0, 1):
        assert place == depth * size


def test_words_are_not_cut_where_no_sentence_is_near():
    excerpt = Excerpt(list(range(40)), np.array([5]), np.array([5, 19, 30]))
    assert [excerpt.place(d) for d in (0.0, 0.5, 0.6, 1.0)] == [0, 19, 24, 40]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(100, 999)), max_size=5))
def test_insertions_keep_their_places(insertions):
    excerpt = Excerpt(list(range(9)), np.array([], int), np.array([], int))
    result = excerpt.with_insertions([(place, (token,)) for place, token in insertions])
    assert [t for t in result if t < 100] == excerpt.tokens
    assert sorted(t for t in result if t >= 100) == sorted(token for _, token in insertions)
    for place, token in insertions:
        behind = [i for i, t in enumerate(result) if t == token]
        assert any(sum(t < 100 for t in result[:i]) == place for i in behind)
