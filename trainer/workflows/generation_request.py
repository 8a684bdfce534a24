"""What the ``generate`` command is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.common.errors import Problem
from trainer.generation.sampling import Sampling
from trainer.workflows.request import request_problems


@dataclass(frozen=True)
class GenerationRequest:
    """``checkpoint``: a run directory, a checkpoint, or a published model. ``temperature``,
    ``top_p``, ``seed``: see :class:`trainer.generation.sampling.Sampling`. ``stop``: strings that
    end a continuation and are not shown. ``stream``: whether a single continuation is shown while
    it grows.
    """

    checkpoint: str | None = None
    prompts: list[str] = field(default_factory=list)
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int = 0
    threads: int | None = None
    stream: bool = True

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(self.temperature, self.top_p, self.seed)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [*self.sampling.problems(), *request_problems(self.checkpoint, self.threads)]
        if not self.prompts:
            found.append(
                Problem("prompt", "give prompt='Once upon a time', once or several times.")
            )
        if self.max_new_tokens < 1:
            found.append(
                Problem("max_new_tokens", f"expected 1 or more, got {self.max_new_tokens}.")
            )
        if "" in self.stop:
            found.append(Problem("stop", "an empty string would stop before the first token."))
        return found
