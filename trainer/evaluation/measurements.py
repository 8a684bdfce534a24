"""Measurements of a model at one length: held-out loss, retrieval of statements as in the training
text, or any task with prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Self

import numpy as np
import torch
from tokenizers import Tokenizer

from trainer.config import PERPLEXITY, STATEMENTS
from trainer.data.corpus import HeldOutText
from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.data.order import Integers
from trainer.evaluation.answering import answers
from trainer.evaluation.loss import losses_of_batches, windows_with_common_ends
from trainer.evaluation.passes import WHOLE, Done, Piece, no_progress, sequences_at_once
from trainer.evaluation.scoring import Prompt, Task
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel


@dataclass(frozen=True)
class Reading:
    """A model and its way of reading the sequences of a cell.

    ``reads``: number of last tokens that it reads (None: every token). ``done``: receives the
    number of sequences read. ``piece``: the part of the sequences to read.
    """

    model: LanguageModel
    length: int
    reads: int | None
    batch_tokens: int
    done: Done = no_progress
    piece: Piece = WHOLE


class Measurement(ABC):
    """One kind of cell. ``key`` names it in configurations and files, ``title`` in tables."""

    key: str
    title: str

    @abstractmethod
    def sequences(self, length: int) -> int:
        """Return how many sequences of ``length`` tokens a cell reads."""

    @abstractmethod
    def part(self, rank: int, ranks: int) -> Measurement:
        """Return one rank's share of the sequences."""

    @abstractmethod
    def fingerprint(self, length: int) -> str:
        """Return a hash of everything that a cell reads and expects."""

    def groups(self, length: int) -> tuple[int, ...]:
        """Return the number of each trial's text; empty if every trial has its own."""
        return ()

    @abstractmethod
    def read(self, reading: Reading) -> dict[str, Any]:
        """Measure a part of the sequences, and return JSON values."""

    @abstractmethod
    def cell(self, length: int, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Combine all parts, in order, into fields of a :class:`Cell`."""

    def measure(self, reading: Reading) -> dict[str, Any]:
        """Read all sequences, and return fields of a :class:`Cell`."""
        return self.cell(reading.length, [self.read(reading)])


@dataclass
class Perplexity(Measurement):
    """Held-out loss on the last tokens of windows that end at the same places.

    ``windows``: ``[N, length]`` tokens of held-out text for each length. ``last``: number of last
    tokens that are reported (None: the training length, or the shortest length if that is less).
    """

    windows: dict[int, Integers]
    first_token: int
    training_length: int
    last: int | None = None
    key: str = PERPLEXITY
    title: str = "Held-out perplexity"

    def sequences(self, length: int) -> int:
        """Return the number of windows."""
        return len(self.windows[length])

    def part(self, rank: int, ranks: int) -> Self:
        """Return one rank's share of the windows."""
        return replace(self, windows={n: x[rank::ranks] for n, x in self.windows.items()})

    def fingerprint(self, length: int) -> str:
        """Return a hash of the windows and the averaged tokens."""
        windows = self.windows[length]
        return fingerprint(self.key, windows, self._last, self.first_token, self.training_length)

    @property
    def _last(self) -> int:
        """Number of last tokens reported, equal for all lengths."""
        return self.last or min([self.training_length, *self.windows])

    def read(self, reading: Reading) -> dict[str, Any]:
        """Return the mean loss on the last tokens of each window."""
        batches = losses_of_batches(
            reading.model,
            self.windows[reading.length],
            self.first_token,
            reading.batch_tokens,
            reads=reading.reads,
            done=reading.done,
            piece=reading.piece,
        )
        means = (losses.double()[:, -self._last :].mean(dim=1).tolist() for losses in batches)
        return {"last": [loss for of_batch in means for loss in of_batch]}

    def cell(self, length: int, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the losses of all windows; NaN if they are not finite."""
        losses = (loss for part in parts for loss in part["last"])
        return {"losses": tuple(x if math.isfinite(x) else math.nan for x in losses)}


@dataclass
class Statements(Measurement):
    """Multi-key needles in the words of the demo's training sequences.

    See :mod:`trainer.data.needles`. ``trials``: the trials of each length.
    """

    trials: dict[int, Trials]
    first_token: int
    key: str = STATEMENTS
    title: str = "Trained statements (multi-key)"

    @classmethod
    def make(
        cls,
        held_out: HeldOutText,
        lengths: list[int],
        vocabulary: NeedleVocabulary,
        first_token: int,
        trials: int,
        needles: int,
        seed: int,
        changes: int = 0,
    ) -> Statements:
        """Make trials in windows of held-out text that end at the same tokens at every length."""
        trials_at = {}
        for length, text in windows_with_common_ends(held_out, trials, lengths).items():
            text[:, 0] = first_token
            trials_at[length] = make_trials(
                text, np.arange(trials), vocabulary, needles, seed, changes
            )
        return cls(trials_at, first_token)

    def sequences(self, length: int) -> int:
        """Return the number of trials."""
        return len(self.trials[length].prompts)

    def fingerprint(self, length: int) -> str:
        """Return a hash of the trials."""
        return fingerprint(self.key, self.trials[length], self.first_token)

    def part(self, rank: int, ranks: int) -> Statements:
        """Return one rank's share of the trials."""
        part = slice(rank, None, ranks)
        return replace(
            self,
            trials={
                length: Trials(trials.prompts[part], trials.answers[part], trials.depths[part])
                for length, trials in self.trials.items()
            },
        )

    def read(self, reading: Reading) -> dict[str, Any]:
        """Return a score for each trial of the part."""
        asked, reads = self.trials[reading.length], reading.reads
        if reads is not None and reads < reading.length:
            prompts = asked.prompts[:, -reads:].copy()
            prompts[:, 0] = self.first_token
            asked = Trials(prompts, asked.answers, asked.depths)
        hits = successes(reading.model, asked, reading.batch_tokens, reading.done, reading.piece)
        return {"scores": [float(hit) for hit in hits]}

    def cell(self, length: int, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the scores, and the depths of the requested statements."""
        depths = 1 - self.trials[length].depths / length
        return {
            "scores": tuple(score for part in parts for score in part["scores"]),
            "depths": tuple(np.round(depths, 4).tolist()),
        }


@torch.no_grad()
def successes(
    model: LanguageModel,
    trials: Trials,
    batch_tokens: int,
    done: Done = no_progress,
    piece: Piece = WHOLE,
) -> list[bool]:
    """Return whether each trial's answer is the most likely next token.

    Only the last position goes through the head, and a batch holds at most ``batch_tokens`` tokens
    (at least one trial), so memory is linear in the length.
    """
    size = sequences_at_once(model, trials.prompts.shape[1], batch_tokens)
    prompts = torch.from_numpy(trials.prompts).split(size)
    answers = torch.from_numpy(trials.answers).split(size)
    hits: list[bool] = []
    for ids, expected in piece.among(list(zip(prompts, answers, strict=True))):
        predicted = model(ids.to(model.device), last=1)[:, -1].argmax(dim=-1).cpu()
        hits += (predicted == expected).tolist()
        done(len(ids))
    return hits


@dataclass
class Prompted(Measurement):
    """A task whose prompts are answered in words.

    ``limit``: number of prompts at each length, spread evenly over all of them (None: all).
    ``share``: rank and number of ranks; each rank takes every ``ranks``-th prompt.
    """

    task: Task
    tokenizer: Tokenizer
    limit: int | None = None
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self.key = self.title = self.task.name
        # Prompts are equal for all models and methods; keep one length in memory.
        self._prompts = lru_cache(maxsize=1)(self._make_prompts)
        self._summary = cache(self._summarise)

    def _make_prompts(self, length: int) -> list[Prompt]:
        prompts = self.task.prompts(length)
        if self.limit is not None and self.limit < len(prompts):
            places = np.linspace(0, len(prompts) - 1, self.limit).round().astype(int)
            prompts = [prompts[place] for place in places]
        rank, ranks = self.share
        # Four bytes for a token, because the prompts of all tasks are kept in memory together.
        return [replace(p, tokens=array("i", p.tokens)) for p in prompts[rank::ranks]]

    def part(self, rank: int, ranks: int) -> Prompted:
        """Return one rank's share of the prompts."""
        return replace(self, share=(rank, ranks))

    def sequences(self, length: int) -> int:
        """Return the number of prompts."""
        return self._summary(length)[0]

    def fingerprint(self, length: int) -> str:
        """Return a hash of the prompts and their answers."""
        return self._summary(length)[1]

    def groups(self, length: int) -> tuple[int, ...]:
        """Return the number of each prompt's group, in order of appearance; empty without any."""
        return self._summary(length)[2]

    def _summarise(self, length: int) -> tuple[int, str, tuple[int, ...]]:
        """Return number, fingerprint and groups of the prompts, to store in place of them."""
        prompts = self._prompts(length)
        inputs = [
            (np.array(p.tokens, np.int64), p.answers, p.new_tokens, p.depth, p.label, p.never_first)
            for p in prompts
        ]
        return len(prompts), fingerprint(self.key, inputs), _numbered(prompts)

    def read(self, reading: Reading) -> dict[str, Any]:
        """Return the index and score of each prompt in the part."""
        prompts, reads = self._prompts(reading.length), reading.reads
        texts = answers(
            reading.model,
            self.tokenizer,
            prompts if reads is None else [_cropped(prompt, reads) for prompt in prompts],
            reading.batch_tokens,
            reading.done,
            self.task.stop,
            reading.piece,
        )
        scores = [float(self.task.score(text, prompts[i].answers)) for i, text in texts.items()]
        return {"places": list(texts), "scores": scores}

    def cell(self, length: int, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the scores in the order of the prompts, with their depths and labels."""
        prompts = self._prompts(length)
        scores = {
            place: score
            for part in parts
            for place, score in zip(part["places"], part["scores"], strict=True)
        }
        fields: dict[str, Any] = {"scores": tuple(scores[place] for place in range(len(prompts)))}
        if all(prompt.depth is not None for prompt in prompts):
            fields["depths"] = tuple(prompt.depth for prompt in prompts)
        if any(prompt.label for prompt in prompts):
            fields["labels"] = tuple(prompt.label for prompt in prompts)
        return fields


def _numbered(prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """Return the number of each prompt's group, counted from 0; empty if no two share a group."""
    names = [(i, None) if p.group is None else (None, p.group) for i, p in enumerate(prompts)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names) if len(numbers) < len(names) else ()


def _cropped(prompt: Prompt, reads: int) -> Prompt:
    """Return the prompt's first token and as many of its last ones as leave room for the answer."""
    room = max(1, reads - prompt.new_tokens)
    if len(prompt.tokens) <= room:
        return prompt
    tokens = (prompt.tokens[0], *prompt.tokens[len(prompt.tokens) - room + 1 :])
    return replace(prompt, tokens=tokens, group=None)
