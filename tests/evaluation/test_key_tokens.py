"""Key tokens against a plain loop over tokens in float64, and all that a choice depends on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.evaluation.test_loss import LargestTensor
from trainer.evaluation.config import EvaluationConfig, KeyTokenSettings
from trainer.evaluation.key_tokens import (
    FEWEST,
    Chooser,
    ChosenTokens,
    Contexts,
    KeyTokens,
    find_key_tokens,
)
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Reading
from trainer.evaluation.passes import Piece
from trainer.evaluation.plan import Subject
from trainer.evaluation.store import Share, Store

LAST, LONG, SHORT = 24, 32, 8


@pytest.fixture
def windows(corpus):
    return windows_with_common_ends(corpus.test, 5, [32, 64])


@torch.no_grad()
def loss_of(model, window, position, first, end):
    """The loss on a token of a window that is read from token ``first`` on, in float64."""
    ids = torch.tensor([end, *window[first:position]])[None]
    return F.cross_entropy(model(ids)[0, -1], torch.tensor(window[position])).item()


def plain_losses(model, window, end, context):
    """The loss on each of the last tokens with half of ``context`` to ``context`` tokens of it.

    Text is read in pieces that end half a context apart, the last one at the end of the window.
    """
    size, half = context, context // 2
    losses = []
    for position in range(len(window) - LAST, len(window)):
        piece_end = len(window) - (len(window) - 1 - position) // half * half
        losses.append(loss_of(model, window, position, max(0, piece_end - size), end))
    return losses


@pytest.fixture
def exact(model):
    return model.double()


@pytest.fixture
def plain(exact, windows, corpus):
    """The losses with a long and a short context, ``[N, last]`` each."""
    text = windows[64][:, -LONG:]
    end = corpus.end_of_text
    long = [[loss_of(exact, w, p, 0, end) for p in range(LONG - LAST, LONG)] for w in text]
    short = [plain_losses(exact, w, end, SHORT) for w in text]
    return np.array(long), np.array(short)


@pytest.fixture
def contexts(plain):
    """Thresholds between two losses, so that rounding decides nothing."""
    long, short = plain
    gains, levels = np.sort((short - long).ravel()), np.sort(-long.ravel())
    alpha = (gains[len(gains) // 2] + gains[len(gains) // 2 + 1]) / 2
    beta = (levels[len(levels) // 3] + levels[len(levels) // 3 + 1]) / 2
    return Contexts(LONG, SHORT, alpha, beta)


@pytest.mark.parametrize("batch_tokens", [1, 70, 4096])
def test_key_tokens_are_those_of_a_loop_over_tokens(
    exact, windows, corpus, plain, contexts, batch_tokens
):
    expected = [
        [
            short - long > contexts.alpha and -long > contexts.beta
            for long, short in zip(*of_window, strict=True)
        ]
        for of_window in zip(*plain, strict=True)
    ]
    mask = find_key_tokens(exact, windows[64], corpus.end_of_text, LAST, contexts, batch_tokens)
    assert mask.tolist() == expected
    assert 0 < mask.sum() < mask.size


def test_a_token_is_no_key_where_both_contexts_are_the_same(exact, windows, corpus):
    """Before the short context ends, nothing is gained, not even with a threshold near 0."""
    nearly = Contexts(LONG, SHORT, 1e-9, -100.0)
    mask = find_key_tokens(exact, windows[32], corpus.end_of_text, 32, nearly, 4096)
    assert not mask[:, :SHORT].any()
    assert mask[:, SHORT:].any()


@pytest.mark.parametrize("reads", [None, 16])
def test_the_result_is_the_mean_over_the_key_tokens(exact, windows, corpus, plain, contexts, reads):
    mask = find_key_tokens(exact, windows[64], corpus.end_of_text, LAST, contexts, 4096)
    task = KeyTokens(windows, corpus.end_of_text, ChosenTokens(mask, contexts, "tiny"))
    for length in (32, 64):
        end, losses = corpus.end_of_text, []
        for window in windows[length]:
            at = range(length - LAST, length)
            whole = [loss_of(exact, window, p, 0, end) for p in at]
            losses.append(plain_losses(exact, window, end, reads) if reads else whole)
        cell = task.measure(Reading(exact, length, reads, 100))
        terms = [
            loss for row, keys in zip(losses, mask, strict=True) for loss in np.array(row)[keys]
        ]
        assert cell["last_loss"] == pytest.approx(sum(terms) / len(terms), rel=1e-5)
        each = [
            np.mean(np.array(row)[keys])
            for row, keys in zip(losses, mask, strict=True)
            if keys.any()
        ]
        assert cell["by_window"] == pytest.approx(each, rel=1e-5)


def test_parts_combine_to_the_whole(model, windows, corpus):
    mask = np.random.default_rng(0).random((5, LAST)) < 0.3
    task = KeyTokens(windows, corpus.end_of_text, ChosenTokens(mask, Contexts(32, 4, 2, -2), "a"))
    parts = [task.read(Reading(model, 64, None, 64, piece=Piece(index, 3))) for index in range(3)]
    assert task.cell(64, parts) == task.measure(Reading(model, 64, None, 64))
    assert task.sequences(64) == 5
    ranks = [task.part(rank, 2) for rank in range(2)]
    assert [part.sequences(64) for part in ranks] == [3, 2]
    assert (ranks[1].chosen.mask == mask[1::2]).all()


def test_a_cell_depends_on_the_windows_and_the_mask(windows, corpus):
    mask = np.zeros((5, LAST), bool)
    mask[0, 0] = True
    task = KeyTokens(windows, corpus.end_of_text, ChosenTokens(mask, Contexts(32, 4, 2, -2), "a"))
    key = task.fingerprint(64)
    assert replace(task, chosen=replace(task.chosen, by="b")).fingerprint(64) == key
    assert replace(task, chosen=replace(task.chosen, mask=~mask)).fingerprint(64) != key
    assert replace(task, first_token=task.first_token + 1).fingerprint(64) != key
    changed = {**windows, 64: windows[64][::-1]}
    assert replace(task, windows=changed).fingerprint(64) != key
    assert task.fingerprint(32) != key


@pytest.fixture
def chooser(model, tmp_path):
    """A chooser that counts how often its weights are read."""

    def load():
        chooser.loads += 1
        return model

    def chooser(settings=KeyTokenSettings(), weights="a", share=Share()):  # noqa: B008
        subject = Subject("tiny", weights, model.config, model.layout, load)
        return Chooser(subject, settings, Store(tmp_path), 4096, share)

    chooser.loads = 0
    return chooser


def test_tokens_are_chosen_once_for_the_same_model_text_and_settings(chooser, windows, corpus):
    end = corpus.end_of_text

    def chosen(settings=KeyTokenSettings(), weights="a", text=windows[64], end=end, last=LAST):  # noqa: B008
        before = chooser.loads
        chooser(settings, weights).choose(text, end, last)
        return chooser.loads - before

    assert [chosen(), chosen()] == [1, 0]
    assert chosen(KeyTokenSettings(short=4)) == 0  # what null stands for
    # The chooser reads the last 32 tokens alone, its training length.
    assert chosen(text=windows[32]) == 0
    for change in (
        {"settings": KeyTokenSettings(short=5)},
        {"settings": KeyTokenSettings(alpha=1.0)},
        {"settings": KeyTokenSettings(beta=-1.0)},
        {"weights": "b"},
        {"text": windows[64][:, :-1]},
        {"end": end + 1},
        {"last": LAST - 1},
    ):
        assert chosen(**change) == 1, change


def test_other_processes_take_what_the_first_one_chose(chooser, windows, corpus):
    first = chooser().choose(windows[64], corpus.end_of_text, LAST)
    other = chooser(share=Share(1, 2)).choose(windows[64], corpus.end_of_text, LAST)
    assert chooser.loads == 1
    assert (other.mask == first.mask).all()
    assert other.about == first.about


def test_too_few_key_tokens_are_said():
    contexts = Contexts(32, 4, 2.0, -2.0)
    few = ChosenTokens(np.arange(400).reshape(4, 100) < FEWEST - 1, contexts, "RoPE")
    assert few.too_few == (
        "The task 'key_tokens' was left out: 99 of 400 tokens are key, too few for a mean (fewer "
        "than 100). More evaluation.windows have more of them, and so does a lower "
        "evaluation.key_tokens.alpha (now 2)."
    )
    enough = ChosenTokens(np.arange(400).reshape(4, 100) < FEWEST, contexts, "RoPE")
    assert enough.too_few == ""
    assert enough.about == {
        "tokens": 100, "of": 400, "by": "RoPE", "long": 32, "short": 4, "alpha": 2.0, "beta": -2.0,
    }  # fmt: skip


def test_contexts_are_the_training_length_and_an_eighth_of_it():
    settings = KeyTokenSettings()
    assert Contexts.make(settings, 256, 1024) == Contexts(256, 32, 2.0, -2.0)
    assert Contexts.make(settings, 4096, 1024) == Contexts(1024, 128, 2.0, -2.0)
    assert Contexts.make(KeyTokenSettings(short=7), 256, 1024).short == 7
    assert Contexts.make(settings, 5, 1024).short == 1


def test_no_logits_of_a_whole_text_are_held(tiny_decoder):
    """The largest tensor of the search is a chunk's logits, whatever the length of the text."""
    sizes = []
    for length in (1024, 2048):
        model = tiny_decoder(training_length=length, model={"vocab_size": 5000})
        text = np.random.default_rng(0).integers(0, 5000, (1, length))
        with LargestTensor() as largest:
            find_key_tokens(model, text, 0, length, Contexts(length, 64, 2.0, -2.0), 1)
        sizes.append(largest.elements)
        assert largest.elements < length * 5000
    assert sizes[1] == sizes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"short": 64}, "evaluation.key_tokens.short: expected fewer tokens than the long context"),
        ({"short": 63}, None),
        ({"beta": 0.0}, "evaluation.key_tokens.beta: expected a number below 0, got 0."),
        ({"model": "no/run"}, "evaluation.key_tokens.model: there is no model 'no/run'."),
    ],
)
def test_settings_are_checked_before_anything_is_measured(settings, message):
    config = EvaluationConfig(
        tasks=["key_tokens"], lengths=[1, 2], key_tokens=KeyTokenSettings(**settings)
    )
    problems = [*map(str, config.problems(64))]
    assert [problem.startswith(message or "") for problem in problems] == (
        [True] if message else []
    )
