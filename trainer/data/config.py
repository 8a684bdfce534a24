"""The ``data`` and ``tokenizer`` configuration groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes sequences.

    ``source``: ``stdlib_docs`` (docstrings and help topics of the running Python), ``files``
    (``.txt``, ``.jsonl``) or ``hub`` (a name on the Hugging Face hub, read with ``datasets``).
    ``text_field``: the key that holds the text in jsonl and hub rows. ``validation``, ``test``:
    shares of the documents kept out of training, the first for fitting and the drop's effect, the
    second for reported figures. ``document_mask``: attention stays within a document.
    ``cache_dir``: prepared data; null for ``$UNROPE_CACHE`` or the user's cache directory.
    """

    sequence_length: int = 64
    source: Literal["stdlib_docs", "files", "hub"] = "stdlib_docs"
    files: list[str] = field(default_factory=list)
    hub_name: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    text_field: str = "text"
    validation: float = 0.03
    test: float = 0.07
    document_mask: bool = False
    needles: NeedlesConfig = field(default_factory=NeedlesConfig)
    num_workers: int = 0
    cache_dir: str | None = None

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        found = []
        if self.sequence_length < 2:
            found.append(
                f"data.sequence_length: expected 2 or more tokens, got {self.sequence_length}."
            )
        if self.source == "files" and not self.files:
            found.append("data.files: data.source is 'files', but no file is named.")
        if self.source == "hub" and not self.hub_name:
            found.append("data.hub_name: data.source is 'hub', but no dataset is named.")
        if not (0 < self.validation < 1 and 0 < self.test < 1 and self.validation + self.test < 1):
            found.append(
                "data.validation, data.test: expected positive shares that leave documents to "
                f"train on, got {self.validation} and {self.test}."
            )
        if self.num_workers < 0:
            found.append(f"data.num_workers: expected 0 or more, got {self.num_workers}.")
        return found + self._needle_problems()

    def _needle_problems(self) -> list[str]:
        needles = self.needles
        if not 0 <= needles.share <= 1:
            return [f"data.needles.share: expected a share from 0 to 1, got {needles.share}."]
        found = [
            f"data.needles.{key}: expected smallest and largest, 1 <= smallest <= largest, "
            f"got {list(value)}."
            for key in ("names", "mentions")
            if not 1 <= (value := getattr(needles, key))[0] <= value[1]
        ]
        if not found and needles.share and 3 * needles.mentions[1] >= self.sequence_length:
            found.append(
                f"data.needles.mentions: {needles.mentions[1]} statements of 3 tokens do not fit "
                f"data.sequence_length {self.sequence_length}; at most "
                f"{(self.sequence_length - 1) // 3}."
            )
        if needles.weight <= 0:
            found.append(f"data.needles.weight: expected a positive number, got {needles.weight}.")
        return found


@dataclass(frozen=True)
class TokenizerConfig:
    """``path``: a ``tokenizer.json`` to load; null trains a byte-level BPE of ``vocab_size`` on the
    training text."""

    path: str | None = None
    vocab_size: int = 1024

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        if self.path is None and self.vocab_size < 257:
            return [
                "tokenizer.vocab_size: a byte-level vocabulary needs at least 257 entries, "
                f"got {self.vocab_size}."
            ]
        return []
