"""The ``data``, ``tokenizer`` and ``prepare`` configuration groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Annotated, Any

from pydantic import Field

from trainer.common.errors import Problem, listed
from trainer.common.fields import (
    Count,
    FreeForm,
    Integer,
    Natural,
    OptionalText,
    Positive,
    Share,
    configuration,
    validated,
)

PERIOD = 10_000
"""Samples in which each text of a mixture has exactly its share."""
LARGEST_VOCABULARY = 1_000_000
"""Entries of a tokenizer that is trained here."""
MOST_NAMES = 16
"""Different names that statements can have; :data:`trainer.data.needles.NAMES` lists them."""


Part = Annotated[Positive, Field(lt=1)]
"""A share of the text, neither none nor all of it."""


@configuration
class NeedlesConfig:
    """Key-value statements mixed into training sequences, in the form that the evaluation uses."""

    share: Share = 0.0
    """Share of the training sequences that carry statements."""
    names: tuple[Count, Count] = (2, 5)
    """Least and most different names in a sequence."""
    mentions: tuple[Count, Count] = (2, 20)
    """Least and most statements in a sequence."""
    weight: Positive = 10.0
    """Weight in the loss of a value that was stated before; other tokens have 1."""
    changes: Share = 0.0
    """Share of the mentions after a name's first that state a new number, which holds from then
    on. Above 0 the content of statements does not suffice: their order decides."""

    @listed
    def problems(self, sequence_length: int) -> Iterator[Problem]:
        """Check the values for sequences of this length."""
        for key, (least, most) in (("names", self.names), ("mentions", self.mentions)):
            if least > most:
                yield Problem(
                    f"data.needles.{key}", f"expected smallest and largest, got {[least, most]}."
                )
        if self.names[1] > MOST_NAMES:
            yield Problem(
                "data.needles.names", f"expected at most {MOST_NAMES}, got {self.names[1]}."
            )
        if self.share and 3 * self.mentions[1] >= sequence_length:
            yield Problem(
                "data.needles.mentions",
                f"{self.mentions[1]} statements of 3 tokens do not fit data.sequence_length "
                f"{sequence_length}; at most {(sequence_length - 1) // 3}.",
            )


@configuration
class SourceConfig:
    """Source of text, and which of it is held out; together they determine prepared text."""

    source: str = "stdlib_docs"
    """Where text comes from: stdlib_docs (docstrings and help topics of the running Python),
    files, hub, or a source that a plugin registers."""
    files: list[str] = field(default_factory=list)
    """Files of the source files (.txt, .md, .rst, .jsonl, .csv, .parquet, .arrow, also compressed):
    paths, directories or globs, here or at s3://, gs://, https://; @LIST is a file with one
    address a line."""
    allow_patterns: list[str] = field(default_factory=list)
    """Globs; only addresses of a list that match one of them are read. Empty: all."""
    hub_name: OptionalText = None
    """Dataset on the Hugging Face hub."""
    hub_config: OptionalText = None
    """Configuration of that dataset; null: its only one."""
    hub_split: str = "train"
    """Split of that dataset."""
    revision: OptionalText = None
    """Commit or tag of the dataset; for other sources any word that tells two states of the text
    apart."""
    text_field: str = "text"
    """Column of jsonl, csv, parquet and arrow files that holds the text."""
    validation: Part = 0.03
    """Share of the text for fitting and for the drop's effect."""
    test: Part = 0.07
    """Share of the text for reported figures."""
    arguments: FreeForm = field(default_factory=dict)
    """Arguments of a source that a plugin registers."""

    @listed
    def source_problems(self, group: str) -> Iterator[Problem]:
        """Check the source's keys, which lie in ``group``."""
        if self.source == "files" and not self.files:
            yield Problem(f"{group}.files", "expected files, got none")
        if self.source == "hub" and not self.hub_name:
            yield Problem(f"{group}.hub_name", "expected a dataset, got none")
        if self.validation + self.test >= 1:
            yield Problem(f"{group}.validation", "expected validation + test below 1")


