"""Changes of a trained model's layout that need no training, and published LongRoPE factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainer.common.errors import Problem, UserError, os_reason
from trainer.common.formats import read_plain
from trainer.positional.layout import Intervention, LayerChoice, LayerEncoding, Layout
from trainer.positional.rescaling import longrope
from trainer.positional.spectrum import Spectrum

KEY = "evaluation.longrope.factors"
NEEDS = "needs short_factor and long_factor, as rope_scaling has them in a config.json"
LEAST, MOST = 1e-6, 1e12
"""Range of each factor. Outside it, angles overflow or become NaN."""
RANGE = "a positive number from 0.000001 to 10^12"


@dataclass(frozen=True)
class PublishedFactors:
    """Published factors.

    ``short``, ``long``: divisors of each pair's frequency in sequences up to the original training
    length, and in longer ones. ``attention``: scale of rotated channels; by default it follows from
    ``factor``, the extension that the factors are for, or else from the evaluated length.
    ``original_length``: the original training length, if given.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    attention: float | None = None
    factor: float | None = None
    original_length: int | None = None

    def attention_at(self, factor: float, training_length: int) -> float:
        """Return the attention factor, by default sqrt(1 + ln s / ln C), as in transformers."""
        if self.attention is not None:
            return self.attention
        s = max(factor if self.factor is None else self.factor, 1.0)
        return math.sqrt(1 + math.log(s) / math.log(training_length))


def read_factors(file: str) -> PublishedFactors:
    """Read factors from a JSON file.

    It contains ``rope_scaling`` (in transformers 5 ``rope_parameters``) with ``short_factor`` and
    ``long_factor``, or is a whole config.json with it.

    Raises:
        UserError: the file does not exist or holds something else.
    """
    try:
        content = read_plain(Path(file))
    except OSError as error:
        raise UserError.at(KEY, f"cannot read {file!r}: {os_reason(error)}.") from None
    except ValueError as error:
        raise UserError.at(KEY, f"{file!r}: {error}.") from None
    if not isinstance(content, dict):
        raise UserError.at(KEY, f"{file!r} holds no keys; it {NEEDS}.")
    group = next((key for key in ("rope_parameters", "rope_scaling") if key in content), "")
    nested = content.get(group)
    scaling = nested if isinstance(nested, dict) else content
    if problems := [*_list_problems(scaling, group)]:
        raise UserError(*(problem.in_file(f"{KEY}: {file!r}") for problem in problems))
    short, long = scaling["short_factor"], scaling["long_factor"]
    numbers = {
        key: {**content, **scaling}.get(key)
        for key in (
            *("attention_factor", "factor"),
            *("max_position_embeddings", "original_max_position_embeddings"),
        )
    }
    for key, value in numbers.items():
        if value is not None and not _is_positive(value):
            raise UserError.at(KEY, f"{file!r}: {key}: expected {RANGE}, got {value!r}.")
    attention, factor, longest, original = numbers.values()
    if factor is None and longest and original:
        factor = longest / original
    return PublishedFactors(tuple(short), tuple(long), attention, factor, original)


def _list_problems(scaling: dict[str, Any], group: str) -> Iterator[Problem]:
    """Check the two lists of factors in the ``group`` of a file."""
    lists: dict[str, Any] = {key: scaling.get(key) for key in ("short_factor", "long_factor")}
    if missing := [key for key, value in lists.items() if value is None]:
        where = f"{group} has" if group else "there is"
        yield Problem("", f"{where} no {' and no '.join(missing)}; the file {NEEDS}.")
        return
    sound = True
    for key, value in lists.items():
        if not isinstance(value, list) or not value:
            sound = False
            yield Problem(key, f"expected a list of numbers, got {value!r}.")
        elif wrong := [i for i, factor in enumerate(value, 1) if not _is_positive(factor)]:
            sound = False
            yield Problem(key, f"number {wrong[0]} is {value[wrong[0] - 1]!r}; expected {RANGE}.")
    if sound and len(lists["short_factor"]) != len(lists["long_factor"]):
        counts = " and ".join(f"{key} has {len(value)}" for key, value in lists.items())
        yield Problem(
            "", f"{counts} numbers; expected as many in both, one for each pair that rotates."
        )


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and LEAST <= value <= MOST


