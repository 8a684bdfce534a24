"""Search of LongRoPE's factors on held-out text (LongRoPE, Ding et al. 2024; LongRoPE2, Shang et
al. 2025).

An evolutionary search tries mutations and crossings of the best candidates until the budget is
spent and returns the best one. With ``perplexity`` it uses LongRoPE's search space and the loss of
text; with ``needles`` LongRoPE2's, and the loss of only the answers to questions at the end of
texts that state each answer once.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from trainer.config import EvaluationConfig, NeedleTaskSettings
from trainer.evaluation.fitting import FitText, LayoutAt, Notes
from trainer.evaluation.held_out import Haystack
from trainer.evaluation.likelihood import Request, log_likelihoods
from trainer.evaluation.method import far_rotation, method, own_decoder
from trainer.evaluation.needles import TOKENS_PER_VALUE, standard
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout
from trainer.positional.rescaling import (
    long_frequencies,
    longrope,
    ntk_aware,
    ntk_by_parts,
    position_interpolation,
)
from trainer.positional.spectrum import Frequencies, Spectrum

Array = NDArray[np.float64]
Factors = tuple[float, ...]
"""Factors that divide a spectrum's frequencies, non-decreasing from fast to slow pairs."""
Candidate = tuple[Factors, ...]
"""Factors of every distinct spectrum of a layout, in order."""
Loss = Callable[[Candidate], float]
PARENTS = 8
"""Number of best candidates from which new ones descend."""
HIGHEST = 1.25
"""The largest factor, in units of s (LongRoPE, Table 4)."""
SHARE = 0.3
"""Share of the pairs that a mutation changes, or that a crossing takes from the other parent."""
CRITICAL = (1.0, 0.9, 0.8, 0.7)
"""Critical pairs to begin with, in units of the theoretical one."""


@method("longrope", "LongRoPE", own_decoder, far_rotation, is_fitted=True, reads=("longrope",))
def fit_longrope(
    before: LayoutAt, model: LanguageModel, text: FitText, config: EvaluationConfig, notes: Notes
) -> LayoutAt:
    """Divide each pair by its own factor beyond the training length, searched at each length on
    texts of that length."""
    settings, layers, batch_tokens = config.longrope, config.layers, config.batch_tokens

    def layout_at(s: float) -> Layout:
        layout = before(s)
        if s <= 1:
            return layout
        length = round(s * layout.training_length)
        if settings.search == "needles":
            search = longrope2_factors
            requests = needle_requests(text.held_out.haystack, settings.windows, length)
            text_loss = partial(answer_loss, model, requests, batch_tokens)
        else:
            search = longrope_factors
            windows = text.windows(length, settings.windows)
            text_loss = partial(text.loss, model, windows, batch_tokens)

        def loss(factors: Candidate) -> float:
            with model.using(with_factors(layout, factors, layers)):
                return text_loss()

        best = search(layout.of_layers(layers), s, loss, settings.evaluations)
        return with_factors(layout, best, layers)

    return layout_at


def longrope_factors(layout: Layout, s: float, loss: Loss, budget: int, seed: int = 0) -> Candidate:
    """Search factors from 1 to :data:`HIGHEST` s (LongRoPE).

    The search starts from the unchanged model, PI, NTK-aware and NTK-by-parts scaling, and
    NTK-aware scaling up to a critical pair with the factor s from there on.
    """
    C = layout.training_length
    generator = np.random.default_rng(seed)
    trained = [long_frequencies(spectrum, C).inv_freq for spectrum in layout.spectra]
    starts = [tuple((1.0,) * len(inv_freq) for inv_freq in trained)]
    for rescaling in (position_interpolation, ntk_aware, ntk_by_parts):
        slowed = [rescaling(inv_freq, C).frequencies(inv_freq, s) for inv_freq in trained]
        starts.append(tuple(map(_ratios, trained, slowed)))
    for share in CRITICAL:
        starts.append(_whole(layout, _from_critical(layout, share, s), s))

    def child(first: Candidate, second: Candidate) -> Candidate:
        # Small steps refine, large ones explore the range of the factors.
        width = math.log(s) * generator.choice([0.02, 0.1, 0.5])
        return tuple(
            _rising(_mutated(mine, theirs, width, generator).clip(1, HIGHEST * s))
            for mine, theirs in zip(first, second, strict=True)
        )

    return evolve(starts, child, loss, budget, generator)


def longrope2_factors(
    layout: Layout, s: float, loss: Loss, budget: int, seed: int = 0
) -> Candidate:
    """Search factors from s to :data:`HIGHEST` s for the pairs from a critical one on, which is
    searched from 0.7 of the theoretical one to that one (LongRoPE2).

    Pairs before the critical one follow NTK-aware scaling. The search starts with the factor s, or
    the middle of the range, from a critical pair on.
    """
    C = layout.training_length
    generator = np.random.default_rng(seed)
    levels = s, (1 + HIGHEST) / 2 * s
    # A candidate has the factors from its critical pairs on.
    starts = [_from_critical(layout, share, level) for level in levels for share in CRITICAL]

    def child(first: Candidate, second: Candidate) -> Candidate:
        width = math.log(HIGHEST) * generator.choice([0.1, 0.5])
        spectra = []
        for spectrum, mine, theirs in zip(layout.spectra, first, second, strict=True):
            n = len(spectrum.inv_freq)
            parent = theirs if generator.integers(2) else mine
            pair = n - len(parent) + generator.integers(-1, 2)
            earliest = critical_pair(spectrum, C, min(CRITICAL))
            critical = np.clip(pair, earliest, critical_pair(spectrum, C))
            parents = _completed(mine, n, s), _completed(theirs, n, s)
            factors = _mutated(*parents, width, generator).clip(s, HIGHEST * s)
            spectra.append(_rising(factors[critical:]))
        return tuple(spectra)

    best = evolve(starts, child, lambda slow: loss(_whole(layout, slow, s)), budget, generator)
    return _whole(layout, best, s)


