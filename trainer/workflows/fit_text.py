"""Texts for fitting methods and for choosing heads and pairs, apart from the evaluated text.

Source: DoPE, Sec. 5.1, Tables 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from trainer.config import EvaluationConfig, MethodsConfig
from trainer.data.corpus import Corpus
from trainer.data.held_out import HeldOutText
from trainer.data.order import Integers
from trainer.evaluation.fitting import FitText, spread_evenly
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.loss import answered_texts, windows_with_common_ends
from trainer.evaluation.many_shot import SEED, many_shot_tasks
from trainer.evaluation.methods import CHOICE, Recipe
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.scoring import Task
from trainer.evaluation.tasks import HAYSTACK

KEY = "evaluation.choice"


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
    C, longrope = training_length, config.longrope
    fitted = sorted({round(s * C) for n in lengths for r in recipes for s in r.fits(n / C)})
    chosen = [] if config.choice.length is None else [round(config.choice.length * C)]
    chooses = any(CHOICE in recipe.settings for recipe in recipes)
    searches = any("longrope" in recipe.key.split("+") for recipe in recipes)
    by_needles = searches and longrope.search == "needles"
    text = corpus.validation

    def haystack() -> Haystack:
        documents = corpus.documents("validation", HAYSTACK)
        return Haystack(corpus.tokenizer, documents, () if bos_token is None else (bos_token,))

    straw = haystack() if by_needles else None
    return FitText(
        windows_with_common_ends(text, config.fit_windows, fitted, name="validation"),
        corpus.first_token,
        corpus.fingerprint,
        {
            n: answered_texts(straw, longrope.windows, n, seed=0)
            for n in fitted
            if straw is not None and n > C
        },
        choice_texts(config, haystack, (chosen or fitted) if chooses else ()),
        _parts(text, config.fit_windows, max(fitted, default=0)),
    )


def _parts(text: HeldOutText, count: int, length: int) -> tuple[int, ...]:
    """Return the text of a mixture that each window is from; empty without windows or mixture."""
    if not length or len(text.parts) == 1:
        return ()
    return tuple(text.parts_of_windows(text.shares(count, length)).tolist())


def choice_texts(
    config: MethodsConfig, haystack: Callable[[], Haystack], lengths: Sequence[int]
) -> dict[int, Integers] | None:
    """Return ``[texts, tokens]`` for every length, or None to choose on validation text.

    Args:
        config: source, number and length of the texts, and the settings of tasks.
        haystack: makes the haystack of validation text, with the model's tokenizer.
        lengths: tokens of a text. A prompt is shorter: it leaves room for its answer, and ends
            where no further example fits.

    Raises:
        UserError: a file cannot be read, or a length does not fit the file or the task.
    """
    settings = config.choice
    if settings.text == "validation" or not lengths:
        return None
    straw = haystack()
    task = _task(config, straw)
    return {n: _task_prompts(task, n, settings.texts, len(straw.bos)) for n in lengths}


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
