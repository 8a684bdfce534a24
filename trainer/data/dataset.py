"""Training samples by number."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.common.errors import UserError
from trainer.config import DataConfig
from trainer.data.corpus import Corpus
from trainer.data.needles import NeedleVocabulary, mix_needles
from trainer.data.order import Integers, assigned, keys, quotas, sample_indices
from trainer.data.prepared import windows_at

BOUNDS = 64
"""Bounds are padded to a multiple of this number: compiled code is specialised to their number."""


class TrainingSamples:
    """Training samples by counter, each a pure function of (seed, counter), read a batch at a time.

    A sample is the token that begins sequences and one block: the training text of a part is cut
    every ``sequence_length`` tokens, and its incomplete last block omitted. Needles are mixed in if
    the configuration asks for them. Token t predicts token t + 1.
    """

    def __init__(self, corpus: Corpus, config: DataConfig, seed: int) -> None:
        self.corpus = corpus
        self.config = config
        self.seed = seed
        C = config.sequence_length
        self.blocks = [len(part.train) // C for part in corpus.parts]
        if not all(self.blocks):
            raise UserError(f"data: expected {C} tokens or more to train on in every text")
        self.quotas = quotas([part.weight for part in corpus.parts])
        # The first text is read in the same order alone and in a mixture.
        self.seeds = [seed, *(int(keys(seed, part)) for part in range(1, len(self.blocks)))]
        self.vocabulary: NeedleVocabulary | None = None
        if config.needles.share:
            self.vocabulary = NeedleVocabulary.from_tokenizer(corpus.tokenizer)

    def where(self, counters: Integers) -> tuple[Integers, Integers]:
        """Return for each sample number its part of the corpus and the block within that part."""
        parts, numbers = assigned(self.seed, counters, self.quotas)
        blocks = np.empty_like(counters)
        for part in np.unique(parts):
            mine = parts == part
            blocks[mine] = sample_indices(self.seeds[part], numbers[mine], self.blocks[part])
        return parts, blocks

    def epochs(self, samples: int) -> dict[str, float]:
        """Return how many times each part has been read after ``samples`` samples."""
        shares = np.array(self.quotas) / sum(self.quotas)
        return {
            part.name: samples * share / blocks
            for part, share, blocks in zip(self.corpus.parts, shares, self.blocks, strict=True)
        }

    def __getitems__(self, counters: list[int]) -> dict[str, Any]:
        """Return these samples as one batch of ``[B, sequence_length]`` tensors."""
        targets, weights = self.targets(np.asarray(counters, dtype=np.int64))
        first, end = self.corpus.first_token, self.corpus.end_of_text
        return as_batch(targets, first, end, weights, self.config.document_mask)

    def targets(self, numbers: Integers) -> tuple[Integers, NDArray[np.float32]]:
        """Return the tokens to predict and their loss weights, both ``[B, sequence_length]``."""
        parts, blocks = self.where(numbers)
        C = self.config.sequence_length
        targets = np.empty((len(numbers), C), np.int64)
        for part in np.unique(parts):
            mine = parts == part
            targets[mine] = windows_at(self.corpus.parts[part].train, blocks[mine] * C, C)
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
    document_mask: bool = False,
) -> dict[str, Any]:
    """Build a batch: inputs, targets and weights, all ``[B, T]``.

    The inputs are the targets shifted by one, after ``first_token``. Documents begin there and at
    every end-of-text token ``end``. With ``document_mask``, the batch also has ``documents``
    ``[B, T]``, the number of documents up to each input; ``bounds``, the starts of documents within
    the B T tokens, padded with B T to a multiple of :data:`BOUNDS`; and ``longest``, a power of two
    of at least the longest document's length.
    """
    inputs = np.concatenate([np.full_like(targets[:, :1], first_token), targets[:, :-1]], axis=1)
    batch: dict[str, Any] = {
        "input_ids": torch.from_numpy(inputs),
        "labels": torch.from_numpy(np.ascontiguousarray(targets)),
        "weights": torch.from_numpy(weights),
    }
    if document_mask:
        begins = inputs == end
        begins[:, 0] = True
        starts = np.flatnonzero(begins)
        fill = BOUNDS - len(starts) % BOUNDS
        bounds = np.pad(starts.astype(np.int32), (0, fill), constant_values=begins.size)
        batch["documents"] = torch.from_numpy(begins.cumsum(axis=1))
        batch["bounds"] = torch.from_numpy(bounds)
        batch["longest"] = 1 << int(np.diff(bounds).max() - 1).bit_length()
    return batch
