"""Tokenization of documents, and the split each one belongs to.

Worker processes import this module, so it imports little itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
LONGEST_WORK = 1 << 20
"""Characters that are tokenised at once; merging needs many times the memory of the text."""


def document_hash(text: str) -> int:
    """Return the first 64 bits of the SHA-256 of a document's UTF-8 bytes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Thresholds:
    """Smallest hashes of the validation and of the test split."""

    validation: int
    test: int

    def split_of(self, text: str) -> Split:
        """Return the split of a document; equal documents always share a split."""
        number = document_hash(text)
        if number < self.validation:
            return "train"
        return "validation" if number < self.test else "test"


@dataclass(frozen=True)
class Encoded:
    """Documents of one split: concatenated ``ids`` with an end-of-text token after each document,
    and ``lengths`` in tokens, end-of-text included."""

    ids: NDArray[Any]
    lengths: NDArray[np.uint32]


class Encoder:
    """Tokenizer of batches of documents; ``ids`` have the type ``dtype``."""

    def __init__(self, tokenizer: str, end: int, thresholds: Thresholds, dtype: str) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer)
        # Documents may contain the text of special tokens; treat it as text.
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.end, self.thresholds, self.dtype = end, thresholds, np.dtype(dtype)

    def __call__(self, texts: list[str]) -> dict[Split, Encoded]:
        """Tokenize documents; return them by split, in order, without empty splits."""
        parts = [cut(text) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        encodings = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        ids: dict[Split, list[NDArray[Any]]] = {}
        lengths: dict[Split, list[int]] = {}
        end = np.array([self.end], self.dtype)
        for text, of_text in zip(texts, parts, strict=True):
            split = self.thresholds.split_of(text)
            pieces = [np.array(next(encodings).ids, self.dtype) for _ in of_text]
            ids.setdefault(split, []).extend([*pieces, end])
            lengths.setdefault(split, []).append(sum(map(len, pieces)) + 1)
        return {
            split: Encoded(np.concatenate(ids[split]), np.array(lengths[split], np.uint32))
            for split in ids
        }


def cut(text: str) -> list[str]:
    """Split a text into parts of at most :data:`LONGEST_WORK` characters, before a space if
    possible.

    The parts are tokenized separately, so that memory does not grow with document length.
    """
    parts = []
    begin = 0
    while len(text) - begin > LONGEST_WORK:
        end = text.rfind(" ", begin + 1, begin + LONGEST_WORK)
        end = end if end > 0 else begin + LONGEST_WORK
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


_encoder: Encoder | None = None


def start_worker(*arguments: Any) -> None:
    """Create this worker's encoder; exit when the parent process exits.

    Workers ignore signals sent to the whole job, which the parent handles. They watch the parent
    because a killed parent leaves no message in the queue.
    """
    global _encoder  # noqa: PLW0603  a pool's initializer has no other place
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_reader, daemon=True).start()
    _encoder = Encoder(*arguments)


def _end_with_reader() -> None:
    reader = parent_process()
    assert reader is not None
    reader.join()
    os._exit(1)


def encode(texts: list[str]) -> dict[Split, Encoded]:
    """Tokenize a batch in a worker process."""
    assert _encoder is not None
    return _encoder(texts)
