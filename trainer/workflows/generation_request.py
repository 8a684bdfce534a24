"""What the ``generate`` command is asked for."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from trainer.common.errors import Problem
from trainer.common.fields import (
    Count,
    Natural,
    NotNegative,
    OptionalText,
    Positive,
    Processes,
    configuration,
)
from trainer.generation.sampling import Sampling
from trainer.workflows.request import request_problems


@configuration
class GenerationRequest:
    """What the generate command is asked for."""

    checkpoint: OptionalText = None
    """A run directory, a checkpoint, or a published model."""
    prompts: list[str] = field(default_factory=list)
    """Texts to continue; prompt=... adds one, whatever characters are in it."""
    max_new_tokens: Annotated[Count, Field(le=1 << 24)] = 128
    """Most tokens of a continuation."""
    temperature: NotNegative = 0.0
    """Divides the logits; 0: always the likeliest token."""
    top_p: Annotated[Positive, Field(le=1)] = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a continuation and are not shown, for instance 'stop=["\\n"]'."""
    seed: Natural = 0
    """Seed of the draws."""
    threads: Processes | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores."""
    stream: bool = True
    """Show a single continuation while it grows."""

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(self.temperature, self.top_p, self.seed)

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = request_problems(self.checkpoint)
        if not self.prompts:
            found.append(
                Problem("prompt", "give prompt='Once upon a time', once or several times.")
            )
        if "" in self.stop:
            found.append(Problem("stop", "an empty string would stop before the first token."))
        return found
