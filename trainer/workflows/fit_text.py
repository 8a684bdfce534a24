"""Texts for fitting methods and for choosing heads and pairs, apart from the evaluated text.

Source: DoPE, Sec. 5.1, Tables 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.config import EvaluationConfig, MethodsConfig
from trainer.data.corpus import Corpus
from trainer.data.order import Integers
from trainer.evaluation.fitting import FitText, spread_evenly
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.loss import answered_texts, windows_with_common_ends
from trainer.evaluation.many_shot import SEED, many_shot_tasks
from trainer.evaluation.methods import CHOICE, Recipe
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.scoring import Task
from trainer.evaluation.tasks import HAYSTACK


def fit_text(
    corpus: Corpus,
    bos_token: int | None,
    config: MethodsConfig,
    recipes: Sequence[Recipe],
    lengths: Sequence[int],
    training_length: int,
) -> FitText:
    """Return the texts for all methods at the lengths at which they read them.

    These are validation text, texts with needles for searches of factors beyond the training
    length, and the texts on which heads and pairs are chosen.

    Raises:
        UserError: as for :func:`choice_texts`, or the text is too short.
    """
    C, longrope, text = training_length, config.longrope, corpus.validation
    fitted = sorted({round(s * C) for n in lengths for r in recipes for s in r.fits(n / C)})
    searched = [
        n
        for n in fitted
        if n > C
        and longrope.search == "needles"
        and any("longrope" in recipe.key.split("+") for recipe in recipes)
    ]
    choice = config.choice
    chosen = fitted if choice.length is None else [round(choice.length * C)]
    if choice.text == "validation" or not any(CHOICE in recipe.settings for recipe in recipes):
        chosen = []
    needles, prompts = {}, None
    if searched or chosen:
        bos = () if bos_token is None else (bos_token,)
        straw = Haystack(corpus.tokenizer, corpus.documents("validation", HAYSTACK), bos)
        needles = {n: answered_texts(straw, longrope.windows, n, seed=0) for n in searched}
        prompts = choice_texts(config, straw, chosen) if chosen else None
    longest, parts = max(fitted, default=0), ()
    if longest and len(text.parts) > 1:  # the text of a mixture that each window is from
        shares = text.shares(config.fit_windows, longest)
        parts = tuple(text.parts_of_windows(shares).tolist())
    windows = windows_with_common_ends(text, config.fit_windows, fitted, name="validation")
    return FitText(windows, corpus.first_token, corpus.fingerprint, needles, prompts, parts)


def choice_texts(
    config: MethodsConfig, straw: Haystack, lengths: Sequence[int]
) -> dict[int, Integers]:
    """Return ``[texts, tokens]`` of the task's prompts on which methods choose, for every length.

    Args:
        config: source, number and length of the texts, and the settings of tasks.
        straw: the haystack of validation text, with the model's tokenizer.
        lengths: tokens of a text. A prompt is shorter: it leaves room for its answer, and ends
            where no further example fits.

    Raises:
        UserError: a file cannot be read, or a length does not fit the file or the task.
    """
    task = _task(config, straw)
    return {n: _task_prompts(task, n, config.choice.texts, len(straw.bos)) for n in lengths}


def _task(config: MethodsConfig, straw: Haystack) -> Task:
    """Return the task whose prompts are read; its seed differs from the evaluation's."""
    name, texts = config.choice.text, config.choice.texts
    settings = config if isinstance(config, EvaluationConfig) else EvaluationConfig()
    if name in NEEDLE_TASKS:
        needles = replace(settings.needles, trials=texts, seed=settings.needles.seed + 1)
        return NEEDLE_TASKS[name](straw, needles)
    shots = replace(settings.many_shot, trials=texts)
    bos = straw.bos[0] if straw.bos else None
    tasks, _ = many_shot_tasks(shots, straw.tokenizer, bos, seed=SEED + 1)
    return next(task for task in tasks if task.name == name)


def _task_prompts(task: Task, length: int, texts: int, bos: int) -> Integers:
    """Return prompts spread over a task's trials and depths, all cut to the shortest at their
    beginning: many-shot prompts differ by less than an example."""
    prompts = task.prompts(length)
    tokens = [prompts[i].tokens for i in spread_evenly(texts, len(prompts))]
    behind = min(map(len, tokens)) - bos
    return np.array([[*row[:bos], *row[len(row) - behind :]] for row in tokens], dtype=np.int64)
