"""Prepared text: a directory with one flat file of token ids for each split.

``train.bin``, ``validation.bin`` and ``test.bin`` hold little-endian ``uint16`` or ``uint32`` ids
without header, an end-of-text token after each document. ``manifest.json`` says what they are;
while text is prepared, it says up to where they are complete. ``tokenizer.json`` made them.
"""

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from filelock import FileLock
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import ConfigDict
from tokenizers import Encoding, Tokenizer
from tqdm import tqdm

from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.common.files import expecting, write_atomically
from trainer.config import DataConfig
from trainer.data.checksums import Checksums, check_once, checksums
from trainer.data.needles import WORDS
from trainer.data.order import Integers
from trainer.data.readers import LONGEST
from trainer.data.sources import cache_directory, digest, documents, revision_of, source_of
from trainer.data.tokenizer import (
    SAMPLE_MEGABYTES,
    SpecialTokens,
    TokenizerChoice,
    load_tokenizer,
    special_tokens,
    tokenizer_identity,
    train_tokenizer,
    vocabulary_size,
)
from trainer.interchange.published import tokenizer_from_file

log = logging.getLogger(__name__)

Ids = NDArray[Any]
"""Token ids ``[tokens]``, of the smallest type that holds the vocabulary."""
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
FORMAT = 4
MEASURED_CHARACTERS = 256 << 20
"""Characters up to which a text is read once more, to hold out exact shares of it."""
FEWEST_PIECES = 100
"""A text of fewer documents than this is cut into about as many parts."""
FEW_DOCUMENTS = 10
"""Documents below which a held-out split is said to be small."""
COUNTED_TOKENS = 1 << 24
"""Tokens of a held-out split after which its documents are counted no further: they are enough."""
BATCH_CHARACTERS = 1 << 20
"""Characters of the documents that are tokenized together."""
TOKENS_PER_SAVE = 1 << 26
"""Tokens after which the manifest is written; an interrupted preparation resumes there."""


@dataclass
class Manifest:
    """Contents of a prepared text."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    request: dict[str, Any]
    """Everything that its tokens depend on."""
    revision: str | None
    """Commit of a dataset on the hub."""
    end_of_text: int
    """Id after each document."""
    dtype: Literal["<u2", "<u4"]
    """Type of the ids."""
    bounds: tuple[int, int]
    """Smallest document hashes of the validation and of the test split."""
    longest: int = LONGEST
    """Characters of the longest document."""
    read: int = 0
    """Documents that the files hold; the parts of one that was cut count each."""
    tokens: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Tokens of each split."""
    is_complete: bool = False
    """Whether the files hold the whole text."""
    checksums: Checksums = field(default_factory=dict)
    """Checksums of the complete files; older versions wrote none."""

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read the manifest of a directory; raise a UserError if it is damaged, or of another
        format."""
        path = directory / "manifest.json"
        content = f"the manifest of a prepared text; remove {directory} and prepare it again"
        with expecting(content, path):
            values = json.loads(path.read_bytes())
            checksum = values.pop("checksum", None)  # older versions wrote none
            if checksum is not None and checksum != digest(values):
                raise ValueError("its checksum differs")
            manifest = adapter(cls).validate_python(values)
        if manifest.request.get("format") != FORMAT:
            raise UserError(f"{directory}: expected prepared text of format {FORMAT}")
        return manifest

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change whenever the tokens change."""
        return digest([self.request, self.revision, self.tokens])

    def save(self, directory: Path) -> None:
        """Write the manifest, with a checksum of its contents."""
        values = asdict(self)
        values["checksum"] = digest(values)
        write_atomically(directory / "manifest.json", json.dumps(values))


