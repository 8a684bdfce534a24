"""Held-out loss by position, against a window-by-window computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.errors import UserError
from trainer.evaluation.loss import by_bucket, losses_by_position, windows_with_common_ends


class Stream:
    """Stands for a token stream: the numbers 0 .. size - 1."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def windows(self, starts, length):
        return np.stack([np.arange(s, s + length) % 50 for s in starts])


def test_windows_of_all_lengths_end_with_the_same_tokens():
    windows = windows_with_common_ends(Stream(500), 7, [8, 32])
    np.testing.assert_array_equal(windows[8], windows[32][:, -8:])
    assert windows[32].shape == (7, 32)


def test_text_shorter_than_the_longest_window_is_an_error():
    with pytest.raises(UserError, match="has 31 tokens"):
        windows_with_common_ends(Stream(31), 7, [8, 32])


@pytest.mark.parametrize("batch_tokens", [1, 20, 1000])
def test_mean_loss_at_every_position(tiny_decoder, batch_tokens):
    model = tiny_decoder(training_length=16)
    windows = Stream(100).windows(np.array([0, 17, 40]), 10)
    expected = torch.zeros(10, dtype=torch.float64)
    for window in windows:
        ids = torch.tensor([0, *window[:-1]])[None]
        logits = model(ids)[0].double()
        expected += F.cross_entropy(logits, torch.from_numpy(window), reduction="none").detach() / 3
    got = losses_by_position(model, windows, 0, batch_tokens)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_buckets_average_their_positions():
    edges, means = by_bucket(torch.arange(5, dtype=torch.float64), 2)
    assert edges == (0, 2, 4, 5)
    assert means == (0.5, 2.5, 4.0)
