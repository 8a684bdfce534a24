"""Fit of the softmax temperature 1 + c ln s (DroPE, App. C.2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trainer.data.config import NeedlesConfig
from trainer.data.corpus import Corpus
from trainer.data.dataset import Batch, as_batch
from trainer.data.needles import NeedleVocabulary, mix_needles
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.methods import tempered
from trainer.model.decoder import Decoder


def fitting_batches(
    corpus: Corpus, needles: NeedlesConfig, config: EvaluationConfig, lengths: list[int]
) -> list[Batch]:
    """Validation sequences at every length, of the kind the model was trained on.

    They come from documents that are neither trained on nor in the reported trials, with needles
    mixed in as in training.
    """
    windows = windows_with_common_ends(corpus.validation, config.fit_windows, lengths)
    batches = []
    for text in windows.values():
        tokens = text
        weights = np.ones(tokens.shape, dtype=np.float32)
        if needles.share:
            vocabulary = NeedleVocabulary.of(corpus.tokenizer)
            counters = np.arange(len(tokens))
            tokens, weights = mix_needles(text, counters, vocabulary, needles, config.seed)
        batches.append(as_batch(tokens, corpus.end_of_text, weights))
    return batches


@torch.no_grad()
def fit_temperature(
    model: Decoder,
    batches: list[Batch],
    config: EvaluationConfig,
    done: Callable[[int], None] = lambda tokens: None,
) -> float:
    """The coefficient c of the grid with the least loss over all batches, the least c on a tie.

    Args:
        model: a decoder; its layout is as before afterwards.
        batches: from :func:`fitting_batches`, one a length.
        config: grid and batch size.
        done: told the number of tokens after each batch.
    """
    layout = model.layout
    device = model.norm.weight.device
    losses = []
    try:
        for coefficient in config.temperature_grid:
            model.layout = tempered(layout, coefficient)
            total = 0.0
            for batch in batches:
                size = max(1, config.batch_tokens // batch["input_ids"].shape[1])
                parts = (batch[key].split(size) for key in ("input_ids", "labels", "weights"))
                loss = weight = 0.0
                for ids, labels, weights in zip(*parts, strict=True):
                    token = model.token_losses(ids.to(device), labels.to(device)).cpu()
                    loss += (token * weights).sum().item()
                    weight += weights.sum().item()
                total += loss / weight
                done(batch["input_ids"].numel())
            losses.append(total)
    finally:
        model.layout = layout
    return config.temperature_grid[int(np.argmin(losses))]
