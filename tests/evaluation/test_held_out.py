"""Held-out loss by position, against a window-by-window computation, and sizes of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.data.conftest import held_out
from trainer.data.corpus import HeldOutText, held_out_windows
from trainer.data.prepared import windows_at
from trainer.evaluation import perplexity
from trainer.evaluation.perplexity import token_losses, unigram_loss


def counted_up(size):
    """The numbers 0 .. size - 1, as tokens of a small vocabulary."""
    return np.arange(size) % 50


@pytest.mark.parametrize(
    ("size", "last", "count"),
    [(500, 8, 7), (56, 8, 7), (55, 8, 6), (39, 8, 4), (32, 17, 1), (33, 1, 7), (63, 9, 7)],
)
def test_scored_tokens_of_two_windows_never_overlap(size, last, count):
    """There are as many windows as the text has disjoint scored tokens for."""
    windows = held_out_windows(held_out(np.arange(size)), 7, 32, apart=last)
    assert len(windows) == count
    scored = windows[:, -last:]
    assert len(np.unique(scored)) == scored.size


@pytest.mark.parametrize("batch_tokens", [1, 20, 1000])
def test_loss_at_every_position(tiny_decoder, batch_tokens):
    model = tiny_decoder(training_length=16)
    windows = windows_at(counted_up(100), np.array([0, 17, 40]), 10)
    expected = torch.zeros(10, dtype=torch.float64)
    for window in windows:
        ids = torch.tensor([0, *window[:-1]])[None]
        logits = model(ids)[0].double()
        expected += F.cross_entropy(logits, torch.from_numpy(window), reduction="none").detach() / 3
    got = by_position(model, windows, batch_tokens)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def as_read(model, window, position, first):
    """The loss on one token of a window read from token ``first`` on, behind end of text."""
    ids = torch.tensor([0, *window[first:position]])[None]
    logits = model(ids)[0, -1].double()
    return F.cross_entropy(logits, torch.tensor(window[position])).item()


def by_position(model, windows, batch_tokens, reads=None):
    losses = token_losses(model, windows, 0, batch_tokens, reads=reads)
    return losses.double().mean(dim=0)


@torch.no_grad()
@pytest.mark.parametrize("batch_tokens", [1, 20, 1000])
@pytest.mark.parametrize(("length", "reads"), [(16, 8), (19, 8), (21, 6), (9, 8), (23, 5), (7, 2)])
def test_cropped_every_token_sees_half_to_all_of_the_tokens_read(
    tiny_decoder, length, reads, batch_tokens
):
    """Pieces of ``reads`` tokens, counted from the end, whose last halves count."""
    model = tiny_decoder(training_length=8)
    windows = windows_at(counted_up(100), np.array([0, 17]), length)
    starts = [*range(length - reads, 0, -(reads // 2)), 0]
    expected = []
    for position in range(length):
        first = next(  # the last piece but for its first half, or the first piece
            s for s in starts if s == 0 or s + reads - reads // 2 <= position < s + reads
        )
        assert position - first < reads
        expected.append(np.mean([as_read(model, w, position, first) for w in windows]))
    got = by_position(model, windows, batch_tokens, reads)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_reading_as_much_as_there_is_crops_nothing(tiny_decoder):
    model, windows = tiny_decoder(), windows_at(counted_up(100), np.array([0, 17]), 12)
    whole = by_position(model, windows, 100)
    for reads in (12, 99):
        assert torch.equal(by_position(model, windows, 100, reads), whole)


def test_cropped_the_last_tokens_have_the_same_loss_at_every_length(tiny_decoder):
    model = tiny_decoder(training_length=8)
    windows = held_out_windows(held_out(np.arange(500) % 50), 4, 61)
    losses = [by_position(model, windows[:, -n:], 100, 8)[-12:] for n in (19, 24, 61)]
    for result in losses[1:]:
        torch.testing.assert_close(result, losses[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layers", [["rope"], ["nope"]])
def test_nothing_that_is_computed_is_quadratic(tiny_decoder, layers):
    """The largest tensor of a forward pass at two lengths."""
    sizes = []
    for length in (1024, 2048):
        windows = windows_at(counted_up(5000), np.array([0]), length)
        with LargestTensor() as largest:
            token_losses(tiny_decoder(layers=layers, training_length=64), windows, 0, 1)
        sizes.append(largest.elements)
    assert sizes[1] <= 2 * sizes[0]


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that an operator returned within."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return result


def test_the_unigram_loss_is_over_as_many_tokens_of_each_text(monkeypatch):
    """The first ones; a text of none has no share."""
    monkeypatch.setattr(perplexity, "UNIGRAM_TOKENS", 2)
    text = HeldOutText(((1.0, np.array([0, 1, 1, 1])), (1.0, np.array([], dtype=int))))
    known = HeldOutText(((1.0, np.array([0, 0, 1, 1])),))
    q = np.array([3, 1]) / 4
    assert unigram_loss(text, known, 2) == pytest.approx(-np.log(q).mean())


def test_the_unigram_loss_is_the_cross_entropy_of_weighted_frequencies():
    """Two texts of weights 3 and 1; each of the four tokens counts once more where it is known."""
    known = [np.array([0, 0, 1, 2]), np.array([3, 3])]
    asked = [np.array([0, 1]), np.array([3])]

    def text(streams):
        parts = zip((3.0, 1.0), streams, strict=True)
        return HeldOutText(tuple(parts))

    q = 0.75 * np.array([3, 2, 2, 1]) / 8 + 0.25 * np.array([1, 1, 1, 3]) / 6
    p = 0.75 * np.array([0.5, 0.5, 0, 0]) + 0.25 * np.array([0, 0, 0, 1])
    assert unigram_loss(text(asked), text(known), 4) == pytest.approx(-(p * np.log(q)).sum())
