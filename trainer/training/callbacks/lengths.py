"""Retrieval and loss at several lengths during training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import lightning as L
import torch

from trainer.common.errors import UserError
from trainer.data.corpus import Corpus
from trainer.data.needles import NeedleVocabulary
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Perplexity, Statements
from trainer.evaluation.results import Reach
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.training.callbacks.evaluating import evaluating
from trainer.training.callbacks.monitor import Remembering
from trainer.training.callbacks.transitions import Transitions
from trainer.training.module import LanguageModule


class Lengths(Remembering):
    """Retrieval and held-out loss at several lengths, on the same validation text every time.

    The next row of metrics contains the latest values.
    """

    kind = Reach

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        ranks: Ranks,
        transitions: Transitions,
        add_metrics: Callable[[dict[str, float]], None],
    ) -> None:
        assert config.monitor.lengths_every is not None
        super().__init__(config, config.monitor.lengths_every, transitions)
        self.add_metrics = add_metrics
        self.perplexity, self.statements = measurements(config, corpus, ranks)

    def measure(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Read this rank's part; afterwards all ranks have the same values."""
        C, tokens = self.config.data.sequence_length, self.config.evaluation.batch_tokens
        lengths = tuple(self.perplexity.windows)
        retrieval: list[float] = []
        with evaluating(module) as model:
            found = [self.perplexity.measure(model, length, None, tokens) for length in lengths]
            if self.statements is not None:
                for length in lengths:
                    scores = self.statements.measure(model, length, None, tokens)["scores"]
                    retrieval.append(sum(scores) / len(scores))
        edges, losses = found[-1]["edges"], found[-1]["losses"]  # of the longest length
        loss = [of_one["last_loss"] for of_one in found]
        mine = torch.tensor([*loss, *retrieval, *losses], dtype=torch.float64)
        means = iter(trainer.strategy.reduce(mine.to(module.device)).tolist())
        by_length, retrieved, by_bucket = (
            tuple(islice(means, len(part))) for part in (loss, retrieval, losses)
        )
        dropped = self.transitions.has_dropped
        self.history.append(
            Reach(trainer.global_step, dropped, C, lengths, by_length, retrieved, edges, by_bucket)
        )
        for name, values in (("loss", by_length), ("retrieval", retrieved)):
            self.add_metrics(
                {f"length/{name}_{n // C}x": v for n, v in zip(lengths, values, strict=False)}
            )


def check_monitored_text(config: RunConfig, corpus: Corpus) -> None:
    """Check that the validation text is long enough.

    Raises:
        UserError: it is too short.
    """
    if config.monitor.lengths_every is None:
        return
    longest, text = max(config.monitor.lengths), corpus.validation
    if len(text) < longest * config.data.sequence_length:
        raise UserError.at(
            "monitor.lengths",
            f"the validation text has {len(text)} tokens, fewer than {longest} times "
            "data.sequence_length; give more text, larger data.validation, or shorter lengths.",
        )


def measurements(
    config: RunConfig, corpus: Corpus, ranks: Ranks
) -> tuple[Perplexity, Statements | None]:
    """Return this rank's part of the validation text, with needles if training has them."""
    monitor, needles, C = config.monitor, config.evaluation.needles, config.data.sequence_length
    lengths = [C * factor for factor in sorted(set(monitor.lengths))]
    text, end = corpus.validation, corpus.end_of_text

    def whole(count: int) -> int:
        return -(-count // ranks.world_size) * ranks.world_size

    windows = windows_with_common_ends(text, whole(monitor.windows), lengths)
    perplexity = Perplexity(windows, end, C, last=C).part(ranks.rank, ranks.world_size)
    if not (config.data.needles.share and monitor.trials):
        return perplexity, None
    vocabulary, counts = NeedleVocabulary.of(corpus.tokenizer), (needles.needles, needles.seed)
    statements = Statements.of(text, lengths, vocabulary, end, whole(monitor.trials), *counts)
    return perplexity, statements.part(ranks.rank, ranks.world_size)