@configuration
class MixedText(SourceConfig):
    """One text of a mixture: changes to the source of all."""

    prepared: OptionalText = None
    """Directory that `prepare` wrote, used without its source; null: found below cache_dir."""
    weight: Positive = 1.0
    """Share of the tokens, relative to the weights of the other texts."""


@configuration
class DataConfig(SourceConfig):
    """Text, and how it becomes sequences."""

    sequence_length: Annotated[Integer, Field(ge=2, lt=1 << 31)] = 64
    """Tokens of a sequence; the training length of the model."""
    prepared: OptionalText = None
    """Directory that `prepare` wrote, used without its source; null: found below cache_dir."""
    mixture: dict[str, FreeForm] = field(default_factory=dict)
    """Several texts by name, each with a weight (its share of the tokens) and changes to the
    source: {name: {weight: 0.7, hub_name: ...}, ...}."""
    document_mask: bool = False
    """Keep attention within a document."""
    restart_positions: bool = False
    """Count positions from 0 in every document; needs document_mask."""
    needles: NeedlesConfig = field(default_factory=NeedlesConfig)
    """Statements mixed into training sequences."""
    num_workers: Annotated[Natural, Field(le=1024)] = 0
    """Processes that read; 0: none."""
    cache_dir: OptionalText = None
    """Where prepared text lies; null: $UNROPE_CACHE or the user's cache directory."""

    @listed
    def problems(self) -> Iterator[Problem]:
        """Check the values."""
        if self.restart_positions and not self.document_mask:
            yield Problem("data.restart_positions", "needs document_mask=true in the same group.")
        if self.mixture and self.prepared:
            yield Problem(
                "data.prepared", "one text, but data.mixture names several; name it there."
            )
        if self.mixture:
            yield from self._mixture_problems()
        elif not self.prepared:  # the source of prepared text is not read
            yield from self.source_problems("data")
        yield from self.needles.problems(self.sequence_length)

    def _mixture_problems(self) -> Iterator[Problem]:
        weights: dict[str, float] = {}
        for name, changes in self.mixture.items():
            group = f"data.mixture.{name}"
            mixed, problems = validated(MixedText, changes)
            weights[name] = mixed.weight
            yield from (problem.under(group) for problem in problems)
            if not problems and not (text := self._mixed(changes)).prepared:
                yield from text.source_problems(group)
        least = sum(weights.values()) / PERIOD
        for name, weight in weights.items():
            if weight < least:
                yield Problem(
                    f"data.mixture.{name}.weight",
                    f"{weight:g} is less than one of {PERIOD:,} samples, in which shares are "
                    f"exact; give {least:.2g} or more.",
                )

    def _mixed(self, changes: dict[str, Any]) -> DataConfig:
        return replace(self, mixture={}, **{k: v for k, v in changes.items() if k != "weight"})

    @property
    def texts(self) -> dict[str, tuple[DataConfig, float]]:
        """Every text by name, with its weight; one alone is called ``text``."""
        if not self.mixture:
            return {"text": (self, 1.0)}
        return {
            name: (self._mixed(changes), float(changes.get("weight", 1.0)))
            for name, changes in self.mixture.items()
        }


@configuration
class TokenizerConfig:
    """The tokenizer, read from a file or trained."""

    path: OptionalText = None
    """A tokenizer.json or a model on the hub; null: train a byte-level BPE on the
    training text."""
    vocab_size: Integer = 1024
    """Entries of the tokenizer that is trained."""
    sample_megabytes: Count = 64
    """Megabytes of the training text to train it on."""

    @listed
    def problems(self) -> Iterator[Problem]:
        """Check the values."""
        if self.path == "":
            yield Problem("tokenizer.path", "expected a file, or null to train one, got ''.")
        if self.path is None and not 257 <= self.vocab_size <= LARGEST_VOCABULARY:
            yield Problem(
                "tokenizer.vocab_size",
                f"expected 257 entries, which hold every byte, to {LARGEST_VOCABULARY:,}; got "
                f"{self.vocab_size}.",
            )
