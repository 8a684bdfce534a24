"""Measurements of a model at one length: held-out loss, retrieval of the statements that training
text carries, or any task with prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.data.order import Integers
from trainer.data.shards import TokenStream
from trainer.evaluation.answering import answers
from trainer.evaluation.keys import all_fields, fingerprint
from trainer.evaluation.loss import by_bucket, measured_losses, windows_with_common_ends
from trainer.evaluation.prompts import Prompt, Task
from trainer.evaluation.results import PERPLEXITY, STATEMENTS
from trainer.evaluation.retrieval import successes
from trainer.model.language_model import LanguageModel

Done = Callable[[int], None]
"""Told how many sequences were read."""


def _no_progress(sequences: int) -> None:
    """The default progress callback, which does nothing."""


_NAMES = {
    "key": "the key of a cell names its task",
    "title": "a heading, which is no part of what is measured",
}
_OF_WINDOWS = {
    **_NAMES,
    "windows": "a cell reads those of its own length",
    "last": "it is resolved for all lengths: see Perplexity._last",
}
_OF_TRIALS = {**_NAMES, "trials": "a cell reads those of its own length"}
_OF_PROMPT = {"group": "prompts of a group share their first forward pass: a matter of time alone"}
"""Fields that the fingerprints leave out, with the reason."""


class Measurement(Protocol):
    """One kind of cell. ``key`` names it in configurations and files, ``title`` in tables."""

    key: str
    title: str

    def sequences(self, length: int) -> int:
        """How many sequences of ``length`` tokens a cell reads."""
        ...

    def part(self, rank: int, ranks: int) -> Measurement:
        """One rank's share of the sequences."""
        ...

    def fingerprint(self, length: int) -> str:
        """Of all that a cell reads and expects."""
        ...

    def measure(
        self,
        model: LanguageModel,
        length: int,
        reads: int | None,
        batch_tokens: int,
        done: Done = _no_progress,
    ) -> dict[str, Any]:
        """Fields of a :class:`Cell`; ``reads``: the last tokens that the model reads at all
        (None: every token)."""
        ...


