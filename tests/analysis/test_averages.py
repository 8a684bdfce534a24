"""Means over texts, against numpy's mean of all at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.analysis.arrays import Averages


def test_batches_of_any_size_count_their_texts():
    values = torch.randn(5, 3, 2)
    averages = Averages()
    for layer in (1, 0):
        averages.add(layer, x=values[:2] + layer)
        averages.add(layer, x=values[2:] + layer)
    assert averages.layers == [0, 1]
    mean = values.double().numpy().mean(axis=0)
    np.testing.assert_allclose(averages.stacked("x"), np.stack([mean, mean + 1]))


def test_texts_of_two_lengths_do_not_mix():
    averages = Averages()
    averages.add(0, x=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="equally long"):
        averages.add(0, x=torch.zeros(1, 5))
