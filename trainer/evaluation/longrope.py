"""Search of LongRoPE's factors on held-out text (LongRoPE, Ding et al. 2024; LongRoPE2, Shang et
al. 2025).

An evolutionary search tries mutations and crossings of the best candidates until the budget is
spent and returns the best one. With ``perplexity`` it uses LongRoPE's search space and the loss of
text; with ``needles`` LongRoPE2's, and the loss of only the answers to questions at the end of
texts that state each answer once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from trainer.common.errors import UserError
from trainer.evaluation.factor_spaces import EveryPair, FromCriticalPair, Individual, Space
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.layouts import LongRopeFactors, with_factors
from trainer.evaluation.loss import losses_by_position
from trainer.evaluation.needle_loss import answer_loss
from trainer.evaluation.settings import LongRopeSettings
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout

PARENTS = 8
SPACES: dict[str, Callable[[Layout, float], Space]] = {
    "perplexity": EveryPair,
    "needles": FromCriticalPair,
}


def search_longrope(
    model: LanguageModel,
    loss: Callable[[], float],
    factor: float,
    search: Literal["perplexity", "needles"] = "perplexity",
    budget: int = 64,
    seed: int = 0,
    layers: LayerChoice = None,
) -> LongRopeFactors:
    """Return the factors of least loss; deterministic for a given seed.

    Args:
        model: a decoder; its layout is restored afterwards.
        loss: loss of the model with its layout at the time of the call.
        factor: s, the extension factor, more than 1.
        search: search space, see :mod:`trainer.evaluation.factor_spaces`.
        budget: number of candidates. The starting points come first.
        seed: seed of the search.
        layers: layers whose frequencies are divided.

    Returns:
        Factors for every distinct spectrum of these layers, in order; see
            :func:`trainer.evaluation.layouts.with_factors`.
    """
    layout = model.layout
    space = SPACES[search](layout.of_layers(layers), factor)
    generator = np.random.default_rng(seed)
    tried: dict[Individual, float] = {}

    def measure(individual: Individual) -> None:
        with model.using(with_factors(layout, space.factors(individual), layers)):
            tried[individual] = loss()

    for individual in space.starts()[:budget]:
        measure(individual)
    misses = 0
    while len(tried) < budget and misses < budget:
        parents = sorted(tried, key=tried.__getitem__)[:PARENTS]
        one, other = (parents[i] for i in generator.integers(len(parents), size=2))
        child = space.child(one, other, generator)
        if child in tried:
            misses += 1
        else:
            measure(child)
    return space.factors(min(tried, key=tried.__getitem__))


def fitted_factors(
    fitting: Fitting,
    settings: LongRopeSettings,
    factor: float,
    layout: Layout,
    layers: LayerChoice = None,
) -> LongRopeFactors:
    """Search factors for ``layers`` of a layout on the held-out texts of the length.

    Raises:
        UserError: no head rotates.
    """
    model, text = fitting.model, fitting.text
    if not layout.rotates:
        raise UserError.at("evaluation.methods", "longrope needs heads that rotate; none does.")
    length = round(factor * model.layout.training_length)

    def of_text() -> float:
        windows = text.windows[length][: settings.windows]
        fitting.read(*windows.shape)
        return (
            losses_by_position(model, windows, text.end_of_text, fitting.batch_tokens).mean().item()
        )

    def of_answers() -> float:
        asked = text.needles[length]
        fitting.read(*asked.tokens.shape)
        return answer_loss(model, asked, fitting.batch_tokens)

    loss = of_answers if settings.search == "needles" else of_text
    with model.using(layout):
        return search_longrope(
            model, loss, factor, settings.search, settings.evaluations, settings.seed, layers
        )