@dataclass
class Perplexity:
    """Held-out loss by position, and on the last tokens of windows that end at the same places.

    ``windows``: ``[N, length]`` tokens of every length; ``last``: how many of their last tokens
    are reported (None: as many as the training length, or the shortest length if that is less).
    """

    windows: dict[int, Integers]
    end_of_text: int
    training_length: int
    last: int | None = None
    key: str = PERPLEXITY
    title: str = "Held-out perplexity"

    def sequences(self, length: int) -> int:
        """Windows."""
        return len(self.windows[length])

    def fingerprint(self, length: int) -> str:
        """Of the windows, and of what is averaged."""
        return fingerprint(self.windows[length], self._last, all_fields(self, _OF_WINDOWS))

    def part(self, rank: int, ranks: int) -> Perplexity:
        """One rank's share of the windows."""
        return replace(self, windows={n: x[rank::ranks] for n, x in self.windows.items()})

    @property
    def _last(self) -> int:
        """The same tokens at every length."""
        return self.last or min([self.training_length, *self.windows])

    def measure(
        self,
        model: LanguageModel,
        length: int,
        reads: int | None,
        batch_tokens: int,
        done: Done = _no_progress,
    ) -> dict[str, Any]:
        """Mean losses of buckets of half a training length."""
        windows, last = self.windows[length], self._last
        losses, by_window = measured_losses(
            model, windows, self.end_of_text, batch_tokens, last, reads=reads, done=done
        )
        edges, means = by_bucket(losses, max(1, self.training_length // 2))
        of_all, of_each = losses[-last:].mean().item(), tuple(by_window.tolist())
        return {"edges": edges, "losses": means, "last_loss": of_all, "by_window": of_each}


@dataclass
class Statements:
    """Multi-key needles in the words that the demo's training sequences carry; see
    :mod:`trainer.data.needles`. ``trials``: of every length."""

    trials: dict[int, Trials]
    end_of_text: int
    key: str = STATEMENTS
    title: str = "Trained statements (multi-key)"

    @classmethod
    def of(
        cls,
        stream: TokenStream,
        lengths: list[int],
        vocabulary: NeedleVocabulary,
        end_of_text: int,
        trials: int,
        needles: int,
        seed: int,
    ) -> Statements:
        """Trials in windows of held-out text that end at the same places at every length."""
        made = {}
        for length, text in windows_with_common_ends(stream, trials, lengths).items():
            text[:, 0] = end_of_text
            made[length] = make_trials(text, np.arange(trials), vocabulary, needles, seed)
        return cls(made, end_of_text)

    def sequences(self, length: int) -> int:
        """Trials."""
        return len(self.trials[length].prompts)

    def fingerprint(self, length: int) -> str:
        """Of the trials."""
        return fingerprint(self.trials[length], all_fields(self, _OF_TRIALS))

    def part(self, rank: int, ranks: int) -> Statements:
        """One rank's share of the trials."""
        part = slice(rank, None, ranks)
        return replace(
            self,
            trials={
                length: Trials(own.prompts[part], own.answers[part], own.depths[part])
                for length, own in self.trials.items()
            },
        )

    def measure(
        self,
        model: LanguageModel,
        length: int,
        reads: int | None,
        batch_tokens: int,
        done: Done = _no_progress,
    ) -> dict[str, Any]:
        """One score a trial."""
        asked = self.trials[length]
        if reads is not None and reads < length:
            prompts = asked.prompts[:, -reads:].copy()
            prompts[:, 0] = self.end_of_text
            asked = Trials(prompts, asked.answers, asked.depths)
        hits = successes(model, asked, batch_tokens, done)
        depths = 1 - asked.depths / length
        return {
            "scores": tuple(float(hit) for hit in hits),
            "depths": tuple(np.round(depths, 4).tolist()),
        }


@dataclass
class Prompted:
    """A task whose prompts are answered in words.

    ``limit``: prompts that are asked at a length, spread evenly over all of them (None: all).
    ``share``: of those, from the first number on every so many (rank, ranks).
    """

    task: Task
    tokenizer: Tokenizer
    limit: int | None = None
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self.key = self.title = self.task.name
        # The same for all models and methods; a length at a time is kept.
        self._prompts = lru_cache(maxsize=1)(self._chosen)
        self._seen = cache(self._look)

    def _chosen(self, length: int) -> list[Prompt]:
        prompts = self.task.prompts(length)
        if self.limit is not None and self.limit < len(prompts):
            places = np.linspace(0, len(prompts) - 1, self.limit).round().astype(int)
            prompts = [prompts[place] for place in places]
        rank, ranks = self.share
        return prompts[rank::ranks]

    def part(self, rank: int, ranks: int) -> Prompted:
        """One rank's share of the prompts."""
        return replace(self, share=(rank, ranks))

    def sequences(self, length: int) -> int:
        """Trials."""
        return self._seen(length)[0]

    def fingerprint(self, length: int) -> str:
        """Of the prompts and their answers."""
        return self._seen(length)[1]

    def _look(self, length: int) -> tuple[int, str]:
        prompts = self._prompts(length)
        asked = [
            {**all_fields(prompt, _OF_PROMPT), "tokens": np.array(prompt.tokens)}
            for prompt in prompts
        ]
        return len(prompts), fingerprint(asked)

    def measure(
        self,
        model: LanguageModel,
        length: int,
        reads: int | None,
        batch_tokens: int,
        done: Done = _no_progress,
    ) -> dict[str, Any]:
        """One score a trial."""
        prompts = self._prompts(length)
        asked = prompts if reads is None else [_cropped(prompt, reads) for prompt in prompts]
        texts = answers(model, self.tokenizer, asked, batch_tokens, done, self.task.stop)
        scores = (self.task.score(text, p.answers) for text, p in zip(texts, prompts, strict=True))
        found: dict[str, Any] = {"scores": tuple(float(score) for score in scores)}
        if all(prompt.depth is not None for prompt in prompts):
            found["depths"] = tuple(prompt.depth for prompt in prompts)
        if any(prompt.label for prompt in prompts):
            found["labels"] = tuple(prompt.label for prompt in prompts)
        return found


def _cropped(prompt: Prompt, reads: int) -> Prompt:
    """The prompt with as many of its last tokens as leave room for the answer, behind its first."""
    room = max(1, reads - prompt.new_tokens)
    if len(prompt.tokens) <= room:
        return prompt
    tokens = (prompt.tokens[0], *prompt.tokens[len(prompt.tokens) - room + 1 :])
    return replace(prompt, tokens=tokens, group=None)
