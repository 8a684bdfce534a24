"""Text of a run, and text for fitting methods, in the tokens of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.common.errors import UserError
from trainer.config import EvaluationConfig, RunConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.order import Integers
from trainer.data.prepared import Manifest, open_prepared, prepare
from trainer.data.sources import describe
from trainer.data.tokenizer import TextTokenizer, end_of_text, same_tokens, vocabulary_size
from trainer.evaluation.fitting import FitText, spread_evenly
from trainer.evaluation.loss import answered_texts, windows_with_common_ends
from trainer.evaluation.many_shot import SEED, many_shot_tasks
from trainer.evaluation.methods import CHOICE, Method
from trainer.evaluation.needles import NEEDLE_TASKS, Haystack
from trainer.evaluation.tasks import HAYSTACK
from trainer.runs.models import starting_weights
from trainer.runs.parsing import runs_of
from trainer.runs.starting_point import texts_read


def tokenizer_of_weights(config: RunConfig) -> TextTokenizer | None:
    """Return the tokenizer of the weights that the run begins with, unless another is configured.

    Raises:
        UserError: the weights came without one.
    """
    if config.tokenizer.path or (start := starting_weights(config.model)) is None:
        return None
    tokenizer = start.require_tokenizer()
    return TextTokenizer(tokenizer, end_of_text(tokenizer, start.eos))


def prepare_texts(config: RunConfig) -> Iterator[str]:
    """Prepare every text of a run; yield a line for each that is complete."""
    tokenizer = tokenizer_of_weights(config)
    for text in config.data.texts.values():
        directory = prepare(text, config.tokenizer, tokenizer)
        tokenizer = tokenizer or open_prepared(directory).text_tokenizer  # one for all texts
        manifest = Manifest.load(directory)
        counts = ", ".join(f"{split} {count:,}" for split, count in manifest.tokens.items())
        yield f"{describe(text)}: {manifest.read:,} documents, tokens {counts}; in {directory}"


def open_corpus(config: RunConfig, alone: bool = True) -> Corpus:
    """Open the run's text, which holds the longest sequences of the run and its controls, with the
    tokenizer of its pretrained model, if it has one.

    A resumed run gets the text that it has read so far, even if its source has changed since.

    ``alone``: whether the run has one process, which may prepare small text.

    Raises:
        UserError: text or tokenizer cannot be read, or the text is not prepared.
    """
    wanted = None if config.overwrite else texts_read(Path(config.run_dir))
    longest = max(run.longest_sequence for run in runs_of(config).values())
    data, tokenizer = replace(config.data, sequence_length=longest), tokenizer_of_weights(config)
    return prepare_corpus(data, config.tokenizer, tokenizer, alone=alone, wanted=wanted)


def check_vocabularies(configs: Mapping[str, RunConfig], corpus: Corpus) -> None:
    """Check that the tokens of the text are those of the model of every run.

    Raises:
        UserError: a model has fewer embeddings than there are tokens, or weights of other tokens.
    """
    tokens = vocabulary_size(corpus.tokenizer)
    for name, config in configs.items():
        embeddings, tokenizer = config.model.vocab_size, tokenizer_of_weights(config)
        if tokenizer is not None and not same_tokens(tokenizer.tokenizer, corpus.tokenizer):
            raise UserError(f"model: the weights of {name} have another tokenizer than the text")
        if embeddings is not None and embeddings < tokens:
            raise UserError(f"model.vocab_size: expected at least {tokens}, got {embeddings}")


def fit_text(
    corpus: Corpus,
    bos_token: int | None,
    config: EvaluationConfig,
    methods: Sequence[Method],
    lengths: Sequence[int],
    training_length: int,
) -> FitText:
    """Return the texts for all methods at the lengths at which they read them.

    These are validation text, texts with needles for searches of factors beyond the training
    length, and the texts on which heads and pairs are chosen (DoPE, Sec. 5.1, Tables 3 and 4).

    Raises:
        UserError: the text is too short, or a length does not fit a file or a task.
    """
    C, longrope, choice, text = training_length, config.longrope, config.choice, corpus.validation
    fitted = sorted({round(s * C) for n in lengths for m in methods for s in m.fits(n / C)})
    by_needles = longrope.search == "needles" and any(
        "longrope" in method.key.split("+") for method in methods
    )
    searched = [n for n in fitted if n > C and by_needles]
    chosen = fitted if choice.length is None else [round(choice.length * C)]
    if choice.text == "validation" or not any(CHOICE in method.settings for method in methods):
        chosen = []
    needles, prompts = {}, None
    if searched or chosen:
        bos = () if bos_token is None else (bos_token,)
        straw = Haystack(corpus.tokenizer, corpus.documents(corpus.validation, HAYSTACK), bos)
        needles = {n: answered_texts(straw, longrope.windows, n, seed=0) for n in searched}
        prompts = {n: choice_prompts(config, straw, n) for n in chosen} or None
    longest, parts = max(fitted, default=0), ()
    if longest and len(text.parts) > 1:  # the text of a mixture that each window is from
        shares = text.shares(config.fit_windows, longest)
        parts = tuple(text.parts_of_windows(shares).tolist())
    windows = windows_with_common_ends(text, config.fit_windows, fitted, name="validation")
    return FitText(windows, corpus.first_token, needles, prompts, parts)


def choice_prompts(config: EvaluationConfig, straw: Haystack, length: int) -> Integers:
    """Return ``[texts, tokens]`` of prompts on which methods choose, none of which is evaluated.

    The prompts are spread over the trials and depths of a task. A prompt leaves room for its
    answer, and all are cut at their beginning to the shortest: many-shot prompts differ by less
    than an example. ``straw``: validation text. ``length``: tokens of a prompt and its answer.
    """
    name, texts = config.choice.text, config.choice.texts
    if name in NEEDLE_TASKS:
        needles = replace(config.needles, trials=texts, seed=config.needles.seed + 1)
        prompts = NEEDLE_TASKS[name](straw, needles).prompts(length)
    else:
        shots, first = (
            replace(config.many_shot, trials=texts),
            straw.bos[0] if straw.bos else None,
        )
        tasks, _ = many_shot_tasks(shots, straw.tokenizer, first, seed=SEED + 1)
        prompts = next(task for task in tasks if task.name == name).prompts(length)
    tokens = [prompts[i].tokens for i in spread_evenly(texts, len(prompts))]
    bos = len(straw.bos)
    behind = min(map(len, tokens)) - bos
    return np.array([[*row[:bos], *row[len(row) - behind :]] for row in tokens], dtype=np.int64)
