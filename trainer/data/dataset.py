"""Training samples by number."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config import DataConfig
from trainer.data.corpus import Corpus
from trainer.data.needles import NeedleVocabulary, mix_needles
from trainer.data.order import Integers, Mixture, keys, sample_indices


class Batch(TypedDict):
    """One batch of training samples; see :func:`as_batch`."""

    input_ids: Tensor
    labels: Tensor
    weights: Tensor
    documents: NotRequired[Tensor]
    bounds: NotRequired[Tensor]
    longest: NotRequired[int]


class TrainingSamples(Dataset[Batch]):
    """Training samples by counter, each a pure function of (seed, counter), read a batch at a time.

    A sample is an end-of-text token followed by one block: the training text of a part is cut
    every ``sequence_length`` tokens, and its incomplete last block omitted. Needles are mixed in if
    the configuration asks for them. Token t predicts token t + 1.
    """

    def __init__(self, corpus: Corpus, config: DataConfig, seed: int) -> None:
        self.corpus, self.config, self.seed = corpus, config, seed
        C = config.sequence_length
        self.blocks = [len(part.train) // C for part in corpus.parts]
        self.mixture = Mixture.from_weights([part.weight for part in corpus.parts])
        self.vocabulary = (
            NeedleVocabulary.from_tokenizer(corpus.tokenizer) if config.needles.share else None
        )

    def where(self, counters: Integers) -> tuple[Integers, Integers]:
        """Return for each sample number its part of the corpus and the block within that part."""
        parts, numbers = self.mixture.assign(self.seed, counters)
        blocks = np.empty_like(counters)
        for part in np.unique(parts):
            mine = parts == part
            seed = self.seed if part == 0 else int(keys(self.seed, int(part)))
            blocks[mine] = sample_indices(seed, numbers[mine], self.blocks[part])
        return parts, blocks

    def epochs(self, samples: int) -> dict[str, float]:
        """Return how many times each part has been read after ``samples`` samples."""
        shares = np.array(self.mixture.quotas) / sum(self.mixture.quotas)
        return {
            part.name: samples * share / blocks
            for part, share, blocks in zip(self.corpus.parts, shares, self.blocks, strict=True)
        }

    def __getitems__(self, counters: list[int]) -> Batch:
        """Return these samples as one batch of ``[B, sequence_length]`` tensors."""
        targets, weights = self.targets(np.asarray(counters, dtype=np.int64))
        corpus = self.corpus
        return as_batch(targets, corpus.first_token, corpus.end_of_text, weights, self.config)

    def targets(self, numbers: Integers) -> tuple[Integers, NDArray[np.float32]]:
        """Return the tokens to predict and their loss weights, both ``[B, sequence_length]``."""
        parts, blocks = self.where(numbers)
        C = self.config.sequence_length
        targets = np.empty((len(numbers), C), np.int64)
        for part in np.unique(parts):
            mine = parts == part
            targets[mine] = self.corpus.parts[part].train.windows(blocks[mine] * C, C)
        weights = np.ones(targets.shape, np.float32)
        if self.vocabulary is not None:
            end = self.corpus.end_of_text if self.config.document_mask else None
            targets, weights = mix_needles(
                targets, numbers, self.vocabulary, self.config.needles, self.seed, end
            )
        return targets, weights


def as_batch(
    targets: Integers,
    first_token: int,
    end: int,
    weights: NDArray[np.float32],
    config: DataConfig | None = None,
) -> Batch:
    """Build a batch: inputs, targets and weights, all ``[B, T]``.

    The inputs are the targets shifted by one, after ``first_token``. Documents begin there and at
    every end-of-text token ``end``. With document masks, the batch also has ``documents``
    ``[B, T]``, the number of documents up to each input;
    ``bounds``, the starts of documents within the B T tokens, padded with B T to a multiple of
    :data:`BOUNDS`; and ``longest``, a power of two of at least the longest document's length.
    """
    inputs = np.concatenate([np.full_like(targets[:, :1], first_token), targets[:, :-1]], axis=1)
    begins = inputs == end
    begins[:, 0] = True
    batch: Batch = {
        "input_ids": torch.from_numpy(inputs),
        "labels": torch.from_numpy(np.ascontiguousarray(targets)),
        "weights": torch.from_numpy(weights),
    }
    if config is not None and config.document_mask:
        batch["documents"] = torch.from_numpy(begins.cumsum(axis=1))
        bounds = _bounds(begins)
        batch["bounds"] = torch.from_numpy(bounds)
        batch["longest"] = 1 << int(np.diff(bounds).max() - 1).bit_length()
    return batch


BOUNDS = 64
"""Bounds are padded to a multiple of this number: compiled code is specialised to their number."""


def _bounds(begins: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the starts of documents in the concatenated rows; each row starts one."""
    starts = np.flatnonzero(begins)
    bounds = np.full(-(-(len(starts) + 1) // BOUNDS) * BOUNDS, begins.size, dtype=np.int32)
    bounds[: len(starts)] = starts
    return bounds
