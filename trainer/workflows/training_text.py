"""Text of a run, in the tokens of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer.common.errors import UserError
from trainer.config import DataConfig, RunConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.tokenizer import TextTokenizer, same_tokens, vocabulary_size
from trainer.evaluation.engine import Subject
from trainer.evaluation.tasks import HeldOut
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.runs.arms import arms_of
from trainer.runs.layouts import configured_layout, layouts_of_phases
from trainer.runs.starting_point import starting_weights, texts_read
from trainer.workflows.evaluate import prepared


def open_corpus(config: RunConfig, alone: bool = True) -> Corpus:
    """Open the run's text with the tokenizer of its pretrained model, if it has one.

    A resumed run gets the text that it has read so far, even if its source has changed since.

    ``alone``: whether the run has one process, which may prepare small text.

    Raises:
        UserError: text or tokenizer cannot be read, or the text is not prepared.
    """
    tokenizer = tokenizer_of_weights(config)
    wanted = None if config.overwrite else texts_read(Path(config.run_dir))
    data = data_of_arms(config)
    return prepare_corpus(data, config.tokenizer, tokenizer, alone=alone, wanted=wanted)


def check_vocabularies(arms: Mapping[str, RunConfig], corpus: Corpus) -> None:
    """Check that the tokens of the text are those of every arm's model.

    Raises:
        UserError: a model has fewer embeddings than there are tokens, or weights of other tokens.
    """
    tokens = vocabulary_size(corpus.tokenizer)
    for name, arm in arms.items():
        embeddings, tokenizer = arm.model.vocab_size, tokenizer_of_weights(arm)
        if tokenizer is not None and not same_tokens(tokenizer.tokenizer, corpus.tokenizer):
            raise UserError(f"model: the weights of {name} have another tokenizer than the text")
        if embeddings is not None and embeddings < tokens:
            raise UserError(f"model.vocab_size: expected at least {tokens}, got {embeddings}")


def check_evaluated_text(configs: Mapping[str, RunConfig], corpus: Corpus) -> None:
    """Check, before training, that the runs can be evaluated at their end.

    All texts must be long enough, a prompt of every task must fit the shortest length, benchmarks
    must be available, and methods must apply to the models that the runs end with. ``main`` comes
    first.

    Raises:
        UserError: some of this fails.
    """
    config = configs["main"]
    wanted, share = config.evaluation, config.data.needles.share
    if not wanted.enabled:
        return
    few = replace(
        wanted,
        windows=1,
        fit_windows=1,
        needles=replace(wanted.needles, trials=1),
        ruler=replace(wanted.ruler, trials=1),
        longbench=replace(wanted.longbench, limit=1),
        many_shot=replace(wanted.many_shot, trials=1),
    )
    C = wanted.training_length or config.training_length
    subjects = [
        Subject(name, "", arm.model, layouts(arm)[-1].with_training_length(C), _not_trained_yet)
        for name, arm in configs.items()
    ]
    text = HeldOut(corpus, corpus.test, corpus.first_token, share)
    prepared(subjects, few.in_multiples(C), text)


def layouts(config: RunConfig) -> list[Layout]:
    """Return a model's layouts just before each of its phases, and the last one.

    Raises:
        UserError: the weights that the run begins with are missing or damaged.
    """
    start = starting_weights(config.model)
    first = start.layout if start is not None else configured_layout(config)
    return list(layouts_of_phases(config, first))


def _not_trained_yet() -> LanguageModel:
    raise RuntimeError("nothing is measured before training")


def data_of_arms(config: RunConfig) -> DataConfig:
    """Return the run's text with the longest sequences of any arm, which every split must hold."""
    arms = arms_of(config, weights=False)
    longest = max(arm.longest_sequence for arm in arms.values())
    return replace(config.data, sequence_length=longest)


def tokenizer_of_weights(config: RunConfig) -> TextTokenizer | None:
    """Return the tokenizer of the weights that the run begins with, unless another is configured.

    Raises:
        UserError: the weights came without one.
    """
    if config.tokenizer.path or (start := starting_weights(config.model)) is None:
        return None
    return TextTokenizer(start.require_tokenizer(), start.eos)
