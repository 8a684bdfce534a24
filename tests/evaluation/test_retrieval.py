"""Retrieval counts the trials whose stated number is the most likely next token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from trainer.data.needles import NeedleVocabulary, make_trials
from trainer.evaluation.measurements import successes

VOCABULARY = NeedleVocabulary(np.arange(100, 116), np.arange(200, 290), 300)


class Reader(nn.Module):
    """Reads prompts as a person would: finds the name's statement within ``reach`` tokens."""

    def __init__(self, reach):
        super().__init__()
        self.reach, self.largest = reach, 0
        self.device = torch.device("cpu")
        self.computes_on = "cpu"
        self.config = SimpleNamespace(hidden_size=1)

    def forward(self, ids, last):
        assert last == 1
        self.largest = max(self.largest, ids.numel())
        logits = torch.zeros(len(ids), 1, 301)
        for row, prompt in enumerate(ids.tolist()):
            for i in range(max(0, len(prompt) - 1 - self.reach), len(prompt) - 1):
                if prompt[i] == prompt[-1]:
                    logits[row, 0, prompt[i + 1]] = 1
        return logits


def test_reach_of_a_reader_is_what_is_measured():
    text = np.tile(np.arange(256) % 90, (200, 1))
    trials = make_trials(text, np.arange(200), VOCABULARY, 4, seed=0)
    for reach in (32, 128, 256):
        hits = successes(Reader(reach), trials, batch_tokens=1000)
        assert hits == (trials.depths <= reach).tolist()
    assert 0.05 < np.mean(successes(Reader(32), trials, 1000)) < 0.3


def test_a_batch_holds_the_tokens_it_may():
    text = np.tile(np.arange(256) % 90, (20, 1))
    trials = make_trials(text, np.arange(20), VOCABULARY, 4, seed=0)
    reader = Reader(256)
    successes(reader, trials, batch_tokens=1000)
    assert reader.largest <= 1000
