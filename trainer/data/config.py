"""The ``data`` and ``tokenizer`` configuration groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from pydantic import ValidationError

from trainer.common.errors import Problem, did_you_mean
from trainer.data.order import PERIOD
from trainer.formats import adapter

LARGEST_VOCABULARY = 1_000_000
"""Entries of a tokenizer that is trained here."""


@dataclass(frozen=True)
class NeedlesConfig:
    """Key-value statements mixed into training sequences, in the form that the evaluation uses.

    ``share``: of the training sequences carry them. ``names``, ``mentions``: smallest and largest
    number of different names, and of statements in all, in a sequence. ``weight``: of a value that
    was stated before, in the loss; everything else weighs 1.
    """

    share: float = 0.0
    names: tuple[int, int] = (2, 5)
    mentions: tuple[int, int] = (2, 20)
    weight: float = 10.0

    def problems(self, sequence_length: int) -> list[Problem]:
        """What is impossible in sequences of that length, one sentence each."""
        if not 0 <= self.share <= 1:
            return [
                Problem("data.needles.share", f"expected a share from 0 to 1, got {self.share}.")
            ]
        found = [
            Problem(
                f"data.needles.{key}",
                f"expected smallest and largest, 1 <= smallest <= largest, got {list(value)}.",
            )
            for key in ("names", "mentions")
            if not 1 <= (value := getattr(self, key))[0] <= value[1]
        ]
        if not found and self.share and 3 * self.mentions[1] >= sequence_length:
            found.append(
                Problem(
                    "data.needles.mentions",
                    f"{self.mentions[1]} statements of 3 tokens do not fit data.sequence_length "
                    f"{sequence_length}; at most {(sequence_length - 1) // 3}.",
                )
            )
        if not self.weight > 0:
            found.append(
                Problem("data.needles.weight", f"expected a positive number, got {self.weight}.")
            )
        return found


@dataclass(frozen=True)
class SourceConfig:
    """Where text comes from, and which of it is held out: what prepared text is made of.

    ``source``: ``stdlib_docs`` (docstrings and help topics of the running Python), ``files``
    (``.txt``, ``.jsonl``, ``.parquet``, ``.arrow``, also with ``.gz`` or ``.zst``), ``hub`` (a
    dataset of the Hugging Face hub), or one that a plugin registers. ``files``: files, directories
    or globs, on this machine or behind any address that fsspec opens (``s3://``, ``gs://``), or
    ``@LIST``, a file with one address a line. ``allow_patterns``: globs; of a list, only addresses
    that match one of them (none: all). ``hub_files``: globs in the dataset's repository, where its
    own description of its files is not wanted. ``revision``: of the dataset; for other sources, any
    text that tells two states apart. ``text_field``: the key that holds the text of a row.
    ``min_characters``: shorter documents are left out. ``bad_rows``: share of the rows that may be
    malformed (null: 0 for local files, 0.001 for others). ``validation``, ``test``: shares of the
    text kept out of training, the first for fitting and the drop's effect, the second for reported
    figures; ``validation_tokens``, ``test_tokens``: about how many at most. ``arguments``: of a
    plugin's source. ``about``: what the text is and how large, for whoever has to fetch it.
    """

    source: str = "stdlib_docs"
    files: list[str] = field(default_factory=list)
    allow_patterns: list[str] = field(default_factory=list)
    hub_name: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    hub_files: list[str] = field(default_factory=list)
    revision: str | None = None
    text_field: str = "text"
    min_characters: int = 0
    bad_rows: float | None = None
    validation: float = 0.03
    test: float = 0.07
    validation_tokens: int = 10_000_000
    test_tokens: int = 10_000_000
    arguments: dict[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def allowed_bad(self) -> float:
        """Share of the rows that may be malformed."""
        if self.bad_rows is not None:
            return self.bad_rows
        return 0.001 if self.source == "hub" else 0.0

    def source_problems(self, at: str) -> list[Problem]:
        """What is impossible; ``at`` is how the keys begin."""
        found = []
        if self.source == "files" and not self.files:
            found.append(Problem(f"{at}.files", f"{at}.source is 'files', but no file is named."))
        found += [
            Problem(
                f"{at}.files",
                "an address with a password in it would be written into every run; leave it to "
                "the environment or ~/.netrc.",
            )
            for path in self.files
            if re.match(r"@?\w+(::\w+)*://[^/@]*:[^/@]*@", path)
        ]
        if self.allow_patterns and not any(path.startswith("@") for path in self.files):
            found.append(
                Problem(
                    f"{at}.allow_patterns",
                    f"they choose from a list, and {at}.files names none, as @LIST does; a glob "
                    "may stand there itself.",
                )
            )
        if self.source == "hub" and not self.hub_name:
            found.append(
                Problem(f"{at}.hub_name", f"{at}.source is 'hub', but no dataset is named.")
            )
        if not (0 < self.validation < 1 and 0 < self.test < 1 and self.validation + self.test < 1):
            found.append(
                Problem(
                    f"{at}.validation",
                    "expected positive shares that, with those of test, leave documents to train "
                    f"on, got {self.validation} and {self.test}.",
                )
            )
        found += [
            Problem(f"{at}.{key}", f"expected 1 or more tokens, got {getattr(self, key)}.")
            for key in ("validation_tokens", "test_tokens")
            if getattr(self, key) < 1
        ]
        if self.min_characters < 0:
            found.append(
                Problem(f"{at}.min_characters", f"expected 0 or more, got {self.min_characters}.")
            )
        if self.bad_rows is not None and not 0 <= self.bad_rows <= 1:
            found.append(
                Problem(f"{at}.bad_rows", f"expected a share from 0 to 1, got {self.bad_rows}.")
            )
        return found


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Text, and how it becomes sequences.

    ``prepared``: a directory that ``prepare`` wrote, used as it is, without its source (null: found
    by what it was made of, below ``cache_dir``). ``mixture``: several texts by name, each a
    ``weight`` and changes to the keys of the source; weights are shares of the tokens.
    ``packing``: sequences are cut from one ``stream`` of documents, or filled with whole documents
    by ``best_fit``. ``document_mask``: attention stays within a document. ``restart_positions``:
    with it, positions count from 0 in every document. ``first_token_loss``: whether the first token
    of a document, which nothing announces, counts in the loss. ``shuffle_group``: so many blocks
    that lie together are read together, for file systems that read runs faster than pieces (null:
    all are shuffled). ``num_workers``: processes that read (0: none). ``cache_dir``: where prepared
    text lies; null for ``$UNROPE_CACHE`` or the user's cache directory.
    """

    sequence_length: int = 64
    prepared: str | None = None
    mixture: dict[str, dict[str, Any]] = field(default_factory=dict)
    packing: Literal["stream", "best_fit"] = "stream"
    document_mask: bool = False
    restart_positions: bool = False
    first_token_loss: bool = True
    shuffle_group: int | None = None
    needles: NeedlesConfig = field(default_factory=NeedlesConfig)
    num_workers: int = 0
    cache_dir: str | None = None

    def source_problems(self, at: str) -> list[Problem]:
        """Nothing of a source is read where the text is prepared."""
        return [] if self.prepared else super().source_problems(at)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if not 2 <= self.sequence_length < 1 << 31:
            found.append(
                Problem(
                    "data.sequence_length",
                    f"expected 2 to 2^31 - 1 tokens, got {self.sequence_length}.",
                )
            )
        if self.num_workers < 0:
            found.append(
                Problem("data.num_workers", f"expected 0 or more, got {self.num_workers}.")
            )
        if self.shuffle_group is not None and self.shuffle_group < 1:
            found.append(
                Problem("data.shuffle_group", f"expected 1 or more, got {self.shuffle_group}.")
            )
        found += [
            Problem(f"data.{key}", "a name cannot hold a NUL character.")
            for key in ("cache_dir", "prepared")
            if "\0" in (getattr(self, key) or "")
        ]
        if self.restart_positions and not self.document_mask:
            found.append(Problem("data.restart_positions", "needs data.document_mask=true."))
        if self.mixture and self.prepared:
            found.append(
                Problem("data.prepared", "one text, but data.mixture names several; name it there.")
            )
        found += self._mixture_problems() if self.mixture else self.source_problems("data")
        return found + self.needles.problems(self.sequence_length)

    def _mixture_problems(self) -> list[Problem]:
        found = []
        keys = [*(f.name for f in fields(SourceConfig)), "prepared", "weight"]
        weights: dict[str, float] = {}
        for name, changes in self.mixture.items():
            at = f"data.mixture.{name}"
            if not isinstance(changes, Mapping):
                found.append(
                    Problem(at, f"expected a weight and a source's keys, got {changes!r}.")
                )
                continue
            unknown = [key for key in changes if key not in keys]
            found += [
                Problem(f"{at}.{key}", "unknown key.", did_you_mean(str(key), keys))
                for key in unknown
            ]
            weight = changes.get("weight", 1.0)
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not 0 < weight < float("inf"):
                found.append(
                    Problem(f"{at}.weight", f"expected a positive number, got {weight!r}.")
                )
            else:
                weights[name] = weight
            own = {k: v for k, v in changes.items() if k in keys and k != "weight"}
            try:
                adapter(DataConfig).validate_python(own)
            except ValidationError as error:
                found += [
                    Problem(
                        f"{at}.{e['loc'][0]}",
                        f"got {e['input']!r}; {e['msg'][0].lower()}{e['msg'][1:]}.",
                    )
                    for e in error.errors()
                ]
            else:
                found += [] if unknown else self.of(name).source_problems(at)
        least = sum(weights.values()) / PERIOD
        return found + [
            Problem(
                f"data.mixture.{name}.weight",
                f"{weight:g} is less than one of {PERIOD:,} samples, in which shares are exact; "
                f"give {least:.2g} or more.",
            )
            for name, weight in weights.items()
            if weight < least
        ]

    def of(self, name: str) -> DataConfig:
        """The configuration of one text of the mixture."""
        changes = {key: value for key, value in self.mixture[name].items() if key != "weight"}
        return replace(self, mixture={}, **changes)

    @property
    def texts(self) -> dict[str, tuple[DataConfig, float]]:
        """Every text by name, with its weight; one alone is called ``text``."""
        if not self.mixture:
            return {"text": (self, 1.0)}
        return {
            name: (self.of(name), float(changes.get("weight", 1.0)))
            for name, changes in self.mixture.items()
        }


@dataclass(frozen=True)
class TokenizerConfig:
    """``path``: a ``tokenizer.json``, a ``.gguf`` or a model on the hub; null trains a byte-level
    BPE of ``vocab_size`` on ``sample_megabytes`` of the training text."""

    path: str | None = None
    vocab_size: int = 1024
    sample_megabytes: int = 64

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = []
        if self.path == "":
            found.append(
                Problem("tokenizer.path", "expected a file, or null to train one, got ''.")
            )
        if self.path is None and not 257 <= self.vocab_size <= LARGEST_VOCABULARY:
            found.append(
                Problem(
                    "tokenizer.vocab_size",
                    f"expected 257 entries, which hold every byte, to {LARGEST_VOCABULARY:,}; got "
                    f"{self.vocab_size}.",
                )
            )
        if self.sample_megabytes < 1:
            found.append(
                Problem(
                    "tokenizer.sample_megabytes",
                    f"expected 1 or more, got {self.sample_megabytes}.",
                )
            )
        return found
