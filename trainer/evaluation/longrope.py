"""Search for LongRoPE's factors on held-out text (LongRoPE, Ding et al. 2024; LongRoPE2, Shang et
al. 2025).

An evolution over one factor a pair, from 1 to 1.25 s, that never falls from a fast pair to a slower
one. It begins with PI, NTK-aware and NTK-by-parts scaling, and NTK-aware scaling up to a critical
pair with the full s from there on: in theory the first pair that does not turn once in C, in
LongRoPE2's findings an earlier one. Then mutations and crossings of the best so far are tried. The
papers take perplexity (LongRoPE) or that of a needle's tokens (LongRoPE2); here it is the former.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import Integers
from trainer.errors import UserError
from trainer.evaluation.layouts import LongRopeFactors, with_factors
from trainer.evaluation.loss import losses_by_position
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.positional.rescaling import Rescaling, ntk_aware, ntk_by_parts, position_interpolation
from trainer.positional.spectrum import Spectrum

Factors = tuple[float, ...]
HIGHEST = 1.25
"""The largest factor, in units of s."""
PARENTS = 8
SHARE = 0.3
"""Of the pairs, that a mutation changes or a crossing takes from the other parent."""
CRITICAL = (1.0, 0.9, 0.8, 0.7)
"""Critical pairs to begin with, in units of the theoretical one."""


def search_longrope(
    model: LanguageModel,
    windows: Integers,
    end_of_text: int,
    factor: float,
    budget: int = 64,
    seed: int = 0,
    batch_tokens: int = 16384,
    read: Callable[[int, int], None] = lambda sequences, length: None,
) -> LongRopeFactors:
    """The factors with the least mean loss on the windows; the same again with the same seed.

    Args:
        model: a decoder; its layout is as before afterwards.
        windows: ``[N, T]`` held-out tokens, T longer than the training length.
        end_of_text: what stands before each window.
        factor: s, the extension factor.
        budget: sets of factors to try, each on all windows: ``budget * windows.size`` tokens are
            read. The starting points come first.
        seed: of the search.
        batch_tokens: tokens in one forward pass.
        read: told the number and length of the windows after each set.

    Returns:
        Factors for every distinct spectrum of the layout, in its order; see
        :func:`trainer.evaluation.methods.with_factors`.

    Raises:
        UserError: no head rotates, the windows are not longer than the training length, or the
            budget is less than 1.
    """
    layout = model.layout
    _check(layout, windows, factor, budget)
    generator = np.random.default_rng(seed)
    tried: dict[LongRopeFactors, float] = {}

    def measure(individual: LongRopeFactors) -> None:
        with model.using(with_factors(layout, individual)):
            losses = losses_by_position(model, windows, end_of_text, batch_tokens)
        tried[individual] = losses.mean().item()
        read(*windows.shape)

    for individual in starting_points(layout, factor)[:budget]:
        measure(individual)
    misses = 0
    while len(tried) < budget and misses < budget:
        parents = sorted(tried, key=tried.__getitem__)[:PARENTS]
        child = _child(parents, factor, generator)
        if child in tried:
            misses += 1
        else:
            measure(child)
    return min(tried, key=tried.__getitem__)


def _check(layout: Layout, windows: Integers, factor: float, budget: int) -> None:
    C, T = layout.training_length, windows.shape[1]
    if not layout.rotates:
        raise UserError("evaluation.methods: longrope needs heads that rotate; none does.")
    if T <= C or factor <= 1:
        raise UserError(
            f"evaluation.lengths: longrope is searched beyond the training length of {C} tokens, "
            f"got windows of {T} and a factor of {factor:g}."
        )
    if budget < 1:
        raise UserError(f"evaluation.longrope.evaluations: expected 1 or more, got {budget}.")


def starting_points(layout: Layout, factor: float) -> list[LongRopeFactors]:
    """Where the search begins: the model as it is, and known rescalings as factors."""

    C = layout.training_length

    def by(rescaling: Rescaling) -> Callable[[Spectrum], Factors]:
        return lambda s: _ratios(
            s.inv_freq, rescaling(s.inv_freq, C).frequencies(s.inv_freq, factor)
        )

    known = [
        lambda s: _ratios(s.inv_freq, s.inv_freq),
        *map(by, (position_interpolation, ntk_aware, ntk_by_parts)),
        *(lambda s, part=part: _critical(s, C, factor, part) for part in CRITICAL),
    ]
    return list(dict.fromkeys(tuple(make(s) for s in layout.spectra) for make in known))


def _ratios(before: Factors, after: Factors) -> Factors:
    """By what frequencies were divided; a pair that stands still goes with the one before it."""
    ratios = [f / g if g else 1.0 for f, g in zip(before, after, strict=True)]
    return _monotone(np.array(ratios))


def _critical(spectrum: Spectrum, training_length: int, factor: float, part: float) -> Factors:
    """NTK-aware scaling up to ``part`` of the theoretical critical pair, s from there on."""
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    critical = max(1, round(part * (turns >= 1).sum()))
    return _monotone(factor ** np.minimum(np.arange(len(turns)) / critical, 1))


def _monotone(factors: NDArray[np.float64]) -> Factors:
    return tuple(np.maximum.accumulate(factors).tolist())


def _child(
    parents: list[LongRopeFactors], factor: float, generator: np.random.Generator
) -> LongRopeFactors:
    """A mutation of one parent or of a crossing of two."""
    one, other = (parents[i] for i in generator.integers(len(parents), size=2))
    # Small steps refine what is good, large ones leave it; the whole way is ln s.
    width = math.log(factor) * generator.choice([0.02, 0.1, 0.5])
    found = []
    for mine, theirs in zip(one, other, strict=True):
        factors = np.where(generator.random(len(mine)) < SHARE, theirs, mine)
        steps = generator.normal(0, width, len(mine)) * (generator.random(len(mine)) < SHARE)
        found.append(_monotone(np.clip(factors * np.exp(steps), 1, HIGHEST * factor)))
    return tuple(found)
