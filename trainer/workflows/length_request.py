"""What the ``evaluate`` command is asked for by ``+evaluation=extension`` and its relatives."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.evaluation.lengths.config import LengthConfig
from trainer.workflows.evaluation_request import ModelsRequest
from trainer.workflows.request import request_problems


@dataclass(frozen=True)
class LengthRequest(ModelsRequest):
    """Every method on every task, for models of the same tokenizer and training length."""

    evaluation: LengthConfig = field(default_factory=LengthConfig)

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        common = request_problems(self.checkpoint, self.threads, self.text)
        return self.evaluation.problems() + common
