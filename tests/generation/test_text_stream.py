"""Streamed text is the decoded text, in whole characters, cut before the first stop string."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.tokenizer import train_tokenizer
from trainer.generation.text_stream import TextStream

WORDS = ["Grüße aus 中国 🙂 naïve", "the end of the text"]
BYTE_LEVEL = train_tokenizer(WORDS, 270, [])


def metaspace():
    """A tokenizer that writes a space before words, and drops the first when it decodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    return tokenizer


def streamed(decode, tokens, stop=()):
    """All pieces given out, and how many tokens it took to stop."""
    stream, pieces = TextStream(decode, stop), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces


@given(st.text())
def test_byte_level_text_comes_in_whole_characters(text):
    pieces = streamed(BYTE_LEVEL.decode, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@example([BYTE_LEVEL.token_to_id("ä"), BYTE_LEVEL.token_to_id("Ċ")])  # half a character, newline
@given(st.lists(st.integers(1, 269)))
def test_bytes_that_are_no_text_come_out_as_decoded_at_once(tokens):
    assert "".join(streamed(BYTE_LEVEL.decode, tokens)) == BYTE_LEVEL.decode(tokens)


@given(st.lists(st.sampled_from(["the", "end", "of", "text", "naïve"]), min_size=1))
def test_spaces_before_words_are_kept(words):
    tokenizer = metaspace()
    text = " ".join(words)
    assert "".join(streamed(tokenizer.decode, tokenizer.encode(text).ids)) == text


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_across_tokens_and_never_shown(text, stop):
    expected = text
    for n in range(len(text) + 1):  # one character a token
        if ends := [n - len(s) for s in stop if text[:n].endswith(s)]:
            expected = text[: min(ends)]
            break
    pieces = streamed(lambda ids: "".join(map(chr, ids)), map(ord, text), stop)
    assert "".join(pieces) == expected


def test_only_what_may_be_a_stop_string_is_held_back():
    stream = TextStream(lambda ids: "".join(map(chr, ids)), ["</s>"])
    assert [stream.push(ord(c)) for c in "a<b</s"] == ["a", "", "<b", "", "", ""]
    assert stream.finish() == "</s"


def test_decoding_reads_few_tokens_at_a_time():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return BYTE_LEVEL.decode(ids)

    streamed(decode, BYTE_LEVEL.encode("the end of 中国 " * 50).ids)
    assert max(lengths) <= 12


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match="empty stop string"):
        TextStream(BYTE_LEVEL.decode, [""])
