"""Context extension as rescalings of a spectrum: PI, NTK-aware, YaRN (DroPE Eq. 3 and App. A).

Each takes a spectrum and the extension factor s = length / C and is the identity at s = 1.
A spectrum without rotation comes back unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from trainer.positional.spectrum import Spectrum

Rescaling = Callable[[Spectrum, float], Spectrum]


def position_interpolation(spectrum: Spectrum, factor: float) -> Spectrum:
    """PI (Chen et al. 2023): every frequency divided by s."""
    return replace(spectrum, inv_freq=tuple(f / factor for f in spectrum.inv_freq))


def ntk_aware(spectrum: Spectrum, factor: float) -> Spectrum:
    """NTK-aware scaling (bloc97 2023): pair m of M is divided by s^(m / (M - 1)).

    For RoPE this is the base times s^(d / (d - 2)), d = 2 M: the fastest pair stays, the slowest is
    interpolated.
    """
    last = max(len(spectrum.inv_freq) - 1, 1)
    return replace(
        spectrum,
        inv_freq=tuple(f * factor ** (-m / last) for m, f in enumerate(spectrum.inv_freq)),
    )


def yarn(
    spectrum: Spectrum, factor: float, *, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> Spectrum:
    """YaRN (Peng et al. 2023) as transformers computes it.

    Pairs that turn more than ``beta_fast`` times in C keep their frequency, those that turn less
    than ``beta_slow`` times are divided by s, with a linear ramp over the pair's index between. The
    logits are multiplied by (0.1 ln s + 1)^2.
    """
    moving = [f for f in spectrum.inv_freq if f > 0]
    if factor == 1 or len(set(moving)) < 2:
        return spectrum
    # Where on the (fractional) index axis a pair turns `turns` times within C.
    step = math.log(moving[0] / moving[-1]) / (len(moving) - 1)

    def index(turns: float) -> float:
        return math.log(moving[0] * spectrum.training_length / (2 * math.pi * turns)) / step

    low = max(math.floor(index(beta_fast)), 0)
    high = min(math.ceil(index(beta_slow)), spectrum.rotary_dim - 1)
    ramp = np.clip((np.arange(len(spectrum.inv_freq)) - low) / max(high - low, 1e-3), 0, 1)
    inv_freq = tuple(
        float(f / factor * r + f * (1 - r)) for f, r in zip(spectrum.inv_freq, ramp, strict=True)
    )
    attention_factor = 0.1 * math.log(factor) + 1
    return replace(spectrum, inv_freq=inv_freq).with_temperature(
        scale=spectrum.temperature.scale * attention_factor**2
    )


RESCALINGS: dict[str, Rescaling] = {
    "pi": position_interpolation,
    "ntk": ntk_aware,
    "yarn": yarn,
}
