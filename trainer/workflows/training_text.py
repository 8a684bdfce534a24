"""The text of a run, in the tokens of its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from trainer.data.config import DataConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.tokenizer import SMALLEST_VOCABULARY, vocabulary_size
from trainer.errors import UserError
from trainer.evaluation.config import LONGBENCH
from trainer.evaluation.tasks import HeldOut, check_prompts, make_tasks
from trainer.report.results import STATEMENTS
from trainer.runs.checkpoints import read_state
from trainer.runs.config import RunConfig
from trainer.runs.phases import phases_of
from trainer.runs.starting_point import texts_read
from trainer.runs.starting_weights import starting_weights
from trainer.runs.trained_shape import own_checkpoint


def open_corpus(config: RunConfig, alone: bool = True) -> Corpus:
    """The run's text, with the tokenizer of its pretrained model where it has one; that of a run
    that goes on is the text it has read, also where its source has changed since.

    ``alone``: whether the run has one process, which may prepare small text.

    Raises:
        UserError: text or tokenizer cannot be read, the text is not prepared, or the model has
            fewer embeddings than the tokenizer has tokens.
    """
    tokenizer = tokenizer_of_weights(config)
    wanted = None if config.overwrite else texts_read(Path(config.run_dir))
    for data in readings(config):
        corpus = prepare_corpus(data, config.tokenizer, tokenizer, alone=alone, wanted=wanted)
    tokens, embeddings = vocabulary_size(corpus.tokenizer), config.model.vocab_size
    if embeddings is not None and embeddings < tokens:
        raise UserError(
            f"model.vocab_size: {embeddings} embeddings, but the tokenizer has {tokens} tokens; "
            f"give {tokens} or more, or null."
        )
    return corpus


def check_evaluated_text(config: RunConfig, corpus: Corpus) -> None:
    """Whether the run can be evaluated in the end: the test text is as long as the longest length,
    and a prompt of every task fits the shortest. Of weights that it begins with the training length
    is known only when they are read, and questions of LongBench may have to be fetched.

    Raises:
        UserError: it cannot.
    """
    wanted, share = config.evaluation, config.data.needles.share
    later = {LONGBENCH} if share else {LONGBENCH, STATEMENTS}
    tasks = [name for name in wanted.tasks if name not in later]
    if not wanted.enabled or config.model.is_trained or not tasks:
        return
    few = replace(
        wanted,
        tasks=tasks,
        windows=1,
        needles=replace(wanted.needles, trials=1),
        ruler=replace(wanted.ruler, trials=1),
        many_shot=replace(wanted.many_shot, trials=1),
    )
    C = config.training_length
    lengths = [round(C * factor) for factor in wanted.lengths]
    held_out = HeldOut(corpus, corpus.test, corpus.end_of_text, share)
    measured, _ = make_tasks(held_out, few, lengths, C)
    check_prompts(measured, lengths)


def readings(config: RunConfig) -> list[DataConfig]:
    """The texts with every length that they are packed for, in any phase, the run's own last; where
    they are not, with the longest, which no split may fall short of."""
    if config.data.packing == "stream":
        return [replace(config.data, sequence_length=config.training_length)]
    lengths = {phase.config.data.sequence_length for phase in phases_of(config)}
    others = sorted(lengths - {config.data.sequence_length})
    return [*(replace(config.data, sequence_length=n) for n in others), config.data]


def vocabulary_problems(config: RunConfig) -> list[str]:
    """What can be said of the vocabulary before there is a tokenizer."""
    embeddings, least = config.model.vocab_size, SMALLEST_VOCABULARY
    given = config.tokenizer.path or config.model.is_trained
    if given or embeddings is None or embeddings >= least:
        return []
    return [
        f"model.vocab_size: {embeddings} embeddings, but a tokenizer that is trained here has at "
        f"least {least} tokens; give more, or null."
    ]


def tokenizer_of_weights(config: RunConfig) -> Tokenizer | None:
    """That of the weights the run begins with, where no other is configured.

    Raises:
        UserError: they came without.
    """
    if not config.tokenizer.path and (own := own_checkpoint(config)) is not None:
        return Tokenizer.from_str(read_state(own, hashed=False)["tokenizer"])
    if config.tokenizer.path or (start := starting_weights(config.model)) is None:
        return None
    return start.require_tokenizer()
