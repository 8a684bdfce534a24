"""Documents to token ids of the split that each belongs to.

This is what the processes of a pool run, so it imports little.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from trainer.data.manifest import Split

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
LONGEST_WORK = 1 << 20
"""Characters that are tokenised at once; merging needs many times the memory of the text."""


def document_hash(text: str) -> int:
    """The first 64 bits of SHA-256 of a document's UTF-8."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Thresholds:
    """Which hashes belong to which split: from ``validation`` on, and from ``test`` on."""

    validation: int
    test: int

    def split_of(self, text: str) -> Split:
        """``train``, ``validation`` or ``test``; equal documents are always in the same one."""
        found = document_hash(text)
        if found < self.validation:
            return "train"
        return "validation" if found < self.test else "test"


@dataclass(frozen=True)
class Encoded:
    """Documents of one split: ``ids`` one after the other, an end-of-text token behind each, and
    their ``lengths`` in tokens with it."""

    ids: NDArray[Any]
    lengths: NDArray[np.uint32]


class Encoder:
    """Tokenises batches of documents; ``ids`` have the type ``dtype``."""

    def __init__(self, tokenizer: str, end: int, thresholds: Thresholds, dtype: str) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer)
        # Text may hold what looks like a special token; it is text all the same.
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.end, self.thresholds, self.dtype = end, thresholds, np.dtype(dtype)

    def __call__(self, texts: list[str]) -> dict[Split, Encoded]:
        """The documents of each split that has any, in their order."""
        parts = [cut(text) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        found = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        ids: dict[Split, list[NDArray[Any]]] = {}
        lengths: dict[Split, list[int]] = {}
        end = np.array([self.end], self.dtype)
        for text, of_text in zip(texts, parts, strict=True):
            split = self.thresholds.split_of(text)
            pieces = [np.array(next(found).ids, self.dtype) for _ in of_text]
            ids.setdefault(split, []).extend([*pieces, end])
            lengths.setdefault(split, []).append(sum(map(len, pieces)) + 1)
        return {
            split: Encoded(np.concatenate(ids[split]), np.array(lengths[split], np.uint32))
            for split in ids
        }


def cut(text: str) -> list[str]:
    """A text in parts of at most :data:`LONGEST_WORK` characters, cut in front of a space where
    there is one: the parts are tokenised alone, so that memory does not grow with a document."""
    parts = []
    begin = 0
    while len(text) - begin > LONGEST_WORK:
        end = text.rfind(" ", begin + 1, begin + LONGEST_WORK)
        end = end if end > 0 else begin + LONGEST_WORK
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]] if parts else [text]


_encoder: Encoder | None = None


def start_worker(*arguments: Any) -> None:
    """Make the encoder of this process, which ends when the one that reads ends.

    Signals that all processes of a job get are for the reader to answer; when it is killed, the
    queue between them would never say so.
    """
    global _encoder  # noqa: PLW0603  a pool's initializer has no other place
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core, not all cores each
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
    """What a process of the pool does with a batch."""
    assert _encoder is not None
    return _encoder(texts)
