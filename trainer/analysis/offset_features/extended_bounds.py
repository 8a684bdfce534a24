"""The bounds on rotary offset features after a context extension (Rotary Offset Features, App. C,
Fig. 14)."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.axes import Axes

from trainer.analysis.offset_features.figures import PAIR_INDEX, angle_axis, number, percent
from trainer.analysis.offset_features.measure import (
    RADII,
    TURN,
    OffsetFeatures,
    OffsetFeatureSearch,
    bounds,
)
from trainer.analysis.studies.section import Grid, Picture, Rows, wide_rows
from trainer.analysis.studies.study import Target
from trainer.plotting.lines import Frame, Panel, Series, side_by_side
from trainer.plotting.style import COLOURS
from trainer.positional.rescaling import RESCALINGS, rescaled
from trainer.positional.spectrum import Spectrum

FACTOR = 4
"""Factor of the extension if the text is not longer than the training length."""
TITLES = {
    "trained": "as trained",
    "unscaled": "not rescaled",
    "pi": "PI",
    "ntk": "NTK",
    "yarn": "YaRN",
}
"""Cases: the training length, or the longer one without rescaling or with one of
:data:`~trainer.positional.rescaling.RESCALINGS`."""


class ExtendedBounds:
    """Features under context extensions: the model's means, which ``search`` collects, judged by
    the bounds of rescaled frequencies (App. C).

    Bounds are for the training length C as trained, and for the text's length, or 4 C if the text
    is not longer than C, in each of the cases of :data:`TITLES`.
    """

    def __init__(self, target: Target) -> None:
        self.C = target.training_length
        self.length = target.length if target.length > self.C else FACTOR * self.C
        self.spectrum = next((s for s in target.model.layout.spectra if s.rotates), None)
        self.search = OffsetFeatureSearch()

    def _change(self, case: str, spectrum: Spectrum) -> Spectrum:
        if case not in RESCALINGS:
            return spectrum
        return rescaled(spectrum, RESCALINGS[case], self.C, self.length / self.C)

    def _at(self, case: str) -> int:
        return self.C if case == "trained" else self.length

    def results(self) -> dict[str, OffsetFeatures]:
        """Return features by case, the model as trained first."""
        return {
            case: self.search.result(self._at(case), partial(self._change, case)) for case in TITLES
        }

    def findings(self, results: dict[str, OffsetFeatures]) -> tuple[str, ...]:
        """Report how many large features are still within both bounds."""
        before = results["trained"].recall[0]
        if not before.positives:
            return ()
        within = ", ".join(
            f"{TITLES[case]} {percent(features.recall[0].lower)}"
            for case, features in results.items()
            if case != "trained"
        )
        return (
            f"At {self.length:,} tokens both bounds hold for these shares of the pairs of radius "
            f"{RADII[0]:g} or more: {within}; as trained, at {self.C:,}, {percent(before.lower)}.",
        )

    def grid(self, results: dict[str, OffsetFeatures]) -> Grid:
        """Make a table of both bounds and their recall by method."""
        return Grid(
            caption=(
                f"The bounds at {self.C:,} tokens as trained, and at {self.length:,} tokens by "
                "rescaling, for the means of the model as it is: pairs under the upper bound, "
                f"their mean lower bound, and the shares of the pairs of radius {RADII[0]:g} or "
                "more under the upper and above the lower bound."
            ),
            header=("method", "length", "under UB", "mean LB (rad)", "UB recall", "LB recall"),
            rows=[
                (
                    TITLES[case],
                    self._at(case),
                    *(percent(features.share), number(features.mean_lower_bound)),
                    *map(percent, (features.recall[0].upper, features.recall[0].lower)),
                )
                for case, features in results.items()
            ],
        )

    def picture(self, features: OffsetFeatures) -> Picture:
        """Draw the first spectrum that rotates with lower bounds, and the large features as
        trained."""
        assert self.spectrum is not None
        large, pairs = features.key_radius >= RADII[0], len(self.spectrum.inv_freq)
        turns: list[Series] = []
        lower: list[Series] = []
        rows: Rows = []
        for index, (case, title) in enumerate(TITLES.items()):
            length = self._at(case)
            limits = bounds(self._change(case, self.spectrum).at(length, self.C), length)
            turned = limits.inv_freq * length / TURN
            # Lines of some methods coincide: let neighbours differ in their dashes too.
            style = index + len(COLOURS) * (index % 3)
            for lines, y, shown in (
                (turns, turned, turned > 0),
                (lower, limits.angle, limits.possible),
            ):
                drawn = np.flatnonzero(shown)
                lines.append(Series(title, style, drawn.tolist(), y[drawn].tolist(), marked=False))
            rows += [(title, *row) for row in wide_rows([turned, limits.angle])]

        def prepare_turns(axes: Axes) -> None:
            axes.set_yscale("log")
            axes.set_xlim(-0.5, pairs - 0.5)

        def prepare_angles(axes: Axes) -> None:
            place = features.pair[large], features.angle[large]
            axes.scatter(*place, s=8, color="#b0b0b0", linewidths=0, rasterized=True)
            angle_axis(axes)
            axes.set_xlim(-0.5, pairs - 0.5)

        panels = [
            Panel(
                "upper bound",
                turns,
                Frame("", "turns within the length", prepare_turns, horizontal=((1, "one turn"),)),
            ),
            Panel("lower bounds", lower, Frame("", "angle φ (rad)", prepare_angles)),
        ]
        return Picture(
            name="extended_bounds",
            figure=side_by_side(panels, x_label=PAIR_INDEX, height=2.6, balanced=True),
            caption=(
                f"The bounds at {self.C:,} tokens as trained and at {self.length:,} tokens by "
                "rescaling. Left: turns of every pair within the length (logarithmic); below the "
                "dotted line it can be an offset feature. Right: the lower bounds of these pairs, "
                f"and in grey the angles of the pairs of radius {RADII[0]:g} or more."
            ),
            header=("method", "pair", "turns", "lower_bound"),
            rows=rows,
        )
