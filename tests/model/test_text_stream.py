"""Streamed text is the decoded text, in whole characters, cut before the first stop string."""

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trainer.data.tokenizer import special_tokens, train_tokenizer
from trainer.model.generate import TextStream

WORDS = ["Grüße aus 中国 🙂 naïve", "the end of the text"]
BYTE_LEVEL = train_tokenizer(WORDS, 270, [])


def metaspace():
    """A tokenizer that writes a space before words, and drops the first when it decodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    return tokenizer


def byte_fallback():
    """A tokenizer as Llama 2 has it: characters it does not know become a token a byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {character: 256 + i for i, character in enumerate("▁aehnt")}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def characters():
    """A tokenizer with a token for every ASCII character, ids being code points."""
    vocabulary = {chr(point): point for point in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\x00"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


METASPACE, BYTE_FALLBACK, CHARACTERS = metaspace(), byte_fallback(), characters()


def streamed(tokenizer, tokens, stop=()):
    """All pieces given out, and how many tokens it took to stop."""
    stream, pieces = TextStream(tokenizer, stop), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


@given(st.text())
def test_byte_level_text_comes_in_whole_characters(text):
    pieces = streamed(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.text())
@example("中中.🙂")  # neighbouring characters of several bytes
def test_byte_fallback_text_comes_in_whole_characters(text):
    pieces = streamed(BYTE_FALLBACK, BYTE_FALLBACK.encode(text).ids)
    assert "".join(pieces) == BYTE_FALLBACK.decode(BYTE_FALLBACK.encode(text).ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@example([BYTE_LEVEL.token_to_id("ä"), BYTE_LEVEL.token_to_id("Ċ")])  # half a character, newline
@given(st.lists(st.integers(1, 269)))
def test_bytes_that_are_no_text_come_out_as_decoded_at_once(tokens):
    assert "".join(streamed(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)


def test_a_last_character_that_is_not_finished_comes_at_the_end():
    tokens = BYTE_LEVEL.encode("a中").ids[:-1]
    assert streamed(BYTE_LEVEL, tokens)[-1] == BYTE_LEVEL.decode(tokens)[1:] != ""


def test_special_tokens_are_omitted_everywhere():
    end, text = special_tokens(BYTE_LEVEL).end, BYTE_LEVEL.encode("the end").ids
    for tokens in ([end, *text], [*text[:2], end, *text[2:]], [*text, end]):
        assert "".join(streamed(BYTE_LEVEL, tokens)) == "the end"


@given(st.lists(st.sampled_from(["the", "end", "of", "text", "naïve"]), min_size=1))
def test_spaces_before_words_are_kept(words):
    text = " ".join(words)
    assert "".join(streamed(METASPACE, METASPACE.encode(text).ids)) == text


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_across_tokens_and_never_shown(text, stop):
    expected = text
    for n in range(len(text) + 1):  # one character a token
        if ends := [n - len(s) for s in stop if text[:n].endswith(s)]:
            expected = text[: min(ends)]
            break
    assert "".join(streamed(CHARACTERS, map(ord, text), stop)) == expected
