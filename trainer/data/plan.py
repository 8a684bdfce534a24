"""Plan of a prepared text, fixed before the first token: name, parts, split and tokenizer.

A plan is written once. Every process that shares the work, now or later, follows it, so that all of
them write the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from trainer.common.errors import Problem, UserError
from trainer.common.files import write_durably
from trainer.data.config import PIECE, SourceConfig, TokenizerConfig
from trainer.data.encoding import Thresholds, document_hash
from trainer.data.files import BadRow, File
from trainer.data.needles import WORDS
from trainer.data.shards import read_json
from trainer.data.sources import Listing, read_source
from trainer.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    tokenizer_identity,
    train_tokenizer,
    vocabulary_size,
)

RECIPE = 2
"""Number that changes whenever the same text would become other tokens."""
FORMAT = 2
"""Format of a directory with prepared text; format 1 was one Arrow data set a split."""
WITHOUT_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of file systems without hard links."""
SMALL = 64 << 20
"""Bytes of text that are read once more for a split with exact shares."""
UNIT = 1 << 30
"""Bytes of text that one process prepares at a time, roughly: a unit consists of whole files."""
BYTES_PER_TOKEN = 4
"""Estimate for English with a vocabulary of 32,000 to 128,000."""
NAMED = 10
"""Malformed rows that are named."""
SAMPLED_FILES = 16
"""Files of a large source that a tokenizer is trained on parts of."""


