"""Search of LongRoPE's factors on held-out text (LongRoPE, Ding et al. 2024; LongRoPE2, Shang et
al. 2025).

An evolutionary search tries mutations and crossings of the best candidates until the budget is
spent and returns the best one. With ``perplexity`` it uses LongRoPE's search space and the loss of
text; with ``needles`` LongRoPE2's, and the loss of only the answers to questions at the end of
texts that state each answer once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.common.errors import UserError
from trainer.config import LongRopeSettings
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.layouts import LongRopeFactors, with_factors
from trainer.evaluation.loss import answer_loss, mean_loss
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout
from trainer.positional.rescaling import (
    Rescaling,
    longest,
    ntk_aware,
    ntk_by_parts,
    position_interpolation,
)
from trainer.positional.spectrum import Spectrum

Factors = tuple[float, ...]
PairsAndFactors = tuple[tuple[int, Factors], ...]
"""A critical pair and the factors of all pairs, for every distinct spectrum."""
PARENTS = 8
"""Number of best candidates from which new ones descend."""
HIGHEST = 1.25
"""The largest factor, in units of s (LongRoPE, Table 4)."""
SHARE = 0.3
"""Share of the pairs that a mutation changes, or that a crossing takes from the other parent."""
CRITICAL = (1.0, 0.9, 0.8, 0.7)
"""Critical pairs to begin with, in units of the theoretical one."""


@dataclass(frozen=True)
class EveryPair:
    """LongRoPE's space: factors from 1 to :data:`HIGHEST` s, non-decreasing from fast to slow
    pairs.

    Starts from the unchanged model, PI, NTK-aware and NTK-by-parts scaling, and NTK-aware scaling
    up to a critical pair.
    """

    layout: Layout
    factor: float

    def starts(self) -> list[LongRopeFactors]:
        """Return the starting points of the search."""
        C, spectra = self.layout.training_length, self.layout.spectra

        def by(rescaling: Rescaling) -> Callable[[Spectrum], Factors]:
            def ratios(spectrum: Spectrum) -> Factors:
                inv_freq = longest(spectrum, C)
                return _ratios(inv_freq, rescaling(inv_freq, C).frequencies(inv_freq, self.factor))

            return ratios

        known = [
            lambda s: _ratios(s.inv_freq, s.inv_freq),
            *map(by, (position_interpolation, ntk_aware, ntk_by_parts)),
            *(lambda s, part=part: self._up_to_critical(s, part) for part in CRITICAL),
        ]
        return list(dict.fromkeys(tuple(make(s) for s in spectra) for make in known))

    def _up_to_critical(self, spectrum: Spectrum, part: float) -> Factors:
        pair = _near(critical_pair(spectrum, self.layout.training_length), part)
        whole = np.full(len(spectrum.inv_freq), self.factor)
        return _monotone(_ntk_below(pair, whole, self.factor))

    def child(
        self, first: LongRopeFactors, second: LongRopeFactors, generator: np.random.Generator
    ) -> LongRopeFactors:
        """Return a mutation of a crossing of two parents."""
        # Small steps refine, large ones explore; the whole range is ln s.
        width = math.log(self.factor) * generator.choice([0.02, 0.1, 0.5])
        highest = HIGHEST * self.factor
        return tuple(
            _monotone(np.clip(_varied(mine, theirs, width, generator), 1, highest))
            for mine, theirs in zip(first, second, strict=True)
        )

    def factors(self, individual: LongRopeFactors) -> LongRopeFactors:
        """Return factors for each distinct spectrum of the layout, in its order."""
        return individual


@dataclass(frozen=True)
class FromCriticalPair:
    """LongRoPE2's space: a critical pair, and non-decreasing factors from it on.

    The critical pair lies between 0.7 of the theoretical one and that one; factors range from s to
    :data:`HIGHEST` s. Faster pairs have NTK-aware scaling that reaches the critical pair's factor
    there.
    """

    layout: Layout
    factor: float

    def starts(self) -> list[PairsAndFactors]:
        """Return the starting points of the search."""
        heights = (1.0, (1 + HIGHEST) / 2)
        starts = [
            tuple(
                self._whole(_near(self._critical(s), part), np.full(len(s.inv_freq), height), s)
                for s in self.layout.spectra
            )
            for height in heights
            for part in CRITICAL
        ]
        return list(dict.fromkeys(starts))

    def child(
        self, first: PairsAndFactors, second: PairsAndFactors, generator: np.random.Generator
    ) -> PairsAndFactors:
        """Return a mutation of a crossing of two parents."""
        width = math.log(HIGHEST) * generator.choice([0.1, 0.5])
        child = []
        for spectrum, mine, theirs in zip(self.layout.spectra, first, second, strict=True):
            latest = self._critical(spectrum)
            moved = (mine, theirs)[generator.integers(2)][0] + generator.integers(-1, 2)
            pair = int(np.clip(moved, _near(latest, min(CRITICAL)), latest))
            varied = _varied(mine[1], theirs[1], width, generator)
            child.append(self._whole(pair, varied / self.factor, spectrum))
        return tuple(child)

    def factors(self, individual: PairsAndFactors) -> LongRopeFactors:
        """Return factors for each distinct spectrum of the layout, in its order."""
        return tuple(factors for _, factors in individual)

    def _critical(self, spectrum: Spectrum) -> int:
        return critical_pair(spectrum, self.layout.training_length)

    def _whole(
        self, pair: int, heights: NDArray[np.float64], spectrum: Spectrum
    ) -> tuple[int, Factors]:
        """Complete ``heights`` (in units of s), given from the critical pair on."""
        slow = np.maximum.accumulate(np.clip(heights[pair:], 1, HIGHEST)) * self.factor
        factors = np.concatenate([np.ones(min(pair, len(heights))), slow])
        return pair, tuple(_ntk_below(pair, factors, self.factor).tolist())


def critical_pair(spectrum: Spectrum, training_length: int) -> int:
    """Return the first pair that does not complete a turn in the training length, at least 1
    (LongRoPE2).

    Leading pairs with frequency 0 count as fast ones that a drop removed.
    """
    turns = np.array(longest(spectrum, training_length)) * training_length / (2 * math.pi)
    first = int(np.argmax(turns > 0)) if turns.any() else 0
    return max(1, first + int((turns[first:] >= 1).sum()))


def _near(pair: int, part: float) -> int:
    return max(1, round(part * pair))


def _ntk_below(pair: int, factors: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Apply NTK-aware scaling to the pairs before ``pair`` such that it reaches that pair's factor.

    If no pair is as slow, it reaches s.
    """
    reached = factors[pair] if pair < len(factors) else factor
    places = np.arange(len(factors))
    return np.where(places < pair, reached ** (places / pair), factors)


