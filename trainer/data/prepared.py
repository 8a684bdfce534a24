"""Prepared text on disk: find it, check it against its manifest, and open it."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from trainer.common.errors import UserError, is_transient, os_reason
from trainer.data.config import PIECE, DataConfig
from trainer.data.encoding import SPLITS
from trainer.data.files import kind_of
from trainer.data.plan import FORMAT, digest, request_digest
from trainer.data.shards import FlatFile, Manifest, Place, TokenStream, read_json
from trainer.data.tokenizer import TextTokenizer, vocabulary_size


@dataclass(frozen=True)
class Prepared:
    """One text: its tokenizer, the id after each document, its splits, and its manifest."""

    directory: Path
    tokenizer: Tokenizer
    end_of_text: int
    train: TokenStream
    validation: TokenStream
    test: TokenStream
    manifest: Manifest

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer for another text with the same token after each document."""
        return TextTokenizer(self.tokenizer, (self.end_of_text,))

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change whenever the tokens change."""
        return request_digest(self.manifest.request) + digest(self.manifest.source)

    @property
    def piece_characters(self) -> int | None:
        """Characters of the documents that its plain text was cut into; None if it has no such
        documents."""
        names = (str(name) for name, *_ in self.manifest.source.get("files", []))
        if not any(kind_of(name)[0] == ".txt" for name in names):
            return None
        return self.manifest.request.get("piece_characters", PIECE)


def cache_directory(config: DataConfig) -> Path:
    """Return the directory of prepared data: ``data.cache_dir``, ``$UNROPE_CACHE`` or the user's
    cache."""
    if config.cache_dir:
        return Path(config.cache_dir)
    # An empty variable would mean the current directory: treat it as unset.
    if from_environment := os.environ.get("UNROPE_CACHE"):
        return Path(from_environment)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unrope"


def is_prepared(directory: Path) -> bool:
    """Whether a text is complete."""
    # also False for a name that is too long; writing reports that
    return os.path.isfile(directory / "manifest.json")  # noqa: PTH113


def is_planned(directory: Path) -> bool:
    """Whether preparation of a text has begun."""
    return (directory / "plan.json").is_file()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a directory.

    Raises:
        UserError: there is no prepared text, or it is damaged or of another version.
    """
    where = f"the prepared text in {str(directory)!r}"
    try:
        return read_json(directory / "manifest.json", Manifest, FORMAT, where)
    except FileNotFoundError:
        if is_planned(directory):
            more = "was not finished; the command that began it goes on"
        elif directory.is_dir():
            more = "has no manifest.json; `python -m trainer prepare` writes such a directory"
        else:
            more = "does not exist; `python -m trainer prepare` writes such a directory"
        raise UserError.at("data", f"{where} {more}.") from None
    except (OSError, ValueError) as error:
        raise UserError.at(
            "data",
            f"{where} is damaged: its manifest cannot be read ({error}); remove the directory and "
            "prepare it again.",
            transient=is_transient(error),
        ) from None


def open_prepared(directory: Path) -> Prepared:
    """Open a text; sizes of shards are checked now, their contents read on use.

    Raises:
        UserError: something is missing or damaged.
    """
    manifest = read_manifest(directory)
    where = f"the prepared text in {str(directory)!r} is damaged"
    again = "remove the directory and prepare it again"
    end = manifest.end_of_text
    try:
        text = (directory / "tokenizer.json").read_bytes()
    except OSError as error:
        message = f"{where}: tokenizer.json: {os_reason(error)}; {again}."
        raise UserError.at("data", message, transient=is_transient(error)) from None
    if hashlib.sha256(text).hexdigest() != manifest.tokenizer_sha256:
        raise UserError.at("data", f"{where}: tokenizer.json is not what was written; {again}.")
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError.at("data", f"{where}: tokenizer.json: {error}; {again}.") from None
    vocabulary = vocabulary_size(tokenizer)
    if end >= vocabulary or tokenizer.id_to_token(end) is None:
        raise UserError.at("data", f"{where}: end_of_text is {end}, which is no token; {again}.")
    places = {
        split: [
            Place(directory, shard, manifest.dtype, vocabulary)
            for shard in manifest.shards.get(split, [])
        ]
        for split in SPLITS
    }
    files = [
        file for split in SPLITS for place in places[split] for file in (place.ids, place.ends)
    ]
    if problems := list(filter(None, (file.size_problem() for file in files))):
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UserError.at("data", f"{where}: {problems[0]}{more}; {again}.")
    streams = {split: TokenStream(places[split]) for split in SPLITS}
    return Prepared(directory, tokenizer, end, manifest=manifest, **streams)


def verify(prepared: Prepared, threads: int) -> list[str]:
    """Compare all files with the manifest's checksums; return a clause for each that differs."""
    streams = (prepared.train, prepared.validation, prepared.test)
    files = [file for stream in streams for place in stream.places for file in place.files]
    with ThreadPoolExecutor(threads) as pool:
        return list(filter(None, pool.map(FlatFile.problem, files)))
