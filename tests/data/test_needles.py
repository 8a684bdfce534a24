"""Statements in text, compared with a plain loop that reads the sequences as a person would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from trainer.common.errors import UserError
from trainer.config import NeedlesConfig, NeedleTaskSettings
from trainer.data.needles import NAMES, WORDS, NeedleVocabulary, insert, make_trials, mix_needles
from trainer.data.tokenizer import END_OF_TEXT, train_tokenizer

# Names are 100 .. 115, numbers 200 .. 289, the full stop 300; text is below 100.
VOCABULARY = NeedleVocabulary(np.arange(100, 116), np.arange(200, 290), 300)


def text_of(rows: int, length: int) -> np.ndarray:
    return np.tile(np.arange(length) % 90, (rows, 1))


def statements_in(row: np.ndarray) -> list[tuple[int, int, int]]:
    """(position, name, number) of every complete statement, found by scanning."""
    return [
        (i, int(row[i]), int(row[i + 1]))
        for i in range(len(row) - 2)
        if 100 <= row[i] < 116 and 200 <= row[i + 1] < 290 and row[i + 2] == 300
    ]


@given(
    cuts=st.lists(st.integers(0, 14), min_size=1, max_size=3).map(sorted),
    length=st.just(14),
)
def test_insert_is_list_insertion(cuts, length):
    statements = np.array([[[900 + m, 910 + m, 920 + m] for m in range(len(cuts))]])
    got, begins = insert(np.arange(length)[None], statements, np.array([cuts]))
    expected: list[int] = []
    for j in range(length + 1):
        for m, cut in enumerate(cuts):
            if cut == j and j < length:
                expected += [900 + m, 910 + m, 920 + m]
        if j < length:
            expected.append(j)
    assert got[0].tolist() == expected[:length]
    for m, cut in enumerate(cuts):
        if cut + 3 * m < length and cut < length:
            assert got[0, begins[0, m]] == 900 + m


@given(seed=st.integers(0, 1000), end=st.sampled_from([None, 10]))
def test_training_sequences_state_consistent_facts_and_weigh_only_answerable_numbers(seed, end):
    config = NeedlesConfig(share=1.0, names=(2, 5), mentions=(2, 20), weight=7.0)
    tokens, weights = mix_needles(text_of(8, 64), np.arange(8), VOCABULARY, config, seed, end)
    assert tokens.shape == weights.shape == (8, 64)
    for row, weight in zip(tokens, weights, strict=True):
        statements = statements_in(row)
        assert 2 <= len(statements) <= 20
        known: dict[int, int] = {}
        expected = np.ones(64)
        for position, name, number in statements:
            assert known.setdefault(name, number) == number
            before = row[:position]  # with a mask, only what stands behind the last end
            begin = max(np.flatnonzero(before == end), default=0) if end else 0
            if name in {int(row[p]) for p, *_ in statements if begin <= p < position}:
                expected[position + 1] = 7.0
        assert len(known) <= 5
        np.testing.assert_array_equal(weight, expected)
        text = [t for t in row.tolist() if t < 100]
        assert text == list(range(len(text)))  # nothing of the text is lost or reordered


@given(seed=st.integers(0, 1000))
def test_numbers_that_change_hold_until_the_next_change(seed):
    config = NeedlesConfig(share=1.0, names=(2, 3), mentions=(20, 20), changes=0.5)
    tokens, weights = mix_needles(text_of(40, 64), np.arange(40), VOCABULARY, config, seed)
    unchanged = changed = 0
    for row, weight in zip(tokens, weights, strict=True):
        known: dict[int, int] = {}
        for position, name, number in statements_in(row):
            if name not in known:
                assert weight[position + 1] == 1
            elif known[name] == number:  # one change in 90 states the same number
                unchanged += weight[position + 1] == 10
            else:
                assert weight[position + 1] == 1
                changed += 1
            known[name] = number
        assert (weight == 10).sum() <= 20
    assert abs(unchanged / (unchanged + changed) - 0.5) < 0.1


def test_share_of_sequences_that_carry_statements():
    config = NeedlesConfig(share=0.25, mentions=(2, 4))
    tokens, weights = mix_needles(text_of(4000, 32), np.arange(4000), VOCABULARY, config, 0)
    carrying = (tokens >= 100).any(axis=1)
    assert abs(carrying.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)
    assert (weights[~carrying] == 1).all()


def trials_of(count, length, needles=4, changes=0):
    settings = NeedleTaskSettings(needles=needles, seed=1, changes=changes)
    return make_trials(text_of(count, length), VOCABULARY, settings)


@pytest.mark.parametrize("length", [16, 64, 4096])
def test_trial_states_the_answer_once_and_ends_with_its_name(length):
    trials = trials_of(50, length)
    assert trials.prompts.shape == (50, length)
    for prompt, answer, depth in zip(trials.prompts, trials.answers, trials.depths, strict=True):
        statements = statements_in(prompt)
        names = [name for _, name, _ in statements]
        numbers = [number for *_, number in statements]
        assert len(statements) == len(set(names)) == len(set(numbers)) == 4
        assert prompt[0] == 0  # the first token stays first
        (position,) = [p for p, name, _ in statements if name == prompt[-1]]
        assert prompt[position + 1] == answer
        assert depth == length - 1 - position


@pytest.mark.parametrize("changes", [1, 3])
def test_trials_ask_for_the_last_of_several_numbers(changes):
    trials = trials_of(60, 64, changes=changes)
    for prompt, answer, depth in zip(trials.prompts, trials.answers, trials.depths, strict=True):
        statements = statements_in(prompt)
        assert len({number for *_, number in statements}) == len(statements) == 4
        assert len({name for _, name, _ in statements}) == 4 - changes
        asked = [(place, number) for place, name, number in statements if name == prompt[-1]]
        assert len(asked) == changes + 1
        assert asked[-1] == (63 - depth, answer)


def test_trials_have_needles_from_the_first_place_to_the_last():
    """Behind the first token, and right before the question."""
    trials = trials_of(4000, 64)
    begins = 63 - trials.depths
    assert set(begins) == set(range(1, 61))
    counts = np.histogram(begins, bins=4, range=(1, 61))[0]
    assert counts.min() > 800


def test_training_sequences_have_statements_from_the_first_token_to_the_last():
    config = NeedlesConfig(share=1.0, names=(2, 3), mentions=(2, 2))
    tokens, _ = mix_needles(text_of(4000, 32), np.arange(4000), VOCABULARY, config, 0)
    begins = [position for row in tokens for position, *_ in statements_in(row)]
    assert set(begins) == set(range(32 - 2))
    assert len(begins) == 8000


def test_as_few_and_as_many_names_and_mentions_as_are_allowed_are_drawn():
    config = NeedlesConfig(share=1.0, names=(2, 5), mentions=(3, 20))
    tokens, _ = mix_needles(text_of(3000, 64), np.arange(3000), VOCABULARY, config, 0)
    statements = [statements_in(row) for row in tokens]
    assert {len(row) for row in statements} == set(range(3, 21))
    names = [len({name for _, name, _ in row}) for row in statements if len(row) == 20]
    assert set(names) == {2, 3, 4, 5}
    assert np.bincount(names, minlength=6)[2:].min() > 0.15 * len(names)
    assert {name for row in statements for _, name, _ in row} == set(range(100, 116))
    assert {number for row in statements for *_, number in row} == set(range(200, 290))


def test_statements_that_do_not_fit_a_sequence_are_refused():
    config = NeedlesConfig(share=0.5, mentions=(2, 20))
    with pytest.raises(UserError, match=r"data\.needles\.mentions: 20 statements do not fit 60"):
        mix_needles(text_of(1, 60), np.arange(1), VOCABULARY, config, 0)
    mix_needles(text_of(1, 61), np.arange(1), VOCABULARY, config, 0)


def test_another_seed_makes_other_trials():
    first, second = (
        make_trials(text_of(50, 64), VOCABULARY, NeedleTaskSettings(needles=4, seed=seed))
        for seed in (1, 2)
    )
    assert (first.depths != second.depths).mean() > 0.8


def test_trials_do_not_depend_on_how_many_are_made():
    few, many = (trials_of(count, 64) for count in (3, 30))
    np.testing.assert_array_equal(few.prompts, many.prompts[:3])


@pytest.mark.parametrize(
    ("needles", "length", "message"),
    [
        (5, 14, r"needles\.needles: .* 4"),
        (5, 16, r"needles\.needles: .* 4"),
        (17, 128, "at most 16 in 128 tokens, got 17"),
    ],
)
def test_too_many_needles_for_the_length_or_the_names_are_an_error(needles, length, message):
    assert len(NAMES) == 16
    with pytest.raises(UserError, match=message):
        trials_of(1, length, needles=needles)


@pytest.mark.parametrize("changes", [4, 5])
def test_one_of_the_needles_is_no_change(changes):
    with pytest.raises(UserError, match=rf"needles\.changes: .* 4 of .*, got {changes}$"):
        trials_of(1, 64, changes=changes)
    trials_of(1, 64, changes=3)


@pytest.mark.parametrize(
    "tokenizer",
    [
        train_tokenizer(["some text"], 300, words=[]),
        Tokenizer(models.WordLevel({"unknown": 0, ".": 1}, unk_token="unknown")),
    ],
    ids=["splits them", "knows none"],
)
def test_a_tokenizer_without_the_words_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"as one token of its own, got \d+ of 107"):
        NeedleVocabulary.from_tokenizer(tokenizer)


def test_words_are_found_by_a_tokenizer_that_puts_a_token_before_every_text():
    tokenizer = train_tokenizer(["some text"], 300, WORDS)
    plain = NeedleVocabulary.from_tokenizer(tokenizer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    vocabulary = NeedleVocabulary.from_tokenizer(tokenizer)
    np.testing.assert_array_equal(vocabulary.names, plain.names)
    np.testing.assert_array_equal(vocabulary.numbers, plain.numbers)
    assert vocabulary.full_stop == plain.full_stop


def test_words_are_single_tokens_and_text_survives_a_round_trip():
    tokenizer = train_tokenizer(["a text about Alice and 42 things"] * 5, 300, WORDS)
    vocabulary = NeedleVocabulary.from_tokenizer(tokenizer)
    assert len(set(vocabulary.names) | set(vocabulary.numbers)) == len(NAMES) + 90
    text = "We met Alice 42. Then nothing."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