def _ratios(before: Factors, after: Factors) -> Factors:
    """Return the divisors of the frequencies; a pair with frequency 0 takes its predecessor's."""
    ratios = [f / g if g else 1.0 for f, g in zip(before, after, strict=True)]
    return _monotone(np.array(ratios))


def _monotone(factors: NDArray[np.float64]) -> Factors:
    return tuple(np.maximum.accumulate(factors).tolist())


def _varied(
    mine: Factors, theirs: Factors, width: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Take some factors from the other parent, and change some by ``width`` on a log scale."""
    factors = np.where(generator.random(len(mine)) < SHARE, theirs, mine)
    steps = generator.normal(0, width, len(mine)) * (generator.random(len(mine)) < SHARE)
    return factors * np.exp(steps)


def search_longrope(
    model: LanguageModel,
    loss: Callable[[], float],
    factor: float,
    search: Literal["perplexity", "needles"] = "perplexity",
    budget: int = 64,
    seed: int = 0,
    layers: LayerChoice = None,
) -> LongRopeFactors:
    """Return the factors of least loss for every distinct spectrum of ``layers``, in order.

    The model's layout is restored afterwards. ``loss``: computes the loss of the model with its
    layout at the time of the call. ``factor``: s, more than 1. ``search``: the search space, see
    :mod:`trainer.evaluation.longrope`. ``budget``: number of candidates, starting points first.
    """
    layout = model.layout
    make_space = FromCriticalPair if search == "needles" else EveryPair
    space: Any = make_space(layout.of_layers(layers), factor)
    generator = np.random.default_rng(seed)
    tried: dict[Any, float] = {}

    def measure(individual: Any) -> None:
        with model.using(with_factors(layout, space.factors(individual), layers)):
            result = loss()
        tried[individual] = result if math.isfinite(result) else math.inf

    for individual in space.starts()[:budget]:
        measure(individual)
    misses = 0
    while len(tried) < budget and misses < budget:
        parents = sorted(tried, key=tried.__getitem__)[:PARENTS]
        first, second = (parents[i] for i in generator.integers(len(parents), size=2))
        child = space.child(first, second, generator)
        if child in tried:
            misses += 1
        else:
            measure(child)
    best: LongRopeFactors = space.factors(min(tried, key=tried.__getitem__))
    return best


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
        raise UserError("evaluation.methods: longrope needs heads that rotate")
    length = round(factor * model.layout.training_length)

    def text_loss() -> float:
        windows = text.spread(settings.windows, length)
        return mean_loss(model, windows, text.first_token, fitting.batch_tokens)

    def needle_loss() -> float:
        return answer_loss(model, text.needles[length], fitting.batch_tokens)

    loss = needle_loss if settings.search == "needles" else text_loss
    with model.using(layout):
        return search_longrope(
            model, loss, factor, settings.search, settings.evaluations, layers=layers
        )
