"""What each kind of question asks, read back out of the text by patterns of the test's own."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.ruler.conftest import DOCUMENTS, hotpotqa, squad
from trainer.common.errors import UserError
from trainer.evaluation.ruler.kinds import (
    NOISE,
    CommonWords,
    Essay,
    FrequentWords,
    read_hotpotqa,
    read_squad,
    vocabulary,
)

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


def carried_out(text):
    """The variables' values, and the value asked for."""
    values, noise = {}, 0
    for line in text.split("\n"):
        if match := re.fullmatch(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+) |(\d{5}))", line):
            name, other, number = match.groups()
            values[name] = values[other] if other else int(number)
        noise += line == NOISE
    return values, int(re.search(r"assigned the value (\d+) in the text above", text)[1]), noise


@pytest.mark.parametrize("length", [1536, 6144])
def test_the_answers_are_the_variables_with_the_value(texts, length):
    for text, answers, depth in texts("vt", length):
        example, asked = text.split("\n\nMemorize")
        values, value, noise = carried_out(asked)
        assert tuple(name for name in values if values[name] == value) == answers
        assert len(values) == len(answers) == 5
        assert all(len(name) == 5 for name in answers)
        assert noise >= 5
        assert text.endswith(f"5 variables are assigned the value {value}, they are: ")
        context = asked.split("\n\n", 1)[1].split("\nQuestion:")[0]
        assert depth == pytest.approx(context.index("VAR ") / len(context))
        values, value, _ = carried_out(example)
        assert example.endswith(f"value {value}, they are:  {' '.join(values)}")
        assert set(values.values()) == {value}
        assert all(len(name) == 3 for name in values)


def test_the_example_is_about_500_tokens(texts, tokenizer):
    for text, _, _ in texts("vt", 6144):
        example = text.split("\n\nMemorize")[0]
        assert 450 < len(tokenizer.encode(example).ids) < 530


def test_values_and_names_change_from_trial_to_trial(texts):
    found = texts("vt", 1536)
    assert len({answers for _, answers, _ in found}) == 5
    assert len({re.findall(r"= (\d+)", text)[0] for text, _, _ in found}) == 5


LIST = re.compile(r"\nBelow[^\n]*\n([^\n]*)\nQuestion")


def numbered(text):
    """The words of a numbered list, whose numbers must be 1, 2, 3, and so on."""
    pairs = re.findall(r"(\d+)\. (\D+?)(?= \d+\. |$)", text)
    assert [int(number) for number, _ in pairs] == list(range(1, len(pairs) + 1))
    return [word for _, word in pairs]


@pytest.mark.parametrize(
    ("length", "often", "seldom", "example"), [(2048, 6, 1, (3, 1, 20)), (6144, 30, 3, (10, 3, 40))]
)
def test_common_words_are_those_that_appear_most_often(texts, length, often, seldom, example):
    for text, answers, _ in texts("cwe", length):
        solved, asked = text.split("\nBelow is a numbered list")
        words = Counter(numbered(asked.split("\n")[1]))
        assert sorted(answers) == sorted(word for word, n in words.items() if n == often)
        assert Counter(words.values()) == {often: 10, seldom: len(words) - 10}
        assert len(words) > 10
        listed, question = solved.split("\n")[1:]
        words = Counter(numbered(listed))
        common = [word for word, n in words.items() if n == example[0]]
        assert Counter(words.values()) == {example[0]: 10, example[1]: example[2] - 10}
        assert sorted(numbered(question.split("are: ")[1])) == sorted(common)


def test_lists_longer_than_the_vocabulary_are_of_compounds():
    question = CommonWords().question(Random(0), 0, len(vocabulary()) + 1, 200_000)
    words = Counter(numbered(question.text.split("\n")[4]))
    assert len(words) == len(vocabulary()) + 1
    assert sorted(word for word, n in words.items() if n == 30) == sorted(question.answers)


