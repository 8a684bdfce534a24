"""The ``monitor`` configuration group: what is looked at while a run trains."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MonitorConfig:
    """Measurements of the model in training, also on both sides of the drop and at the end.

    They change nothing of what is trained. ``lengths_every``: steps between measurements of
    retrieval and held-out loss on validation text (null: never), at ``lengths`` times the training
    length, with ``trials`` retrieval trials (where the training text carries needles; 0: none) and
    ``windows`` windows of text a length, rounded up to a multiple of the ranks. ``probe_every``:
    steps between looks at the attention of every layer (null: never), on ``probe_sequences``
    sequences. Needles in a trial, tokens in a forward pass and the seed are the evaluation's.
    """

    lengths_every: int | None = None
    lengths: list[int] = field(default_factory=lambda: [1, 2, 4])
    trials: int = 64
    windows: int = 16
    probe_every: int | None = None
    probe_sequences: int = 2

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        found = [
            f"monitor.{key}: expected 1 or more, got {value}."
            for key in ("lengths_every", "windows", "probe_every", "probe_sequences")
            if (value := getattr(self, key)) is not None and value < 1
        ]
        if not self.lengths or min(self.lengths) < 1:
            found.append(
                "monitor.lengths: expected multiples of the training length, 1 or more, "
                f"got {self.lengths}."
            )
        if self.trials < 0:
            found.append(f"monitor.trials: expected 0 or more, got {self.trials}.")
        return found
