"""Tasks of a configuration on a model's held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainer.common.errors import UserError
from trainer.config import (
    HARNESS,
    LONGBENCH,
    MANY_SHOT,
    MULTIPLE_CHOICE,
    PERPLEXITY,
    RULER,
    STATEMENTS,
    EvaluationConfig,
)
from trainer.data.corpus import Corpus, HeldOutText
from trainer.data.needles import NeedleVocabulary
from trainer.data.order import Integers
from trainer.data.tokenizer import own_first_token
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.longbench import longbench_tasks
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.many_shot import many_shot_tasks
from trainer.evaluation.measurements import Measurement, Perplexity, Prompted, Statements
from trainer.evaluation.methods import PARTS
from trainer.evaluation.multiple_choice import multiple_choice_tasks
from trainer.evaluation.needles import NEEDLE_TASKS, Haystack
from trainer.evaluation.results import counted
from trainer.evaluation.ruler import ruler_tasks

HAYSTACK = 1 << 22
"""Tokens of held-out documents that haystacks are made of."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out split of a corpus.

    ``split``: its tokens. ``bos_token``: first token of prompts, if any. ``training_share``: share
    of the training sequences with statements (None: unknown).
    """

    corpus: Corpus
    split: HeldOutText
    bos_token: int | None
    training_share: float | None

    @cached_property
    def documents(self) -> list[str]:
        """Documents of the split, at most :data:`HAYSTACK` tokens of them."""
        return self.corpus.documents(self.split, HAYSTACK)

    @cached_property
    def haystack(self) -> Haystack:
        """The documents as a haystack; its tokens are computed once for all tasks."""
        bos = () if self.bos_token is None else (self.bos_token,)
        return Haystack(self.corpus.tokenizer, self.documents, bos, (self.corpus.end_of_text,))

    @property
    def encoder(self) -> Encoder:
        """Encoder of questions, which begin as prompts do."""
        tokenizer = self.corpus.tokenizer
        begins = self.bos_token is not None and own_first_token(tokenizer) is None
        return Encoder(tokenizer, self.corpus.first_token, begins)


def check_names(config: EvaluationConfig) -> None:
    """Check that all tasks and methods exist.

    Raises:
        UserError: one does not.
    """
    parts = [part for name in config.methods for part in name.split("+")]
    groups = STATEMENTS, PERPLEXITY, RULER, LONGBENCH, MANY_SHOT, MULTIPLE_CHOICE, HARNESS
    for key, names, known in (
        ("tasks", config.tasks, [*groups, *NEEDLE_TASKS]),
        ("methods", parts, [*PARTS]),
    ):
        for name in names:
            if name not in known:
                raise UserError(
                    f"evaluation.{key}: expected some of {', '.join(known)}, got {name!r}"
                )


def make_tasks(
    text: HeldOut,
    config: EvaluationConfig,
    lengths: list[int],
    training_length: int,
) -> tuple[list[Measurement], list[str]]:
    """Return the measurements, and a sentence for each impossible one.

    Raises:
        UserError: no measurement is possible, or the text is shorter than the longest length.
    """
    made: list[Measurement] = []
    notes: list[str] = []
    bos_token, tokenizer, first = text.bos_token, text.corpus.tokenizer, text.corpus.first_token
    windows: dict[int, Integers] = {}
    last = config.last or min(training_length, *lengths)
    if PERPLEXITY in config.tasks:
        if last > min(lengths):
            raise UserError(f"evaluation.last: expected at most {min(lengths)}, got {last}")
        windows = windows_with_common_ends(text.split, config.windows, lengths, last=last)
        notes += _missing_windows(len(windows[max(lengths)]), config.windows, text, lengths, last)
    for name in config.tasks:
        if name == PERPLEXITY:
            made.append(Perplexity(windows, first, last))
        elif name == STATEMENTS and not text.training_share:
            known = text.training_share is not None
            why = "carried none" if known else "is not known to have carried any"
            notes.append(
                "The task 'statements' was left out: the training text of the first model "
                f"{why} (data.needles.share)."
            )
        elif name == STATEMENTS:
            vocabulary, needles = NeedleVocabulary.from_tokenizer(tokenizer), config.needles
            counts = needles.trials, needles.needles, needles.seed, needles.changes
            made.append(Statements.make(text.split, lengths, vocabulary, first, *counts))
        elif name in NEEDLE_TASKS:
            made.append(Prompted(NEEDLE_TASKS[name](text.haystack, config.needles), tokenizer))
        elif name == MULTIPLE_CHOICE:
            made += multiple_choice_tasks(config.multiple_choice, text.encoder)
        elif name == HARNESS:
            from trainer.evaluation.harness import harness_tasks

            made += harness_tasks(config.harness, text.encoder)
        else:
            groups = {
                RULER: lambda: ruler_tasks(config.ruler, tokenizer, text.documents, bos_token),
                LONGBENCH: lambda: longbench_tasks(
                    config.longbench, tokenizer, bos_token, training_length
                ),
                MANY_SHOT: lambda: many_shot_tasks(config.many_shot, tokenizer, bos_token),
            }
            tasks, missing = groups[name]()
            made += [Prompted(task, tokenizer) for task in tasks]
            notes += missing
    if notes and not made:
        raise UserError(f"evaluation.tasks: {' '.join(notes)}")
    return made, notes


def _missing_windows(
    count: int, wanted: int, text: HeldOut, lengths: list[int], last: int
) -> list[str]:
    """Return a sentence about the windows that the text does not have, if any."""
    if count == wanted:
        return []
    return [
        f"Losses are over {counted(count, 'window')}, not {wanted} (evaluation.windows): the "
        f"held-out text of {len(text.split):,} tokens has no more of {max(lengths):,} tokens "
        f"whose last {last:,} do not overlap."
    ]
