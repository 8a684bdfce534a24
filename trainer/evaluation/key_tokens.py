"""Loss on key tokens: those that one model predicts better with distant context than without it.

Most tokens of a text follow from the words just before them, so the loss on all tokens says little
about the use of distant ones. LongPPL ("What is Wrong with Perplexity for Long-context Language
Modeling?", arXiv 2410.23771) averages the loss of key tokens alone. A model, the chooser, reads the
text with a long and with a short context. A token x_i is key if

    log p(x_i | long) - log p(x_i | short) > alpha  and  log p(x_i | long) > beta.

It is chosen once, for all models, methods and lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.common.progress import Progress
from trainer.data.order import Integers
from trainer.evaluation.config import KeyTokenSettings
from trainer.evaluation.loss import losses_of_batches
from trainer.evaluation.measurements import WindowLosses
from trainer.evaluation.passes import Done, no_progress
from trainer.evaluation.plan import Subject
from trainer.evaluation.results import KEY_TOKENS
from trainer.evaluation.store import Share, Store, all_fields, fingerprint, pack, unpack, wait_for
from trainer.model.language_model import LanguageModel

log = logging.getLogger(__name__)

FEWEST = 100
"""Fewer key tokens are too few for a mean. The 95% interval of a loss with a standard deviation of
2 nats is then 0.4 nats to either side."""
SHORTER = 8
"""The long context over the default short one, as 32k and 4k tokens in LongPPL."""

Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Contexts:
    """Tokens that the chooser reads at most to predict one, in either reading, and the thresholds.

    ``long``, ``short``: tokens, including the first token. ``alpha``, ``beta``: in nats, see
    the module.
    """

    long: int
    short: int
    alpha: float
    beta: float

    @classmethod
    def make(cls, settings: KeyTokenSettings, training_length: int, longest: int) -> Contexts:
        """Return the contexts of a chooser with this training length, in windows of ``longest``
        tokens at most."""
        long = min(training_length, longest)
        short = settings.short or max(1, long // SHORTER)
        return cls(long, short, settings.alpha, settings.beta)


@dataclass(frozen=True)
class ChosenTokens:
    """Key tokens of windows. ``mask``: ``[N, last]``, whether each last token of a window is key.
    ``by``: name of the chooser."""

    mask: Booleans
    contexts: Contexts
    by: str

    @property
    def count(self) -> int:
        """Number of key tokens."""
        return int(self.mask.sum())

    @property
    def about(self) -> dict[str, Any]:
        """Description for the report: how many tokens are key, of how many, and how they were
        chosen."""
        chosen = {"tokens": self.count, "of": self.mask.size, "by": self.by}
        return {**chosen, **asdict(self.contexts)}

    @property
    def too_few(self) -> str:
        """A sentence about why nothing is measured, or "" if there are enough key tokens."""
        if self.count >= FEWEST:
            return ""
        return (
            f"The task '{KEY_TOKENS}' was left out: {self.count:,} of {self.mask.size:,} tokens "
            f"are key, too few for a mean (fewer than {FEWEST}). More evaluation.windows have more "
            f"of them, and so does a lower evaluation.key_tokens.alpha (now "
            f"{self.contexts.alpha:g})."
        )


@torch.no_grad()
def find_key_tokens(
    model: LanguageModel,
    windows: Integers,
    first_token: int,
    last: int,
    contexts: Contexts,
    batch_tokens: int,
    done: Done = no_progress,
) -> Booleans:
    """Return which of the ``last`` tokens of windows ``[N, T]`` are key, ``[N, last]``.

    The model reads the last ``contexts.long`` tokens of a window, or the ``last`` ones if these are
    more, with as much context as there is up to ``contexts.long``. It then reads them with half of
    ``contexts.short`` to ``contexts.short`` tokens of context; see
    :func:`trainer.evaluation.loss.losses_of_batches`. Only a loss of each token is stored.
    """
    text = windows[:, -max(last, contexts.long) :]
    long, short = (
        torch.cat(
            [
                losses[:, -last:].clone()  # a view would keep the losses of the whole text
                for losses in losses_of_batches(
                    model, text, first_token, batch_tokens, reads=reads, done=done
                )
            ]
        ).double()
        for reads in (contexts.long, contexts.short)
    )
    key: Booleans = ((short - long > contexts.alpha) & (-long > contexts.beta)).numpy()
    return key


@dataclass(frozen=True)
class Chooser:
    """Model that chooses key tokens, with its own encoding.

    ``store``: keeps the choice, so that a resumed evaluation loads no weights for it. ``share``: of
    several processes, the first one chooses.
    """

    subject: Subject
    settings: KeyTokenSettings
    store: Store
    batch_tokens: int
    share: Share = field(default_factory=Share)

    def choose(self, windows: Integers, first_token: int, last: int) -> ChosenTokens:
        """Return the key tokens among the ``last`` ones of windows ``[N, T]``."""
        C = self.subject.layout.training_length
        contexts = Contexts.make(self.settings, C, windows.shape[1])
        text = windows[:, -max(last, contexts.long) :]
        key = {
            "model": self.subject.fingerprint,
            "text": fingerprint(text, first_token, last),
            "contexts": asdict(contexts),
        }

        def make() -> dict[str, Any]:
            log.info("%s chooses the key tokens", self.subject.name)
            model = self.subject.load().eval()
            with Progress("Choosing key tokens", 2 * len(text), text.shape[1]) as progress:
                done = progress.advance
                mask = find_key_tokens(
                    model, text, first_token, last, contexts, self.batch_tokens, done
                )
            return pack(mask.astype(np.uint8))

        if self.share.index:
            wait_for(lambda: not self.store.has(KEY_TOKENS, key))
        mask = unpack(self.store.get(KEY_TOKENS, key, make)).astype(bool)
        return ChosenTokens(mask, contexts, self.subject.name)


_NOT_READ = {
    "key": "the key of a cell names its task",
    "title": "a heading, without influence on the measurement",
    "windows": "a cell reads only the windows of its length",
    "chosen": "of the choice, a cell depends on the mask alone",
}
"""Fields that the fingerprint leaves out, with the reason."""


@dataclass
class KeyTokens(WindowLosses):
    """Held-out loss on the key tokens among the last tokens of windows with common ends."""

    chosen: ChosenTokens
    key: str = KEY_TOKENS
    title: str = "Perplexity of key tokens"

    def fingerprint(self, length: int) -> str:
        """Return a hash of the windows and of which of their last tokens are key."""
        of_all = all_fields(self, _NOT_READ)
        return fingerprint(self.windows[length], self.chosen.mask, of_all)

    def part(self, rank: int, ranks: int) -> Self:
        """Return one rank's share of the windows and of their key tokens."""
        chosen = replace(self.chosen, mask=self.chosen.mask[rank::ranks])
        return replace(super().part(rank, ranks), chosen=chosen)

    def cell(self, length: int, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the mean over all key tokens, and over those of each window that has any."""
        mask = self.chosen.mask
        last = mask.shape[1]
        read = [unpack(part["losses"])[:, -last:].astype(np.float64) for part in parts]
        losses = np.concatenate(read)
        windows = [x[key] for x, key in zip(losses, mask, strict=True) if key.any()]
        by_window = tuple(x.mean().item() for x in windows)
        return {"last_loss": losses[mask].mean().item(), "by_window": by_window}
