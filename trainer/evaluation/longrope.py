"""Search of LongRoPE's factors on held-out text (LongRoPE, Ding et al. 2024; LongRoPE2, Shang et
al. 2025).

An evolutionary search tries mutations and crossings of the best candidates until the budget is
spent and returns the best one. With ``perplexity`` it uses LongRoPE's search space and the loss of
text; with ``needles`` LongRoPE2's, and the loss of only the answers to questions at the end of
texts that state each answer once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.config import LongRopeSettings, NeedleTaskSettings
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.likelihood import Request, log_likelihoods
from trainer.evaluation.loss import mean_loss
from trainer.evaluation.needles import TOKENS_PER_VALUE, Haystack, hidden, magic_numbers
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout
from trainer.positional.rescaling import (
    longest,
    longrope,
    ntk_aware,
    ntk_by_parts,
    position_interpolation,
)
from trainer.positional.spectrum import Spectrum

Factors = tuple[float, ...]
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
        C, s, spectra = self.layout.training_length, self.factor, self.layout.spectra
        candidates: list[Candidate] = []
        if not self.by_needles:
            candidates.append(tuple((0, (1.0,) * len(each.inv_freq)) for each in spectra))
            before = [longest(spectrum, C) for spectrum in spectra]
            for rescaling in (position_interpolation, ntk_aware, ntk_by_parts):
                after = [rescaling(f, C).frequencies(f, s) for f in before]
                candidates.append(
                    tuple((0, _ratios(f, g)) for f, g in zip(before, after, strict=True))
                )
        for height in (1.0, (1 + HIGHEST) / 2) if self.by_needles else (1.0,):
            for part in CRITICAL:
                pairs = [_near(critical_pair(spectrum, C), part) for spectrum in spectra]
                level = [np.full(len(spectrum.inv_freq), height * s) for spectrum in spectra]
                candidates.append(
                    tuple(
                        (pair if self.by_needles else 0, self._complete(pair, factors))
                        for pair, factors in zip(pairs, level, strict=True)
                    )
                )
        return list(dict.fromkeys(candidates))

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
            count = len(mine[1])
            factors = np.where(generator.random(count) < SHARE, theirs[1], mine[1])
            steps = generator.normal(0, width, count) * (generator.random(count) < SHARE)
            child.append((pair, self._complete(pair, factors * np.exp(steps))))
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
    return _monotone(np.array([f / g if g else 1.0 for f, g in zip(before, after, strict=True)]))


def _monotone(factors: NDArray[np.float64]) -> Factors:
    return tuple(np.maximum.accumulate(factors).tolist())


def with_factors(layout: Layout, factors: Sequence[Factors], layers: LayerChoice = None) -> Layout:
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
    space: Space,
    budget: int = 64,
    seed: int = 0,
    layers: LayerChoice = None,
) -> tuple[Factors, ...]:
    """Return the factors of least loss for every distinct spectrum of ``layers``, in order.

    The model's layout is restored afterwards. ``loss``: computes the loss of the model with its
    layout at the time of the call. ``space``: of ``layers`` of the model's layout. ``budget``:
    number of candidates, starting points first.
    """
    layout = model.layout
    generator = np.random.default_rng(seed)
    tried: dict[Candidate, float] = {}

    def measure(candidate: Candidate) -> None:
        with model.using(with_factors(layout, [factors for _, factors in candidate], layers)):
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
    return tuple(factors for _, factors in min(tried, key=tried.__getitem__))


def fitted_layout(
    fitting: Fitting,
    settings: LongRopeSettings,
    factor: float,
    layout: Layout,
    layers: LayerChoice = None,
) -> Layout:
    """Return the layout with factors for ``layers`` that are searched on the held-out texts of the
    length, more than the training length."""
    model, text = fitting.model, fitting.text
    length, by_needles = round(factor * model.layout.training_length), settings.search == "needles"

    def loss() -> float:
        if by_needles:
            return answer_loss(model, text.needles[length], fitting.batch_tokens)
        windows = text.spread(settings.windows, length)
        return mean_loss(model, windows, text.first_token, fitting.batch_tokens)

    space = Space(layout.of_layers(layers), factor, by_needles)
    with model.using(layout):
        factors = search_longrope(model, loss, space, settings.evaluations, layers=layers)
    return with_factors(layout, factors, layers)


def needle_requests(haystack: Haystack, count: int, length: int) -> list[Request]:
    """Make texts of ``length`` tokens that state a number once, as in the task ``standard``, and
    end with a question and this number, which is asked for.

    The needle of text n of N, counted from 0, is at the depth (n + 1/2) / N.

    Raises:
        UserError: the needle does not fit the length, or the text is too short.
    """
    requests = []
    for number in range(count):
        settings = NeedleTaskSettings(trials=1, seed=number)
        longer, depth = length + TOKENS_PER_VALUE, (number + 0.5) / count
        (prompt,) = hidden(haystack, settings, longer, magic_numbers, depths=(depth,))
        answer = haystack.encode(f" {prompt.answers[0]}")
        # Cut behind the first tokens: answers have different numbers of tokens.
        behind = prompt.tokens[len(haystack.bos) + len(answer) :]
        requests.append(Request((*haystack.bos, *behind), tuple(answer)))
    return requests


def answer_loss(model: LanguageModel, requests: Sequence[Request], batch_tokens: int) -> float:
    """Return the mean over texts of the mean loss of their answers' tokens, in nats.

    This is needle-driven perplexity (LongRoPE2).
    """
    results = log_likelihoods(model, requests, batch_tokens)
    losses = [
        -log_likelihood / len(request.continuation)
        for request, (log_likelihood, _) in zip(requests, results, strict=True)
    ]
    return sum(losses) / len(losses)
