"""What a context extension does to the bounds on rotary offset features (Rotary Offset Features,
App. C): the means are those of the model as it is, the frequencies those of a rescaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainer.analysis.capture import Heads
from trainer.analysis.offset_features import (
    RADII,
    TURN,
    OffsetFeatures,
    OffsetFeatureSearch,
    bounds,
)
from trainer.analysis.studies.offset_figures import Method, extended_bounds
from trainer.analysis.studies.section import Grid, Picture
from trainer.analysis.studies.study import Target
from trainer.positional.rescaling import RESCALINGS, Rescaling, rescaled
from trainer.positional.spectrum import Spectrum

AS_TRAINED, UNSCALED = "as trained", "not rescaled"
METHODS = {"PI": "pi", "NTK": "ntk", "YaRN": "yarn"}
FACTOR = 4
"""Of the extension, where the text is not longer than the training length."""


class ExtendedBounds:
    """The features at the training length C and, by method, at the length of the text where that
    is longer, else at four times C."""

    def __init__(self, target: Target) -> None:
        self.C = target.training_length
        self.length = target.length if target.length > self.C else FACTOR * self.C
        self.spectrum = next((s for s in target.model.layout.spectra if s.rotates), None)
        self.rescalings: dict[str, Callable[[Spectrum], Spectrum]] = {
            AS_TRAINED: lambda spectrum: spectrum,
            UNSCALED: lambda spectrum: spectrum,
        }
        for name, key in METHODS.items():
            self.rescalings[name] = self._rescaling(RESCALINGS[key])
        self._searches = {name: OffsetFeatureSearch(self._at(name)) for name in self.rescalings}

    def _rescaling(self, change: Rescaling) -> Callable[[Spectrum], Spectrum]:
        return lambda s: rescaled(s, change, self.C, self.length / self.C)

    def _at(self, name: str) -> int:
        return self.C if name == AS_TRAINED else self.length

    def update(self, heads: Heads) -> None:
        """Take in one layer."""
        for name, search in self._searches.items():
            search.update(replace(heads, encoding=heads.encoding.map(self.rescalings[name])))

    def results(self) -> dict[str, OffsetFeatures]:
        """By method, the model as trained first."""
        return {name: search.result() for name, search in self._searches.items()}

    def findings(self, results: dict[str, OffsetFeatures]) -> list[str]:
        """How many large features are still within both bounds."""
        before = results[AS_TRAINED].recall[0]
        if not before.positives:
            return []
        kept = ", ".join(
            f"{name} {percent(one.recall[0].lower)}"
            for name, one in results.items()
            if name != AS_TRAINED
        )
        return [
            f"At {self.length:,} tokens both bounds hold for these shares of the pairs of radius "
            f"{RADII[0]:g} or more: {kept}; as trained, at {self.C:,}, {percent(before.lower)}."
        ]

    def grid(self, results: dict[str, OffsetFeatures]) -> Grid:
        """Both bounds and their recall by method."""
        return Grid(
            f"The bounds at {self.C:,} tokens as trained, and at {self.length:,} tokens by "
            "rescaling, for the means of the model as it is: pairs under the upper bound, their "
            f"mean lower bound, and the shares of the pairs of radius {RADII[0]:g} or more under "
            "the upper and above the lower bound.",
            ("method", "length", "under UB", "mean LB (rad)", "UB recall", "LB recall"),
            [
                (
                    name,
                    self._at(name),
                    *(percent(one.share), number(one.mean_lower_bound)),
                    *(percent(one.recall[0].upper), percent(one.recall[0].lower)),
                )
                for name, one in results.items()
            ],
        )

    def picture(self, found: OffsetFeatures) -> Picture:
        """Turns and lower bounds of the first spectrum that rotates; large features as trained."""
        assert self.spectrum is not None
        methods = []
        for name, rescale in self.rescalings.items():
            known = bounds(rescale(self.spectrum).at(self._at(name), self.C), self._at(name))
            methods.append(Method(name, known.inv_freq * self._at(name) / TURN, known.angle))
        large = found.key_radius >= RADII[0]
        return Picture(
            "extended_bounds",
            extended_bounds(methods, found.pair[large], found.angle[large]),
            f"The bounds at {self.C:,} tokens as trained and at {self.length:,} tokens by "
            "rescaling. Left: turns of every pair within the length (logarithmic); below the "
            "dashed line it can be an offset feature. Right: the lower bounds of these pairs, and "
            f"in grey the angles of the pairs of radius {RADII[0]:g} or more.",
            ("method", "pair", "turns", "lower_bound"),
            [
                (one.name, pair, float(turns), float(angle))
                for one in methods
                for pair, (turns, angle) in enumerate(zip(one.turns, one.angle, strict=True))
            ],
        )


def percent(share: float | None) -> str:
    """Of 1; a dash for none."""
    return "–" if share is None else f"{share:.0%}"


def number(value: float | None) -> str:
    """With two decimals; a dash for none."""
    return "–" if value is None else f"{value:.2f}"
