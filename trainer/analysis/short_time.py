"""The frames of a short-time transform, known without what computes it."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.common.errors import Problem, did_you_mean

WINDOWS = ("hann", "hamming", "blackman", "rectangular")


@dataclass(frozen=True)
class ShortTime:
    """Frames of ``frame`` tokens, ``hop`` tokens from one to the next (None: half a frame), each
    under a ``window`` (the paper on frequency entropy has 1,024 and 512, and names no window)."""

    window: str = "hann"
    frame: int = 1024
    hop: int | None = None

    @property
    def step(self) -> int:
        """Tokens from one frame to the next."""
        return self.hop or self.frame // 2

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each, with keys below that of the frames."""
        found = []
        if self.window not in WINDOWS:
            near = did_you_mean(self.window, WINDOWS)
            found.append(
                Problem(
                    "window", f"expected one of {', '.join(WINDOWS)}, got {self.window!r}.", near
                )
            )
        if self.frame < 2:
            found.append(Problem("frame", f"expected 2 tokens or more, got {self.frame}."))
        elif self.hop is not None and not 1 <= self.hop <= self.frame:
            found.append(
                Problem("hop", f"expected 1 to {self.frame} tokens, a frame, got {self.hop}.")
            )
        return found


USUAL = ShortTime()
