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
from functools import partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from trainer.config import LongRopeSettings, NeedleTaskSettings
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.likelihood import Request, log_likelihoods
from trainer.evaluation.needles import TOKENS_PER_VALUE, Haystack, standard
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout
from trainer.positional.rescaling import (
    long_frequencies,
    longrope,
    ntk_aware,
    ntk_by_parts,
    position_interpolation,
)
from trainer.positional.spectrum import Spectrum

Array = NDArray[np.float64]
Factors = tuple[float, ...]
Candidate = tuple[tuple[int, Factors], ...]
"""A critical pair (0: none) and the factors of all pairs, for every distinct spectrum; factors are
non-decreasing from fast to slow pairs."""
PARENTS = 8
"""Number of best candidates from which new ones descend."""
HIGHEST = 1.25
"""The largest factor, in units of s (LongRoPE, Table 4)."""
SHARE = 0.3
"""Share of the pairs that a mutation changes, or that a crossing takes from the other parent."""
CRITICAL = (1.0, 0.9, 0.8, 0.7)
"""Critical pairs to begin with, in units of the theoretical one."""


def longrope_starts(layout: Layout, s: float) -> list[Candidate]:
    """Return LongRoPE's starting points: the unchanged model, PI, NTK-aware and NTK-by-parts
    scaling, and NTK-aware scaling up to a critical pair with the factor s from there on."""
    C = layout.training_length
    before = [long_frequencies(spectrum, C).inv_freq for spectrum in layout.spectra]
    starts = [[(1.0,) * len(frequencies) for frequencies in before]]
    for rescaling in (position_interpolation, ntk_aware, ntk_by_parts):
        starts.append([_ratios(f, rescaling(f, C).frequencies(f, s)) for f in before])
    starts += [_factors(_critical_start(layout, s, part, 1.0)) for part in CRITICAL]
    return [tuple((0, factors) for factors in start) for start in starts]


def longrope_child(
    layout: Layout, s: float, first: Candidate, second: Candidate, generator: Generator
) -> Candidate:
    """Return a mutation of a crossing of two parents, with factors from 1 to :data:`HIGHEST` s."""
    # Small steps refine, large ones explore the range of the factors.
    width = math.log(s) * generator.choice([0.02, 0.1, 0.5])
    return tuple(
        (0, _monotone(_mutated(mine, theirs, width, generator).clip(1, HIGHEST * s)))
        for (_, mine), (_, theirs) in zip(first, second, strict=True)
    )


def longrope2_starts(layout: Layout, s: float) -> list[Candidate]:
    """Return LongRoPE2's starting points: the factor s, or the middle of the range of factors, from
    a critical pair on."""
    heights = 1.0, (1 + HIGHEST) / 2
    return [_critical_start(layout, s, part, height) for height in heights for part in CRITICAL]


def longrope2_child(
    layout: Layout, s: float, first: Candidate, second: Candidate, generator: Generator
) -> Candidate:
    """Return a mutation of a crossing of two parents.

    The critical pair lies between 0.7 of the theoretical one and that one, and the factors from it
    on between s and :data:`HIGHEST` s.
    """
    width = math.log(HIGHEST) * generator.choice([0.1, 0.5])
    child = []
    for spectrum, mine, theirs in zip(layout.spectra, first, second, strict=True):
        latest = critical_pair(spectrum, layout.training_length)
        moved = (mine, theirs)[generator.integers(2)][0] + generator.integers(-1, 2)
        pair = int(np.clip(moved, _near(latest, min(CRITICAL)), latest))
        factors = _mutated(mine[1], theirs[1], width, generator).clip(s, HIGHEST * s)
        child.append((pair, _completed(pair, factors, s)))
    return tuple(child)


SPACES = {
    "perplexity": (longrope_starts, longrope_child),
    "needles": (longrope2_starts, longrope2_child),
}
"""Starting points and descendants by ``evaluation.longrope.search``."""


def _critical_start(layout: Layout, s: float, part: float, height: float) -> Candidate:
    """Return the candidate with factors ``height`` s from ``part`` of the critical pair on."""
    pairs = [_near(critical_pair(x, layout.training_length), part) for x in layout.spectra]
    levels = [np.full(len(x.inv_freq), height * s) for x in layout.spectra]
    return tuple((m, _completed(m, x, s)) for m, x in zip(pairs, levels, strict=True))


