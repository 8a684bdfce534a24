"""Documents become a tokenizer and packed token blocks in memory-mapped Arrow, once.

The prepared corpus lies in a directory named after a hash of everything that shaped it, so that it
is made once and never stale; it appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from tokenizers import Tokenizer

from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.needles import WORDS
from trainer.data.order import Integers
from trainer.data.sources import read_documents
from trainer.data.tokenizer import end_of_text, load_tokenizer, train_tokenizer
from trainer.errors import UserError
from trainer.formats import check_format

SPLITS = ("train", "validation", "test")
FORMAT = 1
"""Of a directory with prepared text: ``tokenizer.json``, and the splits as Arrow data sets."""
FORMAT_FILE = "format.json"
RECIPE = "0.1.0"
"""Names how text becomes tokens, and changes only where the same text would become others.

It is a part of every fingerprint, where the first version of this program had its own number. With
that number, text that was prepared and runs that began then are still found."""


class TokenStream:
    """One split: a stream of tokens stored in blocks of equal length."""

    def __init__(self, path: Path) -> None:
        column = datasets.load_from_disk(str(path)).data.column("input_ids")
        # Views into the memory map; nothing is read until it is used.
        self._chunks = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in column.chunks]
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])

    def __len__(self) -> int:
        """Tokens in the stream."""
        return int(self._starts[-1])

    def windows(self, starts: Integers, length: int) -> Integers:
        """``[len(starts), length]`` tokens; a window may cross blocks."""
        return np.stack([self._window(int(start), length) for start in starts]).astype(np.int64)

    def _window(self, start: int, length: int) -> Integers:
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        offset = start - self._starts[first]
        parts = [self._chunks[first][offset : offset + length]]
        while (have := sum(map(len, parts))) < length:
            first += 1
            parts.append(self._chunks[first][: length - have])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the three splits; ``fingerprint`` names what they were made of."""

    tokenizer: Tokenizer
    end_of_text: int
    train: TokenStream
    validation: TokenStream
    test: TokenStream
    fingerprint: str


def cache_directory(config: DataConfig) -> Path:
    """Where prepared data lies: ``data.cache_dir``, ``$UNROPE_CACHE``, or the user's cache."""
    if config.cache_dir:
        return Path(config.cache_dir)
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("UNROPE_CACHE", Path(home) / "unrope"))


def prepare_corpus(
    config: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Read, split, tokenise and pack the configured text, or open what was prepared before.

    ``tokenizer``: one to use where ``tokenizer_config`` names none, instead of training one.

    Raises:
        UserError: the text or tokenizer cannot be read, the text is too short, or a newer version
            of this program prepared it.
    """
    given = load_tokenizer(tokenizer_config.path) if tokenizer_config.path else tokenizer
    documents = read_documents(config)
    recipe = [
        RECIPE,
        config.sequence_length,
        config.validation,
        config.test,
        given.to_str() if given else tokenizer_config.vocab_size,
        WORDS,
    ]
    digest = hashlib.sha256(json.dumps(recipe).encode())
    for document in documents:
        digest.update(document.encode() + b"\0")
    fingerprint = digest.hexdigest()[:16]
    directory = cache_directory(config) / "corpora" / fingerprint
    _check_format(directory)
    if not directory.is_dir():
        _prepare(documents, config, given, tokenizer_config.vocab_size, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    streams = {split: TokenStream(directory / split) for split in SPLITS}
    return Corpus(tokenizer, end_of_text(tokenizer), fingerprint=fingerprint, **streams)


def _prepare(
    documents: list[str],
    config: DataConfig,
    given: Tokenizer | None,
    vocab_size: int,
    directory: Path,
) -> None:
    splits = split_documents(documents, config.validation, config.test)
    tokenizer = given or train_tokenizer(splits["train"], vocab_size, WORDS)
    end = end_of_text(tokenizer)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".partial-"))
    try:
        (partial / FORMAT_FILE).write_text(json.dumps({"format": FORMAT}) + "\n")
        tokenizer.save(str(partial / "tokenizer.json"))
        for split, texts in splits.items():
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
            blocks = pack([e.ids for e in encoded], end, config.sequence_length)
            if not len(blocks):
                raise UserError(
                    f"data: the {split} split holds fewer tokens than one sequence of "
                    f"{config.sequence_length}; give more text (a line of a .jsonl is never cut), "
                    "larger data.validation and data.test, or a shorter data.sequence_length."
                )
            rows = datasets.Dataset.from_dict({"input_ids": blocks.astype(np.int32)})
            _save(rows, partial / split)
        _publish(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_format(directory: Path) -> None:
    """Refuse text that a newer version prepared; without a number it has the first format."""
    path = directory / FORMAT_FILE
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_bytes())["format"]
    except (ValueError, KeyError, TypeError):
        found = None
    where = f"data.cache_dir: the prepared text in {str(directory)!r}"
    check_format(found, FORMAT, where, "remove it to have it prepared again")


def _save(rows: datasets.Dataset, path: Path) -> None:
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows.save_to_disk(str(path))
    finally:
        if shown:
            datasets.enable_progress_bars()


def _publish(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError:
        if not directory.is_dir():  # another process has prepared the same corpus meanwhile
            raise


def split_documents(documents: list[str], validation: float, test: float) -> dict[str, list[str]]:
    """Cut the list of documents so that each split has its share of the characters.

    A document that crosses a boundary belongs to the split it begins in; every document is in one
    split.
    """
    lengths = np.array([len(document) for document in documents])
    begins = (lengths.cumsum() - lengths) / max(lengths.sum(), 1)
    first, second = np.searchsorted(begins, [1 - validation - test, 1 - test])
    return {
        "train": documents[:first],
        "validation": documents[first:second],
        "test": documents[second:],
    }


def pack(documents: list[list[int]], end: int, length: int) -> Integers:
    """``[blocks, length]``: documents one after the other, an end token after each; what does not
    fill a block at the very end is left out."""
    stream = np.concatenate(
        [np.array([*document, end], dtype=np.int64) for document in documents]
        or [np.empty(0, np.int64)]
    )
    return stream[: len(stream) // length * length].reshape(-1, length)
