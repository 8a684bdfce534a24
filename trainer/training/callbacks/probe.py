"""Attention statistics of every layer during training."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch

from trainer.analysis.attention import probe
from trainer.data.corpus import Corpus
from trainer.data.dataset import held_out_windows
from trainer.runs.config import RunConfig
from trainer.training.callbacks.evaluating import evaluating
from trainer.training.callbacks.monitor import Monitor
from trainer.training.callbacks.transitions import Transitions
from trainer.training.module import LanguageModule


class Probe(Monitor):
    """Adds each measure of :func:`probe` to the next row of metrics, per layer and over all layers.

    Over all layers it is the mean, and the maximum for the largest logit. Every rank reads the same
    few sequences of the training length.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        transitions: Transitions,
        add_metrics: Callable[[dict[str, float]], None],
    ) -> None:
        assert config.monitor.probe_every is not None
        super().__init__(config, config.monitor.probe_every, transitions)
        self.add_metrics = add_metrics
        count, length = config.monitor.probe_sequences, config.data.sequence_length
        text = held_out_windows(corpus.validation, count, length)
        text[:, 0] = corpus.end_of_text  # as in training
        self.ids = torch.from_numpy(text)

    def measure(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Measure all layers in one forward pass."""
        with evaluating(module) as model:
            found = probe(model, self.ids)
        for name, layers in found.items():
            whole = max(layers) if name == "largest_logit" else sum(layers) / len(layers)
            each = {f"probe/{name}/layer_{i:02}": value for i, value in enumerate(layers)}
            self.add_metrics({f"probe/{name}": whole} | each)