@pytest.mark.parametrize("length", [1024, 6144])
def test_frequent_words_are_those_behind_the_dots(texts, length):
    for text, answers, _ in texts("fwe", length):
        coded = text.split("coded words. ", 1)[1].split("\nQuestion")[0].split()
        (dots, most), *ranked = Counter(coded).most_common()
        assert dots == "..."
        assert tuple(word for word, _ in ranked[:3]) == answers
        assert ranked[2][1] > ranked[3][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        # A zeta distribution: the k-th word k^-2 as often as the first, up to rounding down.
        for rank, (_, count) in enumerate(ranked, 2):
            assert count == pytest.approx(most / rank**2, abs=1)


@given(st.integers(FrequentWords.least, 20_000), st.integers(100, 10_000))
def test_the_three_answers_are_never_tied_with_the_fourth_word(units, length):
    question = FrequentWords().question(Random(units), 0, units, length)
    counts = Counter(question.text.split("coded words. ", 1)[1].split("\nQuestion")[0].split())
    assert {word for word, _ in counts.most_common(4)} == {"...", *question.answers}
    assert sorted(counts.values())[-4] > sorted([0, *counts.values()])[-5]
    total = 6 / math.pi**2 * units * sum(1 / k**2 for k in range(1, 6))
    assert sum(counts.values()) > total - 5


def paragraphs(text):
    """The documents of a prompt, whose numbers must be 1, 2, 3, and so on."""
    context = text.split("given documents.\n\n")[1].rsplit("\n\nAnswer the question", 1)[0]
    found = re.findall(r"Document (\d+):\n(.*?)(?=\n\nDocument |$)", context, re.DOTALL)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


@pytest.mark.parametrize("length", [300, 900])
def test_squad(texts, length):
    articles = [{p["context"] for p in a["paragraphs"]} for a in squad()["data"]]
    trials = texts("qa_1", length)
    # The first five questions of the file, without those that have no answer.
    names = [(a, p) for a in range(5) for p in range(4)][:5]
    places = set()
    for (a, p), (text, answers, _) in zip(names, trials, strict=True):
        assert text.endswith(f"Question: How many people has town {a}.{p}? Answer:")
        assert answers == (f"{a + 1}{p}0", f"{a + 1}{p}0 p")
        given = paragraphs(text)
        places.add(next(i for i, t in enumerate(given) if t.startswith(f"Town {a}.{p} ")))
        assert len(set(given)) == len(given)
        assert set(given) <= set.union(*articles)
        # The rest of the article comes before other articles.
        assert set(given) <= articles[a] or set(given) > articles[a]
        assert all(answer in text for answer in answers)
    assert len(places) > 1


def test_hotpotqa(texts):
    for q, (text, answers, _) in enumerate(texts("qa_2", 2048)):
        assert text.endswith(f"Question: Who owns lake {q}? Answer:")
        assert answers == (f"owner {q}",)
        own = {f"{title}\n{''.join(lines)}" for title, lines in hotpotqa()[q]["context"]}
        assert own <= set(paragraphs(text))
        assert f"Lake {q}-3\nIts owner is owner {q}. It is deep." in paragraphs(text)


def test_a_length_beyond_all_paragraphs_repeats_them(texts):
    for text, _, _ in texts("qa_2", 6144):
        counts = Counter(paragraphs(text))
        assert len(counts) == 60
        assert max(counts.values()) - min(counts.values()) == 1


def test_files_of_another_kind_are_named(tmp_path):
    path = tmp_path / "file.json"
    for content in ("no json", "[1]", "{}", '{"data": [{"paragraphs": 3}]}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"ruler\.squad_file: '.*file.json' is no SQuAD file"):
            read_squad(str(path))
    path.write_text(json.dumps(squad()))
    with pytest.raises(UserError, match=r"ruler\.hotpotqa_file: '.*' is no HotpotQA file"):
        read_hotpotqa(str(path))
    path.write_text('{"data": []}')
    with pytest.raises(UserError, match="holds no question with an answer"):
        read_squad(str(path))
    with pytest.raises(UserError, match="is no SQuAD file"):
        read_squad(str(tmp_path / "none.json"))
