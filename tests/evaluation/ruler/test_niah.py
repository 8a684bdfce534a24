"""Needles are read back out of the text, by a pattern of the test's own."""

import re

import pytest

from tests.evaluation.ruler.conftest import DOCUMENTS
from trainer.evaluation.ruler.niah import Essay
from trainer.evaluation.ruler.question import NOISE

SENTENCES = ["One two. Three four? Five", "Six (seven.) Eight nine!"]


def text(count, *insertions):
    return Essay(SENTENCES).with_insertions(count, insertions)


def test_words_are_counted_across_documents_and_begin_again():
    assert text(4) == "One two. Three four?"
    assert text(6) == "One two. Three four? Five Six"
    assert text(12) == "One two. Three four? Five Six (seven.) Eight nine! One two. Three"


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0.0, "X. One two. Three four? Five Six (seven.) Eight nine!"),
        (0.2, "One two. X. Three four? Five Six (seven.) Eight nine!"),
        (0.55, "One two. Three four? X. Five Six (seven.) Eight nine!"),
        (0.6, "One two. Three four? Five X. Six (seven.) Eight nine!"),
        (0.95, "One two. Three four? Five Six (seven.) X. Eight nine!"),
        (1.0, "One two. Three four? Five Six (seven.) Eight nine! X."),
    ],
)
def test_depth_is_the_share_of_five_sentences_before(depth, expected):
    assert text(9, (depth, "X.")) == expected


def test_several_insertions_and_a_sentence_that_is_cut():
    assert text(7, (0.0, "X."), (0.3, "Y."), (1.0, "Z.")) == (
        "X. One two. Y. Three four? Five Six (seven.) Z."
    )
    assert text(3, (0.5, "X."), (1.0, "Y.")) == "One two. X. Three Y."


def test_an_essay_can_be_asked_again():
    essay = Essay(SENTENCES)
    assert essay.with_insertions(9, []) == essay.with_insertions(20, [])[:51].rstrip()
    assert essay.with_insertions(2, [(0.0, "X.")]) == "X. One two."


NEEDLE = re.compile(r"One of the special magic (\w+) for ([\w .'-]+?) is: ([0-9a-f-]+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NUMBER, WORD = r"[1-9]\d{6}", r"\D+-\D+"

# Name: haystack, pattern of keys, kind and pattern of values, keys (None: as many as fit), values,
# queries.
EIGHT = {
    "niah_single_1": ("noise", WORD, "numbers", NUMBER, 1, 1, 1),
    "niah_single_2": ("essay", WORD, "numbers", NUMBER, 1, 1, 1),
    "niah_single_3": ("essay", WORD, "uuids", UUID, 1, 1, 1),
    "niah_multikey_1": ("essay", WORD, "numbers", NUMBER, 4, 1, 1),
    "niah_multikey_2": ("needle", WORD, "numbers", NUMBER, None, 1, 1),
    "niah_multikey_3": ("needle", UUID, "uuids", UUID, None, 1, 1),
    "niah_multivalue": ("essay", WORD, "numbers", NUMBER, 1, 4, 1),
    "niah_multiquery": ("essay", WORD, "numbers", NUMBER, 4, 1, 4),
}


def parts(text):
    """Context, question."""
    _, rest = text.split("afterwards.\n")
    context, question = rest.rsplit("\n", 1)
    return context, question


@pytest.mark.parametrize("length", [2048, 6144])
@pytest.mark.parametrize("name", EIGHT)
def test_the_answers_are_what_the_text_says_of_the_keys_asked_for(texts, name, length):
    _, key, kind, value, keys, values, queries = EIGHT[name]
    for text, answers, _ in texts(name, length):
        context, question = parts(text)
        needles = NEEDLE.findall(context)
        assert all(n[0] == kind and re.fullmatch(key, n[1]) for n in needles)
        assert all(re.fullmatch(value, n[2]) for n in needles)
        named = question.split(" for ")[1].split(" mentioned in")[0]
        asked = re.split(r", (?:and )?", named)
        assert len(asked) == queries
        assert len({n[1] for n in needles}) == (keys or len(needles))
        assert len(needles) == (keys * values if keys else context.count("\n") + 1)
        # Every key asked for has its values and no others; the needles' order is not the answers'.
        found = [sorted(n[2] for n in needles if n[1] == k) for k in asked]
        step = len(answers) // queries
        given = [sorted(answers[i * step : (i + 1) * step]) for i in range(queries)]
        assert found == given
        assert len(answers) == values * queries
        assert all(text.count(answer) == 1 for answer in answers)


@pytest.mark.parametrize("name", EIGHT)
def test_around_the_needles_is_only_hay(texts, name):
    haystack = EIGHT[name][0]
    contexts = [parts(text)[0] for text, _, _ in texts(name, 2048)]
    hay = [NEEDLE.sub("", context).split() for context in contexts]
    if haystack == "essay":
        words = " ".join(DOCUMENTS).split()
        assert all(rest == words[: len(rest)] and len(rest) > 500 for rest in hay)
    elif haystack == "noise":
        assert all(rest == NOISE.split() * (len(rest) // 19) for rest in hay)
        assert all(context.count("\n") > 30 for context in contexts)
    else:
        assert hay == [[]] * 5


@pytest.mark.parametrize("name", EIGHT)
def test_depth_is_where_the_first_answer_stands(texts, name):
    depths = []
    for text, answers, depth in texts(name, 2048):
        context, _ = parts(text)
        begin = min(n.start() for n in NEEDLE.finditer(context) if n[3] in answers)
        assert depth == pytest.approx(begin / len(context), abs=1e-9)
        depths.append(depth)
    assert max(depths) - min(depths) > 0.1


def test_needles_in_essays_stand_between_sentences(texts):
    for text, _, _ in texts("niah_multikey_1", 6144):
        context, _ = parts(text)
        for needle in NEEDLE.finditer(context):
            before = context[: needle.start()].rstrip()
            at_document = any(context[needle.end() + 1 :].startswith(d[:40]) for d in DOCUMENTS)
            last = needle.end() == len(context)
            assert not before or at_document or last or re.search(r"[.!?][\"')]?$", before)