def _mutated(mine: Factors, theirs: Factors, width: float, generator: Generator) -> Array:
    """Cross two parents' factors, and change some by random steps of their logarithms."""
    count = len(mine)
    factors = np.where(generator.random(count) < SHARE, theirs, mine)
    steps = generator.normal(0, width, count) * (generator.random(count) < SHARE)
    return factors * np.exp(steps)


def _completed(pair: int, factors: Array, s: float) -> Factors:
    """Replace the factors before the critical ``pair`` by NTK-aware scaling that reaches the pair's
    factor, or s if no pair is as slow."""
    slow = factors[pair:]
    reached = slow[0] if len(slow) else s
    fast = reached ** (np.arange(min(pair, len(factors))) / max(pair, 1))
    return _monotone(np.concatenate([fast, slow]))


def critical_pair(spectrum: Spectrum, training_length: int) -> int:
    """Return the first pair that does not complete a turn in the training length, at least 1
    (LongRoPE2).

    Leading pairs with frequency 0 count as fast ones that a drop removed.
    """
    inv_freq = long_frequencies(spectrum, training_length).inv_freq
    turns = np.array(inv_freq) * training_length / (2 * math.pi)
    first = int(np.argmax(turns > 0)) if turns.any() else 0
    return max(1, first + int((turns[first:] >= 1).sum()))


def _near(pair: int, part: float) -> int:
    return max(1, round(part * pair))


def _factors(candidate: Candidate) -> list[Factors]:
    return [factors for _, factors in candidate]


def _ratios(before: Factors, after: Factors) -> Factors:
    """Return the divisors of the frequencies; a pair with frequency 0 takes its predecessor's."""
    return _monotone(np.array([f / g if g else 1.0 for f, g in zip(before, after, strict=True)]))


def _monotone(factors: Array) -> Factors:
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


def search(
    starts: Sequence[Candidate],
    child: Callable[[Candidate, Candidate, Generator], Candidate],
    loss: Callable[[Candidate], float],
    budget: int,
    seed: int = 0,
) -> Candidate:
    """Return the candidate of least ``loss`` of ``budget`` ones, the ``starts`` first."""
    generator = np.random.default_rng(seed)
    tried: dict[Candidate, float] = {}

    def measure(candidate: Candidate) -> None:
        result = loss(candidate)
        tried[candidate] = result if math.isfinite(result) else math.inf

    for start in list(dict.fromkeys(starts))[:budget]:
        measure(start)
    misses = 0
    while len(tried) < budget and misses < budget:
        parents = sorted(tried, key=tried.__getitem__)[:PARENTS]
        first, second = (parents[i] for i in generator.integers(len(parents), size=2))
        descendant = child(first, second, generator)
        if descendant in tried:
            misses += 1
        else:
            measure(descendant)
    return min(tried, key=tried.__getitem__)


def fitted_layout(
    fitting: Fitting,
    settings: LongRopeSettings,
    factor: float,
    layout: Layout,
    layers: LayerChoice = None,
) -> Layout:
    """Return the layout with factors for ``layers`` that are searched on the held-out texts of the
    length, more than the training length."""
    model, text, windows = fitting.model, fitting.text, settings.windows
    length = round(factor * model.layout.training_length)
    text_loss: Callable[[], float]
    if settings.search == "needles":
        requests = needle_requests(text.held_out.haystack, windows, length)
        text_loss = partial(answer_loss, model, requests, fitting.batch_tokens)
    else:
        text_loss = partial(fitting.loss, text.spread(windows, length))

    def loss(candidate: Candidate) -> float:
        with model.using(with_factors(layout, _factors(candidate), layers)):
            return text_loss()

    searched = layout.of_layers(layers)
    starts, child = SPACES[settings.search]
    child = partial(child, searched, factor)
    best = search(starts(searched, factor), child, loss, settings.evaluations)
    return with_factors(layout, _factors(best), layers)


def needle_requests(haystack: Haystack, count: int, length: int) -> list[Request]:
    """Make texts of ``length`` tokens that state a number once, as in the task ``standard``, and
    end with a question and this number, which is asked for.

    The needle of text n of N, counted from 0, is at the depth (n + 1/2) / N.

    Raises:
        UserError: the needle does not fit the length, or the text is too short.
    """
    requests = []
    for number in range(count):
        depth = (number + 0.5) / count
        settings = NeedleTaskSettings(trials=1, seed=number, depths=(depth,))
        (prompt,) = standard(haystack, settings, length + TOKENS_PER_VALUE)
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
