"""Tokenization of documents, and the split each one belongs to.

Worker processes import this module, so it imports little itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from multiprocessing import parent_process
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
LONGEST_WORK = 1 << 20
"""Characters that are tokenized at once; merging needs many times the memory of the text."""


def document_hash(text: str) -> int:
    """Return the first 64 bits of the SHA-256 of a document's UTF-8 bytes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(text: str, bounds: tuple[int, int]) -> Split:
    """Return the split of a document; equal documents always share a split.

    ``bounds``: the smallest hashes of the validation and of the test split.
    """
    number = document_hash(text)
    if number < bounds[0]:
        return "train"
    return "validation" if number < bounds[1] else "test"


class Encoder:
    """Tokenizer of batches of documents; ``end`` is the id after each, ``dtype`` that of the
    ids."""

    def __init__(self, tokenizer: str, end: int, bounds: tuple[int, int], dtype: str) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer)
        # Documents may contain the text of special tokens; treat it as text.
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.end, self.bounds, self.dtype = end, bounds, np.dtype(dtype)

    def __call__(self, texts: list[str]) -> dict[Split, NDArray[Any]]:
        """Return the ids of the documents of each split, each document with ``end`` behind it."""
        parts = [cut(text, LONGEST_WORK) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        encodings = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        ids: dict[Split, list[NDArray[Any]]] = {}
        end = np.array([self.end], self.dtype)
        for text, of_text in zip(texts, parts, strict=True):
            of_split = ids.setdefault(split_of(text, self.bounds), [])
            of_split += [np.array(next(encodings).ids, self.dtype) for _ in of_text]
            of_split.append(end)
        return {split: np.concatenate(of_split) for split, of_split in ids.items()}


def cut(text: str, longest: int) -> list[str]:
    """Split a text into parts of at most ``longest`` characters, before a space if possible."""
    parts = []
    begin = 0
    while len(text) - begin > longest:
        end = text.rfind(" ", begin + 1, begin + longest)
        end = end if end > 0 else begin + longest
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


def encode(texts: list[str]) -> dict[Split, NDArray[Any]]:
    """Tokenize a batch in a worker process."""
    assert _encoder is not None
    return _encoder(texts)
