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
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.config import LongRopeSettings
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.loss import answer_loss, mean_loss
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout
from trainer.positional.rescaling import (
    Rescaling,
    longest,
    longrope,
    ntk_aware,
    ntk_by_parts,
    position_interpolation,
)
from trainer.positional.spectrum import Spectrum

Factors = tuple[float, ...]
LongRopeFactors = tuple[Factors, ...]
"""One factor for each pair of each distinct spectrum in the changed layers; empty if no head
rotates."""
Candidate = tuple[tuple[int, Factors], ...]
"""A critical pair (0: none) and the factors of all pairs, for every distinct spectrum."""
PARENTS = 8
"""Number of best candidates from which new ones descend."""
HIGHEST = 1.25
"""The largest factor, in units of s (LongRoPE, Table 4)."""
SHARE = 0.3
"""Share of the pairs that a mutation changes, or that a crossing takes from the other parent."""
CRITICAL = (1.0, 0.9, 0.8, 0.7)
"""Critical pairs to begin with, in units of the theoretical one."""


@dataclass(frozen=True)
class Space:
    """Candidates for ``factor``, s; factors are non-decreasing from fast to slow pairs.

    LongRoPE's space has factors from 1 to :data:`HIGHEST` s and no critical pair. LongRoPE2's, with
    ``by_needles``, has a critical pair between 0.7 of the theoretical one and that one, and factors
    from s to :data:`HIGHEST` s from it on. Faster pairs have NTK-aware scaling that reaches the
    critical pair's factor there.
    """

    layout: Layout
    factor: float
    by_needles: bool = False

    def starts(self) -> list[Candidate]:
        """Return the starting points of the search.

        LongRoPE starts from the unchanged model, PI, NTK-aware and NTK-by-parts scaling, and
        NTK-aware scaling up to a critical pair. LongRoPE2 starts from s, or the middle of its
        factors, from a critical pair on.
        """
        known: list[Callable[[Spectrum], tuple[int, Factors]]]
        if self.by_needles:
            known = [
                partial(self._from_critical, part=part, height=height)
                for height in (1.0, (1 + HIGHEST) / 2)
                for part in CRITICAL
            ]
        else:
            rescalings = (position_interpolation, ntk_aware, ntk_by_parts)
            known = [
                lambda s: (0, _ratios(s.inv_freq, s.inv_freq)),
                *(partial(self._rescaled, by=rescaling) for rescaling in rescalings),
                *(partial(self._from_critical, part=part) for part in CRITICAL),
            ]
        return list(dict.fromkeys(tuple(map(make, self.layout.spectra)) for make in known))

    def _rescaled(self, spectrum: Spectrum, by: Rescaling) -> tuple[int, Factors]:
        C = self.layout.training_length
        inv_freq = longest(spectrum, C)
        return 0, _ratios(inv_freq, by(inv_freq, C).frequencies(inv_freq, self.factor))

    def _from_critical(
        self, spectrum: Spectrum, part: float, height: float = 1.0
    ) -> tuple[int, Factors]:
        pair = _near(critical_pair(spectrum, self.layout.training_length), part)
        factors = self._complete(pair, np.full(len(spectrum.inv_freq), height * self.factor))
        return (pair if self.by_needles else 0), factors

    def child(
        self, first: Candidate, second: Candidate, generator: np.random.Generator
    ) -> Candidate:
        """Return a mutation of a crossing of two parents."""
        # Small steps refine, large ones explore the range of the factors.
        if self.by_needles:
            width = math.log(HIGHEST) * generator.choice([0.1, 0.5])
        else:
            width = math.log(self.factor) * generator.choice([0.02, 0.1, 0.5])
        child = []
        for spectrum, mine, theirs in zip(self.layout.spectra, first, second, strict=True):
            pair = 0
            if self.by_needles:
                latest = critical_pair(spectrum, self.layout.training_length)
                moved = (mine, theirs)[generator.integers(2)][0] + generator.integers(-1, 2)
                pair = int(np.clip(moved, _near(latest, min(CRITICAL)), latest))
            varied = _varied(mine[1], theirs[1], width, generator)
            child.append((pair, self._complete(pair, varied)))
        return tuple(child)

    def _complete(self, pair: int, factors: NDArray[np.float64]) -> Factors:
        """Keep factors from ``pair`` on within their limits, and derive those before it.

        Before it, NTK-aware scaling reaches the pair's factor; if no pair is as slow, it reaches s.
        """
        least = self.factor if self.by_needles else 1.0
        slow = np.clip(factors[pair:], least, HIGHEST * self.factor)
        reached = slow[0] if len(slow) else self.factor
        fast = reached ** (np.arange(min(pair, len(factors))) / max(pair, 1))
        return _monotone(np.concatenate([fast, slow]))


def factors_of(candidate: Candidate) -> LongRopeFactors:
    """Return factors for each distinct spectrum of the layout, in its order."""
    return tuple(factors for _, factors in candidate)


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


def with_factors(layout: Layout, factors: LongRopeFactors, layers: LayerChoice = None) -> Layout:
    """Set factors beyond the training length for the distinct spectra of ``layers``, in order.

    Raises:
        ValueError: the number of factors differs from the number of spectra or pairs.
    """
    by_spectrum = dict(zip(layout.of_layers(layers).spectra, factors, strict=True))
    C = layout.training_length

    def changed(spectrum: Spectrum) -> Spectrum:
        return longrope(spectrum, (1.0,) * len(spectrum.inv_freq), by_spectrum[spectrum], C)

    return layout.map(changed, layout.chosen(layers))


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
    space = Space(layout.of_layers(layers), factor, search == "needles")
    generator = np.random.default_rng(seed)
    tried: dict[Candidate, float] = {}

    def measure(candidate: Candidate) -> None:
        with model.using(with_factors(layout, factors_of(candidate), layers)):
            result = loss()
        tried[candidate] = result if math.isfinite(result) else math.inf

    for start in space.starts()[:budget]:
        measure(start)
    misses = 0
    while len(tried) < budget and misses < budget:
        parents = sorted(tried, key=tried.__getitem__)[:PARENTS]
        first, second = (parents[i] for i in generator.integers(len(parents), size=2))
        child = space.child(first, second, generator)
        if child in tried:
            misses += 1
        else:
            measure(child)
    return factors_of(min(tried, key=tried.__getitem__))


def fitted_factors(
    fitting: Fitting,
    settings: LongRopeSettings,
    factor: float,
    layout: Layout,
    layers: LayerChoice = None,
) -> LongRopeFactors:
    """Search factors for ``layers`` of a layout on the held-out texts of the length."""
    model, text = fitting.model, fitting.text
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