def request_of(
    config: SourceConfig, tokenizer_config: TokenizerConfig, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """Return the request in plain values; equal requests of one source give equal tokens.

    ``tokenizer``: used if ``tokenizer_config`` names none, instead of training one.
    """
    # Keys of later versions are named only if they are set, so that older names stay valid.
    pieces = ["piece_characters"] if config.piece_characters != PIECE else []
    patterns = ["allow_patterns"] if config.allow_patterns else []
    keys = {
        "hub": ("hub_name", "hub_config", "hub_split", "hub_files", "text_field", *pieces),
        "files": ("files", *patterns, "text_field", *pieces),
        "stdlib_docs": (),
    }.get(config.source, ("arguments",))
    split = ("min_characters", "validation", "test", "validation_tokens", "test_tokens")
    return {
        "recipe": RECIPE,
        **{key: getattr(config, key) for key in ("source", "revision", *keys, *split)},
        "tokenizer": tokenizer_identity(tokenizer_config, tokenizer, WORDS),
    }


def digest(value: Any) -> str:
    """Return eight hexadecimal digits that identify plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def request_digest(request: dict[str, Any]) -> str:
    """Return the digest of a request without its locations: the same files elsewhere are the same
    text."""
    return digest({key: value for key, value in request.items() if key != "files"})


def directory_name(request: dict[str, Any], listing: Listing) -> str:
    """Build the directory's name: a readable word, and hashes of the request and of the source's
    files."""
    first = listing.files[0].name if listing.files else request["source"]
    word = request.get("hub_config") or request.get("hub_name") or Path(first).stem
    readable = re.sub(r"[^\w.-]+", "-", str(word).rpartition("/")[2]).strip("-.")[:40].lower()
    return f"{readable or 'text'}-{request_digest(request)}-{digest(listing.identity)}"


@dataclass(frozen=True)
class Plan:
    """Division of a source into shards.

    ``units`` lists the indices of the files that are prepared together. ``tokenizer`` is JSON,
    ``end`` the id after each document, ``dtype`` the type of the ids. ``tokens`` is an estimate of
    their number (None: the source does not report its size).
    """

    request: dict[str, Any]
    files: tuple[File, ...]
    identity: dict[str, Any]
    units: tuple[tuple[int, ...], ...]
    thresholds: Thresholds
    tokenizer: str
    end: int
    dtype: Literal["<u2", "<u4"]
    tokens: int | None

    def write(self, directory: Path) -> None:
        """Write the plan, unless another process has already done so."""
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".plan.{os.uname().nodename}.{os.getpid()}.tmp"
        try:
            write_durably(temporary, json.dumps({"format": FORMAT, **asdict(self)}).encode())
            try:
                os.link(temporary, directory / "plan.json")
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in WITHOUT_LINKS:
                    raise
                if not (directory / "plan.json").exists():
                    temporary.replace(directory / "plan.json")
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, directory: Path) -> Plan:
        """Read the plan of a directory.

        Raises:
            UserError: the plan is damaged or has another version.
        """
        where = f"the plan in {str(directory)!r}"
        try:
            plan = read_json(directory / "plan.json", cls, FORMAT, where)
            Tokenizer.from_str(plan.tokenizer)
            if any(not 0 <= index < len(plan.files) for unit in plan.units for index in unit):
                raise ValueError("units: they name files that it does not have")
        except Exception as error:  # tokenizers raises bare Exception
            if isinstance(error, UserError):
                raise
            raise UserError.at(
                "data.cache_dir", f"{where} is damaged ({error}); remove the directory."
            ) from None
        return plan


def make_plan(
    config: SourceConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: TextTokenizer | None,
    listing: Listing,
) -> Plan:
    """Decide everything that the tokens depend on; small texts are read once to do so.

    ``tokenizer``: used if ``tokenizer_config`` names none, instead of training one.

    Raises:
        UserError: the text or the tokenizer cannot be read, or there is too little text.
    """
    request = request_of(config, tokenizer_config, tokenizer)
    size = sum(file.text_bytes for file in listing.files)
    small = _small(config, listing) if size <= SMALL else None
    if small is None:
        tokens = size // BYTES_PER_TOKEN or None
        thresholds = _estimated_thresholds(config, tokens)
    else:
        _check_enough(small, config, listing)
        thresholds, tokens = exact_thresholds(small, config), sum(map(len, small)) // 4
    if tokenizer_config.path:
        tokenizer = load_tokenizer(tokenizer_config.path)
    elif tokenizer is None:
        sample = iter(small) if small is not None else _sample(config, listing, tokenizer_config)
        texts = (text for text in sample if thresholds.split_of(text) == "train")
        tokenizer = TextTokenizer(train_tokenizer(texts, tokenizer_config.vocab_size, WORDS))
    return Plan(
        request,
        listing.files,
        listing.identity,
        tuple(_units(listing.files)),
        thresholds,
        tokenizer.tokenizer.to_str(),
        tokenizer.end_of_text,
        "<u2" if vocabulary_size(tokenizer.tokenizer) <= 1 << 16 else "<u4",
        tokens,
    )


def _units(files: tuple[File, ...]) -> Iterator[tuple[int, ...]]:
    unit, size = list[int](), 0
    for index, file in enumerate(files):
        if unit and size + file.text_bytes > UNIT:
            yield tuple(unit)
            unit, size = [], 0
        unit.append(index)
        size += file.text_bytes
    if unit:
        yield tuple(unit)


def rows_of(config: SourceConfig, files: Iterable[File]) -> Iterator[str | BadRow]:
    """Yield the rows of the files, in order."""
    return chain.from_iterable(read_source(config, file) for file in files)


def _documents_of(config: SourceConfig, files: Iterable[File]) -> Iterator[str]:
    """Yield the documents to prepare, without malformed, empty and short ones."""
    rows = rows_of(config, files)
    return (row for row in rows if isinstance(row, str) and is_kept(row, config))


def is_kept(text: str, config: SourceConfig) -> bool:
    """Whether a document has enough text."""
    return len(text) >= config.min_characters and not text.isspace() and bool(text)


def _small(config: SourceConfig, listing: Listing) -> list[str] | None:
    """Return all documents, or None if they exceed :data:`SMALL`."""
    documents, size = [], 0
    for text in _documents_of(config, listing.files):
        documents.append(text)
        size += len(text)
        if size > SMALL:
            return None
    return documents


def _check_enough(documents: list[str], config: SourceConfig, listing: Listing) -> None:
    """Check that there are three distinct documents; otherwise name the reasons for so few."""
    if (count := len(set(documents))) >= 3:
        return
    bad, empty, short = [], 0, 0
    for row in rows_of(config, listing.files):
        if isinstance(row, BadRow):
            bad.append(Problem("data", f"{row.place} {row.problem}."))
        elif not row or row.isspace():
            empty += 1
        elif not is_kept(row, config):
            short += 1
    why = [f"{len(bad)} rows are malformed"] if bad else []
    why += [f"{empty} are empty"] if empty else []
    why += [f"{short} have less than data.min_characters={config.min_characters}"] if short else []
    size = config.piece_characters
    pieces = "one document" if size is None else f"cut into documents of {size:,} characters"
    raise UserError(
        *bad[:NAMED],
        Problem(
            "data",
            f"too few different documents ({count}) for text to train on, data.validation and "
            f"data.test{''.join(f'; {reason}' for reason in why)}; give more: a file of plain text "
            f"is {pieces} (data.piece_characters), a line of a .jsonl is one document.",
        ),
    )


def exact_thresholds(documents: list[str], config: SourceConfig) -> Thresholds:
    """Choose hash bounds that hold out the configured shares of the characters.

    There are at least three distinct documents.
    """
    hashes = {document_hash(text): 0 for text in documents}
    for text in documents:
        hashes[document_hash(text)] += len(text)
    total = sum(hashes.values())
    tokens = max(total / BYTES_PER_TOKEN, 1)
    test = min(config.test, config.test_tokens / tokens)
    validation = min(config.validation, config.validation_tokens / tokens)
    ordered = sorted(hashes)
    before = np.cumsum([0] + [hashes[value] for value in ordered[:-1]])
    # A document longer than its split's share must leave one document for each other split.
    ends = np.searchsorted(before, np.array([1 - validation - test, 1 - test]) * total)
    first = min(max(int(ends[0]), 1), len(ordered) - 2)
    second = min(max(int(ends[1]), first + 1), len(ordered) - 1)
    return Thresholds(ordered[first], ordered[second])


def _estimated_thresholds(config: SourceConfig, tokens: int | None) -> Thresholds:
    """Derive hash bounds from the shares, limited by the token counts if the size is known."""
    test, validation = config.test, config.validation
    if tokens is not None:
        test = min(test, config.test_tokens / tokens)
        validation = min(validation, config.validation_tokens / tokens)
    return Thresholds(int((1 - validation - test) * 2**64), int((1 - test) * 2**64))


def _sample(config: SourceConfig, listing: Listing, tokenizer: TokenizerConfig) -> Iterator[str]:
    """Yield the first documents of files spread over the source."""
    count = min(SAMPLED_FILES, len(listing.files))
    chosen = [listing.files[i * len(listing.files) // count] for i in range(count)]
    most = (tokenizer.sample_megabytes << 20) // count
    for file in chosen:
        size = 0
        for text in _documents_of(config, [file]):
            yield text
            size += len(text)
            if size >= most:
                break