Per = Literal["sequence", "query"]
LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor."""
LongRopeFactors = tuple[tuple[float, ...], ...]
"""One factor for each pair of each distinct spectrum in the changed layers; empty if no head
rotates."""

TITLES = {
    "pi": "PI",
    "ntk": "NTK-aware",
    "ntk_by_parts": "NTK-by-parts",
    "yarn": "YaRN",
    "llama3": "Llama 3",
    "yarn_full_range": "YaRN over all frequencies",
    "ntk_by_parts_turns": "NTK-by-parts over turns",
    "yarn_turns": "YaRN over turns",
}
"""Titles of :data:`~trainer.positional.rescaling.RESCALINGS` in tables."""


def windowed(layout: Layout) -> Layout:
    """Limit attention windows to the training length."""
    C = layout.training_length
    layers = tuple(replace(layer, window=min(layer.window or C, C)) for layer in layout.layers)
    return replace(layout, layers=layers)


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


def with_published(
    layout: Layout, published: PublishedFactors, factor: float, layers: LayerChoice = None
) -> Layout:
    """Apply published factors at an extension factor to every rotating spectrum of ``layers``."""
    C = layout.training_length
    attention = published.attention_at(factor, C)

    def changed(spectrum: Spectrum) -> Spectrum:
        if not spectrum.rotates:
            return spectrum
        slowed = longrope(spectrum, published.short, published.long, C)
        return replace(slowed, rotary_scale=spectrum.rotary_scale * attention)

    return layout.map(changed, layout.chosen(layers))


def check_published(layout: Layout, published: PublishedFactors) -> None:
    """Check that published factors are for this model."""
    C, original = layout.training_length, published.original_length
    if original not in (None, C):
        raise UserError.at(
            KEY,
            f"expected original_max_position_embeddings of {C}, the tokens that the model was "
            f"trained at, got {original}.",
        )
    pairs = {len(spectrum.inv_freq) for spectrum in layout.spectra if spectrum.rotates}
    if other := sorted(pairs - {len(published.long)}):
        raise UserError.at(
            KEY,
            f"expected {other[0]} factors, one for each pair that rotates, got "
            f"{len(published.long)}.",
        )


def tempered(
    layout: Layout,
    coefficient: float,
    per: Per = "sequence",
    exponent: float = 1.0,
    layers: LayerChoice = None,
) -> Layout:
    """Multiply the logits of ``layers`` by (1 + c ln s)^exponent beyond the training length.

    This is DroPE's temperature (App. C.2), or with c = 0.1 and exponent 2 RoPE-ID's (App. A.4). It
    replaces an earlier temperature, and C is the longest length of training, whatever length the
    earlier one referred to.
    """
    return layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=coefficient, exponent=exponent, per=per, reference=None, steps=False
        ),
        layout.chosen(layers),
    )


def is_free_of_positions(layout: Layout) -> bool:
    """Return whether no head has an encoding, so that only the temperature can be chosen."""
    return not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)


def require_rotation(layout: Layout, key: str) -> None:
    """Check that some head rotates."""
    if not layout.rotates:
        raise UserError.at(
            key, "expected a model with a rotary encoding, got one without rotation in any head."
        )


def with_intervention(encoding: LayerEncoding, intervention: Intervention) -> LayerEncoding:
    """Return the layer with an intervention on its heads.

    Raises:
        ValueError: it already has one.
    """
    if encoding.intervention is not None:
        raise ValueError("the layer has an intervention already; two on it do not combine")
    return replace(encoding, intervention=intervention)
