"""Fit of the softmax temperature 1 + c ln s (DroPE, App. C.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from trainer.data.config import NeedlesConfig
from trainer.data.corpus import Corpus
from trainer.data.dataset import Batch, as_batch
from trainer.data.needles import NeedleVocabulary, mix_needles
from trainer.data.order import Integers
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.loss import losses_by_position, windows_with_common_ends
from trainer.evaluation.methods import tempered
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout

Done = Callable[[int], None]


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
    done: Done = lambda tokens: None,
) -> float:
    """The coefficient c of the grid with the least loss over all batches, the least c on a tie.

    Args:
        model: a decoder; its layout is as before afterwards.
        batches: from :func:`fitting_batches`, one a length.
        config: grid and batch size.
        done: told the number of tokens after each batch.
    """
    layout, device = model.layout, model.norm.weight.device

    def loss(batch: Batch) -> float:
        size = max(1, config.batch_tokens // batch["input_ids"].shape[1])
        parts = (batch[key].split(size) for key in ("input_ids", "labels", "weights"))
        total = weight = 0.0
        for ids, labels, weights in zip(*parts, strict=True):
            token = model.token_losses(ids.to(device), labels.to(device)).cpu()
            total += (token * weights).sum().item()
            weight += weights.sum().item()
        done(batch["input_ids"].numel())
        return total / weight

    losses = []
    try:
        for coefficient in config.temperature_grid:
            model.layout = tempered(layout, coefficient)
            losses.append(sum(loss(batch) for batch in batches))
    finally:
        model.layout = layout
    return config.temperature_grid[int(np.argmin(losses))]


def fit_coefficient(
    model: Decoder,
    tempered_with: Callable[[float], Callable[[float], Layout]],
    windows: Mapping[int, Integers],
    end_of_text: int,
    grid: Sequence[float],
    batch_tokens: int,
    read: Callable[[int, int], None] = lambda sequences, length: None,
) -> float:
    """The coefficient with the least held-out loss, summed over the lengths.

    The best of the grid, and then the lowest point of the parabola through it and its neighbours,
    if that is better still.

    Args:
        model: a decoder; its layout is as before afterwards.
        tempered_with: from a coefficient and an extension factor to a layout.
        windows: ``[N, length]`` held-out tokens for every length.
        end_of_text: what stands before each window.
        grid: coefficients to try.
        batch_tokens: tokens in one forward pass.
        read: told the number and length of the windows after each length, in ``len(grid)`` rounds
            over them and perhaps one more.
    """
    layout = model.layout

    def loss(coefficient: float) -> float:
        layout_at, total = tempered_with(coefficient), 0.0
        for length, tokens in windows.items():
            model.layout = layout_at(length / layout.training_length)
            by_position = losses_by_position(model, tokens, end_of_text, batch_tokens)
            total += by_position.mean().item()
            read(*tokens.shape)
        return total

    try:
        tried = {coefficient: loss(coefficient) for coefficient in sorted(set(grid))}
        lowest = _lowest_point(list(tried.items()))
        if lowest is not None and lowest not in tried:
            tried[lowest] = loss(lowest)
    finally:
        model.layout = layout
    return min(tried, key=lambda coefficient: tried[coefficient])


def _lowest_point(points: list[tuple[float, float]]) -> float | None:
    """Where the parabola through the lowest point and its neighbours is lowest; None at an end."""
    best = min(range(len(points)), key=lambda i: points[i][1])
    if not 0 < best < len(points) - 1:
        return None
    (a, loss_a), (b, loss_b), (c, loss_c) = points[best - 1 : best + 2]
    before, after = (b - a) * (loss_c - loss_b), (c - b) * (loss_a - loss_b)
    if before + after == 0:
        return None
    return b + ((c - b) * after - (b - a) * before) / (2 * (before + after))