def evolve(
    starts: Sequence[Candidate],
    child: Callable[[Candidate, Candidate], Candidate],
    loss: Loss,
    budget: int,
    generator: Generator,
) -> Candidate:
    """Return the candidate of least ``loss`` of ``budget`` ``starts`` and descendants."""
    waiting = list(dict.fromkeys(starts))
    misses = 0
    tried: dict[Candidate, float] = {}
    while len(tried) < budget and misses < budget:
        if waiting:
            candidate = waiting.pop(0)
        else:
            parents = sorted(tried, key=tried.__getitem__)[:PARENTS]
            first, second = generator.integers(len(parents), size=2)
            candidate = child(parents[first], parents[second])
        if candidate in tried:
            misses += 1
        else:
            result = loss(candidate)
            tried[candidate] = result if math.isfinite(result) else math.inf
    return min(tried, key=tried.__getitem__)


def _from_critical(layout: Layout, share: float, factor: float) -> Candidate:
    """Return ``factor`` for the pairs from ``share`` of every spectrum's critical pair on."""
    return tuple(
        (factor,) * (len(x.inv_freq) - critical_pair(x, layout.training_length, share))
        for x in layout.spectra
    )


def _whole(layout: Layout, slow: Candidate, s: float) -> Candidate:
    """Return factors of all pairs of every spectrum, from those of its ``slow`` ones."""
    each = zip(slow, layout.spectra, strict=True)
    return tuple(_completed(x, len(spectrum.inv_freq), s) for x, spectrum in each)


def _completed(slow: Factors, count: int, s: float) -> Factors:
    """Return factors of ``count`` pairs: NTK-aware scaling up to the first of the ``slow`` pairs,
    or up to s if there is none."""
    fast = count - len(slow)
    reached = slow[0] if slow else s
    return (*(reached ** (np.arange(fast) / max(fast, 1))).tolist(), *slow)


def _mutated(mine: Factors, theirs: Factors, width: float, generator: Generator) -> Array:
    """Cross two parents' factors, and change some by random steps of their logarithms."""
    count = len(mine)
    factors = np.where(generator.random(count) < SHARE, theirs, mine)
    steps = generator.normal(0, width, count) * (generator.random(count) < SHARE)
    return factors * np.exp(steps)


def _ratios(before: Frequencies, after: Frequencies) -> Factors:
    """Return the divisors of the frequencies; a pair with frequency 0 takes its predecessor's."""
    factors = np.ones(len(before))
    np.divide(before, after, out=factors, where=np.array(after) != 0)
    return _rising(factors)


def _rising(factors: Array) -> Factors:
    """Return the factors, none less than those before it."""
    return tuple(np.maximum.accumulate(factors).tolist())


def critical_pair(spectrum: Spectrum, training_length: int, share: float = 1.0) -> int:
    """Return ``share`` of the first pair that does not complete a turn in the training length, at
    least 1 (LongRoPE2).

    Leading pairs with frequency 0 count as fast ones that a drop removed.
    """
    inv_freq = long_frequencies(spectrum, training_length).inv_freq
    turns = np.array(inv_freq) * training_length / (2 * math.pi)
    first = int(np.argmax(turns > 0)) if turns.any() else 0
    critical = first + int((turns[first:] >= 1).sum())
    return max(1, round(share * critical))


def with_factors(layout: Layout, factors: Candidate, layers: LayerChoice = None) -> Layout:
    """Set factors beyond the training length for the distinct spectra of ``layers``, in order."""
    by_spectrum = dict(zip(layout.of_layers(layers).spectra, factors, strict=True))
    C = layout.training_length

    def changed(spectrum: Spectrum) -> Spectrum:
        return longrope(spectrum, (1.0,) * len(spectrum.inv_freq), by_spectrum[spectrum], C)

    return layout.map(changed, layers)


def needle_requests(haystack: Haystack, count: int, length: int) -> list[Request]:
    """Make ``count`` texts of ``length`` tokens that state a number once, and end with the question
    of the task ``standard`` and this number.

    The depth of the number in text n of N is (n + 1/2) / N.
    """
    requests = []
    for number in range(count):
        depth = (number + 0.5) / count
        settings = NeedleTaskSettings(trials=1, seed=number, depths=(depth,))
        (prompt,) = standard(haystack, settings, length + TOKENS_PER_VALUE)
        answer = haystack.encode(f" {prompt.answers[0]}")
        # Cut behind the first tokens: answers have different numbers of tokens.
        behind = prompt.tokens[len(haystack.encoder.bos) + len(answer) :]
        requests.append(Request((*haystack.encoder.bos, *behind), tuple(answer)))
    return requests


def answer_loss(model: LanguageModel, requests: Sequence[Request], batch_tokens: int) -> float:
    """Return the mean over texts of the mean loss of their answers' tokens, in nats: needle-driven
    perplexity (LongRoPE2)."""
    results = log_likelihoods(model, requests, batch_tokens)
    total = 0.0
    for request, (log_likelihood, _) in zip(requests, results, strict=True):
        total -= log_likelihood / len(request.continuation)
    return total / len(requests)