@dataclass(frozen=True, eq=False)
class Prepared:
    """One text: the ids of its splits, mapped from files, and its tokenizer.

    ``fingerprint``: that of the manifest. ``name``, ``weight``: of the text in a mixture.
    """

    directory: Path
    special: SpecialTokens
    train: Ids
    validation: Ids
    test: Ids
    fingerprint: str
    name: str
    weight: float

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle no ids: another process maps the files itself."""
        return open_prepared, (self.directory, self.name, self.weight)


def is_prepared(directory: Path) -> bool:
    """Whether a text is complete."""
    return (directory / "manifest.json").is_file() and Manifest.load(directory).is_complete


def open_prepared(
    directory: Path, name: str = "text", weight: float = 1.0, cache: Path | None = None
) -> Prepared:
    """Open a text; its tokens are read on use.

    ``cache``: directory that remembers the texts that each machine has checked; None: check none.

    Raises:
        UserError: it is incomplete or damaged, or a file has another length.
        FileNotFoundError: a file is missing.
    """
    manifest = Manifest.load(directory)
    if not manifest.is_complete:
        raise UserError(f"{directory}: expected complete prepared text, got {manifest.tokens}")
    if cache is not None:
        check_once(directory, manifest.checksums, cache)
    tokenizer = tokenizer_from_file(directory / "tokenizer.json")

    def ids(split: Split) -> Ids:
        path = directory / f"{split}.bin"
        dtype = manifest.dtype
        count = manifest.tokens[split]
        if path.stat().st_size != count * np.dtype(dtype).itemsize:
            raise UserError(f"{path}: expected {count} tokens; prepare the text again")
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)

    train, validation, test = map(ids, SPLITS)
    special = special_tokens(tokenizer, end=manifest.end_of_text)
    fingerprint = manifest.fingerprint
    return Prepared(directory, special, train, validation, test, fingerprint, name, weight)


def windows_at(ids: Ids, starts: Integers, length: int) -> Integers:
    """Return ``[len(starts), length]`` ids."""
    return sliding_window_view(ids, length)[starts].astype(np.int64)


def request_of(config: DataConfig, tokenizer: TokenizerChoice) -> dict[str, Any]:
    """Return everything that the tokens depend on; equal requests give equal tokens."""
    source = source_of(config)
    keys = "source", "revision", *source.keys, "validation", "test"
    return {
        "format": FORMAT,
        **{key: getattr(config, key) for key in keys},
        "state": source.state(config),
        "tokenizer": tokenizer_identity(tokenizer, WORDS),
    }


def directory_of(config: DataConfig, tokenizer: TokenizerChoice, wanted: str | None = None) -> Path:
    """Return the directory of a text, prepared or not.

    ``wanted``: fingerprint of a prepared text that is used even if its source has changed.
    """
    if config.prepared:
        return Path(config.prepared)
    root = cache_directory(config) / f"corpora-{FORMAT}"
    if wanted is not None:
        for path in sorted(root.glob("*/manifest.json")):
            with suppress(UserError, OSError):  # another text, damaged
                if Manifest.load(path.parent).fingerprint == wanted:
                    return path.parent
    request = request_of(config, tokenizer)
    word = config.hub_name or Path((config.files or [config.source])[0]).stem
    readable = re.sub(r"[^\w.-]+", "-", word.rpartition("/")[2]).strip("-.")[:40].lower()
    return root / f"{readable or 'text'}-{digest(request)}"


def prepare(config: DataConfig, tokenizer: TokenizerChoice) -> Path:
    """Prepare a text or the rest of it, unless it is complete; return its directory. Raise a
    UserError if there are fewer than three different documents, or nothing would be trained on."""
    if config.validation + config.test >= 1 or not config.validation or not config.test:
        raise UserError(
            "data.validation, data.test: expected shares above 0 and of less than 1 together, "
            f"got {config.validation:g} and {config.test:g}"
        )
    directory = directory_of(config, tokenizer)
    if config.prepared or is_prepared(directory):
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / "lock"):
        if not is_prepared(directory):
            log.info("Preparing %s in %s", source_of(config).title(config), directory)
            if not (directory / "manifest.json").is_file():
                _begin(directory, config, tokenizer)
            _write(directory, config)
            warn_of_splits(open_prepared(directory), config)
    return directory


def warn_of_splits(text: Prepared, config: DataConfig) -> None:
    """Warn of held-out splits of few documents, or of another size than wanted."""
    total = len(text.train) + len(text.validation) + len(text.test)
    for name in ("validation", "test"):
        ids, share = getattr(text, name), getattr(config, name)
        actual = len(ids) / total
        if abs(actual - share) > share / 2:
            log.warning(
                f"data.{name}: expected {share:.2g} of the text, got {actual:.2g}: "
                "a document is in one split as a whole"
            )
        count = np.count_nonzero(ids[:COUNTED_TOKENS] == text.special.end)
        if count < FEW_DOCUMENTS:
            problem = f"data.{name}: the {name} split has only {count} documents: raise its share"
            log.warning(problem)


def shared_tokenizer(tokenizer: TokenizerChoice, directory: Path, cache: Path) -> TokenizerChoice:
    """Return the tokenizer of a run's other texts: one that was trained on the first text, which is
    prepared in ``directory``, is used for all. ``cache``: as for :func:`open_prepared`."""
    if isinstance(tokenizer, SpecialTokens) or tokenizer.path:
        return tokenizer
    return open_prepared(directory, cache=cache).special


def _begin(directory: Path, config: DataConfig, tokenizer: TokenizerChoice) -> None:
    """Choose how documents are cut and split, and write the tokenizer and the first manifest."""
    request = request_of(config, tokenizer)
    revision = revision_of(config)
    sizes = [len(text) for text in islice(documents(config, revision), FEWEST_PIECES)]
    longest = LONGEST
    if len(sizes) < FEWEST_PIECES:  # a long document could be more than the share of its split
        longest = min(max(sum(sizes) // FEWEST_PIECES, 1), LONGEST)

    def texts() -> Iterator[str]:
        return cut(documents(config, revision), longest)

    bounds = split_bounds(texts(), config.validation, config.test)
    if isinstance(tokenizer, SpecialTokens):
        tokens = tokenizer
    elif tokenizer.path:
        tokens = load_tokenizer(tokenizer.path)
    else:
        train = (text for text in texts() if split_of(text, bounds) == "train")
        sample = _up_to(train, SAMPLE_MEGABYTES << 20)
        tokens = special_tokens(train_tokenizer(sample, tokenizer.vocab_size, WORDS))
    dtype: Literal["<u2", "<u4"] = "<u2" if vocabulary_size(tokens.tokenizer) <= 1 << 16 else "<u4"
    write_atomically(directory / "tokenizer.json", tokens.tokenizer.to_str())
    Manifest(request, revision, tokens.end, dtype, bounds, longest).save(directory)


def _up_to(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield the first texts, until they have this number of characters together."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def split_bounds(texts: Iterable[str], validation: float, test: float) -> tuple[int, int]:
    """Return the smallest document hashes of the validation and of the test split.

    They hold out these shares of the characters, and a document each, of a text of up to
    :data:`MEASURED_CHARACTERS` characters; and these shares of the documents of a longer one.
    """
    sizes: dict[int, int] = {}
    total = 0
    for text in texts:
        number = document_hash(text)
        sizes[number] = sizes.get(number, 0) + len(text)
        total += len(text)
        if total > MEASURED_CHARACTERS:
            return int((1 - validation - test) * 2**64), int((1 - test) * 2**64)
    if len(sizes) < 3:
        raise UserError(f"data: expected three different documents or more, got {len(sizes)}")
    ordered = sorted(sizes)
    before = np.cumsum([0] + [sizes[number] for number in ordered[:-1]])
    # A document longer than its split's share must leave one document for each other split.
    ends = np.searchsorted(before, np.array([1 - validation - test, 1 - test]) * total)
    first = min(max(int(ends[0]), 1), len(ordered) - 2)
    second = min(max(int(ends[1]), first + 1), len(ordered) - 1)
    return ordered[first], ordered[second]


def _write(directory: Path, config: DataConfig) -> None:
    """Tokenize the documents that the files do not hold yet, and append them."""
    manifest = Manifest.load(directory)
    dtype = np.dtype(manifest.dtype)
    end = manifest.end_of_text
    tokenizer = tokenizer_from_file(directory / "tokenizer.json")
    tokenizer.encode_special_tokens = True  # their names in a document are text
    texts = islice(cut(documents(config, manifest.revision), manifest.longest), manifest.read, None)
    unsaved = 0
    with ExitStack() as stack:
        files = {
            split: stack.enter_context((directory / f"{split}.bin").open("ab")) for split in SPLITS
        }
        for split, file in files.items():
            size = manifest.tokens[split] * dtype.itemsize
            if file.tell() < size:
                raise UserError(f"{file.name}: shorter than its record; remove {directory}")
            file.truncate(size)  # what an interrupted preparation wrote after its record
        often = 1 if sys.stderr.isatty() else 60
        bar = stack.enter_context(tqdm(unit=" tokens", unit_scale=True, delay=2, mininterval=often))

        def save() -> None:
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
            manifest.save(directory)

        for batch, encodings in _tokenized(tokenizer, texts):
            for text, encoding in zip(batch, encodings, strict=True):
                split = split_of(text, manifest.bounds)
                ids = np.array([*encoding.ids, end], dtype)
                files[split].write(ids.data)
                manifest.tokens[split] += len(ids)
                unsaved += len(ids)
                bar.update(len(ids))
            manifest.read += len(batch)
            if unsaved > TOKENS_PER_SAVE:
                unsaved = 0
                save()
        save()
    names = ["tokenizer.json", *(f"{split}.bin" for split in SPLITS)]
    manifest.checksums = checksums(directory / name for name in names)
    manifest.is_complete = True
    manifest.save(directory)


def _tokenized(
    tokenizer: Tokenizer, texts: Iterable[str]
) -> Iterator[tuple[list[str], list[Encoding]]]:
    """Yield batches of documents and their encodings.

    `tokenizers` encodes a batch on all cores while the caller works on the batch before.
    """
    encode = partial(tokenizer.encode_batch_fast, add_special_tokens=False)
    with ThreadPoolExecutor(1) as thread:
        jobs = ((batch, thread.submit(encode, batch)) for batch in _batches(texts))
        next_job = next(jobs, None)
        while next_job is not None:
            batch, encodings = next_job
            next_job = next(jobs, None)
            yield batch, encodings.result()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group documents into batches of about :data:`BATCH_CHARACTERS` characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


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


def cut(texts: Iterable[str], longest: int) -> Iterator[str]:
    """Split texts into parts of at most ``longest`` characters, before a space if possible."""
    for text in texts:
        begin = 0
        while len(text) - begin > longest:
            end = text.rfind(" ", begin + 1, begin + longest)
            end = end if end > 0 else begin + longest
            yield text[begin:end]
            begin = end
        yield text[begin:]
