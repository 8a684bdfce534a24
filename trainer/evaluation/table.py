"""The table: every method at every length, on the same trials and the same held-out text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trainer.data.config import NeedlesConfig
from trainer.data.corpus import Corpus
from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.data.order import Integers
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.loss import by_bucket, losses_by_position, windows_with_common_ends
from trainer.evaluation.methods import (
    Method,
    as_is,
    is_free_of_positions,
    rescaled,
    rotates,
    with_temperature,
)
from trainer.evaluation.retrieval import successes
from trainer.evaluation.temperature import fit_temperature, fitting_batches
from trainer.model.decoder import Decoder
from trainer.report.progress import Progress
from trainer.report.results import Cell, LossByPosition, wilson_interval


@dataclass(frozen=True)
class Subject:
    """A trained model under its role (``rope``, ``drope``, ``nope``) and the name tables use."""

    role: str
    name: str
    model: Decoder


@dataclass
class Measurements:
    """What was measured; ``roles`` maps a method's role to its name, ``temperature`` a method's
    name to its fitted coefficient."""

    table: list[Cell] = field(default_factory=list)
    loss_by_position: list[LossByPosition] = field(default_factory=list)
    temperature: dict[str, float] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Material:
    """What all methods are measured on: haystacks with needles, and plain held-out text."""

    trials: dict[int, Trials]
    windows: dict[int, Integers]
    end_of_text: int


def prepare_material(
    corpus: Corpus, config: EvaluationConfig, training_length: int, needles: bool
) -> Material:
    """Trials and windows of every length from the test documents."""
    lengths = [training_length * factor for factor in config.lengths]
    trials = {}
    if needles and config.trials:
        vocabulary = NeedleVocabulary.of(corpus.tokenizer)
        counters = np.arange(config.trials)
        windows = windows_with_common_ends(corpus.test, config.trials, lengths)
        for length, text in windows.items():
            text[:, 0] = corpus.end_of_text
            trials[length] = make_trials(text, counters, vocabulary, config.needles, config.seed)
    return Material(
        trials,
        windows_with_common_ends(corpus.test, config.loss_windows, lengths),
        corpus.end_of_text,
    )


def evaluate(
    subjects: list[Subject], corpus: Corpus, needles: NeedlesConfig, config: EvaluationConfig
) -> Measurements:
    """Measure every subject, as it is and with every method that applies to it.

    Args:
        subjects: models of the same training length and tokenizer.
        corpus: held-out text: validation for fitting, test for what is reported.
        needles: the kind of statements the models were trained on; with share 0 no retrieval is
            measured.
        config: lengths, trials, methods.

    Raises:
        UserError: the held-out text is too short for the longest length.
    """
    C = subjects[0].model.layout.training_length
    material = prepare_material(corpus, config, C, bool(needles.share))
    beyond = [C * factor for factor in config.lengths if factor > 1]
    fits = beyond if config.temperature_grid else []
    batches = fitting_batches(corpus, needles, config, fits) if fits else []
    tokens = sum(n.prompts.size for n in material.trials.values())
    tokens += sum(windows.size for windows in material.windows.values())
    fitting = sum(batch["input_ids"].numel() for batch in batches) * len(config.temperature_grid)
    plans = [(s, fixed_methods(s, config), bool(batches) and can_fit(s)) for s in subjects]
    total = sum((len(fixed) + fits) * tokens + fits * fitting for _, fixed, fits in plans)
    results = Measurements()
    with Progress("Evaluating", total) as progress:
        seen = 0

        def done(count: int) -> None:
            nonlocal seen
            seen += count
            progress.advance_to(seen)

        done(0)
        for subject, fixed, fits in plans:
            subject.model.eval()
            methods = list(fixed)
            if fits:
                coefficient = fit_temperature(subject.model, batches, config, done)
                fitted = with_temperature(
                    subject.role, subject.name, subject.model.layout, coefficient
                )
                results.temperature[fitted.name] = coefficient
                methods.append(fitted)
            for method in methods:
                results.roles[method.role] = method.name
                _measure(subject.model, method, material, config, C, results, done)
    return results


def fixed_methods(subject: Subject, config: EvaluationConfig) -> list[Method]:
    """The model as it is and, where something rotates, every rescaling."""
    role, name, layout = subject.role, subject.name, subject.model.layout
    keys = config.rescalings if rotates(layout) else []
    return [as_is(role, name, layout), *(rescaled(role, name, layout, key) for key in keys)]


def can_fit(subject: Subject) -> bool:
    """Whether a temperature is the one thing left to choose."""
    return is_free_of_positions(subject.model.layout)


def _measure(
    model: Decoder,
    method: Method,
    material: Material,
    config: EvaluationConfig,
    training_length: int,
    results: Measurements,
    done: Callable[[int], None],
) -> None:
    trained = model.layout
    try:
        for length, windows in material.windows.items():
            factor = length / training_length
            model.layout = method.layout_at(factor)
            retrieval = interval = None
            if trials := material.trials.get(length):
                hits = successes(model, trials, config.batch_tokens)
                retrieval = sum(hits) / len(hits)
                interval = wilson_interval(sum(hits), len(hits))
                done(trials.prompts.size)
            losses = losses_by_position(model, windows, material.end_of_text, config.batch_tokens)
            done(windows.size)
            last = losses[-training_length:].mean().item()
            results.table.append(Cell(method.name, length, factor, retrieval, interval, last))
            edges, means = by_bucket(losses, max(1, training_length // 2))
            results.loss_by_position.append(LossByPosition(method.name, length, edges, means))
    finally:
        model.layout = trained
