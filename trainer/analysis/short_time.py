"""The frames of a short-time transform, known without what computes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.common.errors import Problem
from trainer.common.fields import Count, configuration

WINDOWS = ("hann", "hamming", "blackman", "rectangular")


@configuration
class ShortTime:
    """Frames of a short-time Fourier transform, as in the paper on frequency entropy."""

    window: Literal["hann", "hamming", "blackman", "rectangular"] = "hann"
    """Window of each frame: hann, hamming, blackman, rectangular."""
    frame: Annotated[Count, Field(ge=2)] = 1024
    """Tokens of a frame; SpectrumFE is left out of shorter texts."""
    hop: Count | None = None
    """Tokens from one frame to the next; null: half a frame."""

    @property
    def step(self) -> int:
        """Tokens from one frame to the next."""
        return self.hop or self.frame // 2

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each, with keys below that of the frames."""
        if self.hop is None or self.hop <= self.frame:
            return []
        return [Problem("hop", f"expected 1 to {self.frame} tokens, a frame, got {self.hop}.")]


USUAL = ShortTime()
