"""Windows of held-out text: of one text, and of a mixture by its weights."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import write_texts
from tests.data.streams import held_out
from trainer.config import TokenizerConfig
from trainer.data.corpus import divided, held_out_windows, prepare_corpus
from trainer.evaluation.loss import windows_with_common_ends

BPE = TokenizerConfig(vocab_size=300)


def mixed(*sizes, weights):
    """Texts whose tokens are 1000 and up, 2000 and up, ..."""
    ids = (np.arange(size) + 1000 * (1 + part) for part, size in enumerate(sizes))
    return held_out(*ids, weights=weights)


def parts_of(windows):
    """How many windows each text has; every window lies within one."""
    texts = windows // 1000 - 1
    assert (texts == texts[:, :1]).all()
    assert (np.diff(windows, axis=1) == 1).all()
    return Counter(texts[:, 0].tolist())


def test_windows_of_one_text_are_spread_from_its_beginning_to_its_end():
    windows = held_out_windows(held_out(range(100)), 5, 10)
    assert windows[:, 0].tolist() == [0, 22, 45, 67, 90]
    with pytest.raises(ValueError, match="do not fill"):
        held_out_windows(held_out(range(100)), 1, 101)


def test_windows_of_a_mixture_come_from_its_texts_by_weight_whatever_their_sizes():
    text = mixed(100, 900, weights=[0.75, 0.25])
    assert parts_of(held_out_windows(text, 64, 10)) == {0: 48, 1: 16}
    for windows in windows_with_common_ends(text, 64, [5, 20]).values():
        assert parts_of(windows) == {0: 48, 1: 16}
    # Those of each text, as if it were alone, and spread among the others.
    windows = held_out_windows(text, 8, 10)
    of_parts = windows[:, 0] // 1000 - 1
    assert of_parts.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    for part, ids in enumerate((np.arange(100) + 1000, np.arange(900) + 2000)):
        mine = windows[of_parts == part]
        np.testing.assert_array_equal(mine, held_out_windows(held_out(ids), len(mine), 10))


def test_it_is_known_from_which_text_a_window_comes():
    text = mixed(100, 200, 50, weights=[5, 3, 2])
    shares = text.shares(10, 7)
    assert shares == [5, 3, 2]
    windows = held_out_windows(text, 10, 7)
    np.testing.assert_array_equal(text.parts_of_windows(shares), windows[:, 0] // 1000 - 1)


def test_a_text_that_is_too_short_gives_what_it_has_with_a_warning():
    text = mixed(30, 1000, 1000, weights=[0.5, 0.25, 0.25])
    said = r"20 tokens of the texts .*: expected \[8, 4, 4\] .*, got \[2, 7, 7\], since test text"
    with pytest.warns(UserWarning, match=said):
        windows = windows_with_common_ends(text, 16, [10, 20], last=10)[20]
    assert parts_of(windows) == {0: 2, 1: 7, 2: 7}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parts_of(held_out_windows(text, 1, 31)) == {1: 1}  # one window has no shares
        assert len(windows_with_common_ends(held_out(range(30)), 16, [20], last=10)[20]) == 2
    with pytest.warns(UserWarning, match="31 tokens"):
        assert parts_of(held_out_windows(text, 8, 31)) == {1: 4, 2: 4}


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 80)), min_size=1, max_size=6),
)
def test_shares_are_those_of_the_weights_as_far_as_there_is_text(count, items):
    weights, most = zip(*items, strict=True)
    shares = divided(count, weights, most)
    assert sum(shares) == min(count, sum(most))
    assert all(0 <= share <= limit for share, limit in zip(shares, most, strict=True))
    free = [i for i, share in enumerate(shares) if share < most[i]]
    for i in free:
        for j in range(len(shares)):  # nothing that is full has more than its weight gives it
            assert shares[j] / weights[j] <= (shares[i] + 1) / weights[i] + 1 / weights[j] + 1e-9


def test_without_limits_the_largest_remainders_are_rounded_up():
    assert divided(10, [0.26, 0.26, 0.48], [10, 10, 10]) == [3, 2, 5]
    assert divided(64, [0.02, 0.98], [64, 64]) == [1, 63]


def test_held_out_text_of_a_corpus_has_its_weights(config, tmp_path):
    """The held-out part of the first text is a quarter of the second's, and its weight 3 of 4."""
    write_texts(tmp_path / "more", files=4, documents=120, start=1000)
    both = replace(
        config,
        mixture={"a": {"weight": 3.0}, "b": {"weight": 1.0, "files": [str(tmp_path / "more")]}},
    )
    corpus = prepare_corpus(both, BPE)
    for split in ("validation", "test"):
        text = getattr(corpus, split)
        assert len(text) == sum(len(getattr(part.text, split)) for part in corpus.parts)
        windows = held_out_windows(text, 40, 16)
        first = getattr(corpus.parts[0].text, split)
        alone = held_out(first.windows(np.zeros(1, int), len(first))[0])
        mine = text.parts_of_windows(text.shares(40, 16)) == 0
        np.testing.assert_array_equal(windows[mine], held_out_windows(alone, 30, 16))
    numbers = [int(text.split()[1]) for text in corpus.documents("test", 600)]
    assert {number >= 1000 for number in numbers} == {True, False}  # for haystacks of both
