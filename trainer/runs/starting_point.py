"""Starting point of a run: its newest sound checkpoint, or what it takes from another model."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import (
    STATE,
    check_sound,
    newest_checkpoint,
    read_state,
    regular_checkpoints,
)
from trainer.common.errors import UserError
from trainer.common.ranks import on_rank_zero
from trainer.config import RunConfig
from trainer.data.corpus import Corpus
from trainer.data.dataset import TrainingSamples
from trainer.runs.directory import read_metrics, write_metrics
from trainer.runs.phases import Phase, phase_before, phases_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Starting point of a run: a checkpoint with its ``state.json``, or none."""

    checkpoint: Path | None
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.get("step", 0)


def starting_point(config: RunConfig, branch: Path | None) -> Start:
    """Find the starting point: newest sound checkpoint, branch, or none; cut the metrics file to
    it. All ranks call this together.

    Raises:
        UserError: all checkpoints of the run are damaged.
    """
    return on_rank_zero(lambda: _starting_point(Path(config.run_dir), branch))


def _starting_point(run_dir: Path, branch: Path | None) -> Start:
    directory = run_dir / "checkpoints"
    directory.mkdir(parents=True, exist_ok=True)
    for partly in directory.glob(".*.partial"):  # of a killed process
        shutil.rmtree(partly)
    start = newest_checkpoint(directory) or (branch and check_sound(branch))
    state = read_state(start) if start is not None else {}
    if start is not None:
        log.info("Resuming from %s (step %d)", start.name, state["step"])
    metrics = run_dir / "metrics.csv"
    of_branch = branch is not None and not metrics.exists()
    rows = read_metrics(branch.parent.parent / "metrics.csv" if branch and of_branch else metrics)
    write_metrics(metrics, [row for row in rows if row["step"] <= state.get("step", 0)])
    return Start(start, state)


def data_fingerprints(corpus: Corpus, phase: Phase) -> dict[str, Any]:
    """Return hashes of everything that determines a phase's samples, and of the run's texts."""
    data, mixed = phase.config.data, corpus.mixed(phase.config.data)
    order = [
        mixed.fingerprint,
        phase.seed,
        data.sequence_length,
        asdict(data.needles),
    ]
    digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16]
    return {"order": digest, "texts": corpus.fingerprints}


def texts_read(run_dir: Path) -> list[str] | None:
    """Return fingerprints of the texts that the run in a directory has read, or None."""
    for path in reversed(regular_checkpoints(run_dir / "checkpoints")):
        with suppress(ValueError):  # cut off: training goes on from the one before it
            return json.loads((path / STATE).read_bytes())["data"]["texts"]
    return None


def samples_of(corpus: Corpus, phase: Phase) -> TrainingSamples:
    """Return the training samples of a phase."""
    data = phase.config.data
    return TrainingSamples(corpus.mixed(data), data, phase.seed)


def epochs_read(corpus: Corpus, phases: Sequence[Phase]) -> Callable[[int], dict[str, float]]:
    """Return a function from step to the number of times each text has been read."""
    samples = [samples_of(corpus, phase) for phase in phases]

    def read(step: int) -> dict[str, float]:
        total = {part.name: 0.0 for part in corpus.parts}
        for phase, of_phase in zip(phases, samples, strict=True):
            until = phase.first_sample(max(phase.start, min(step, phase.end)))
            before = of_phase.epochs(phase.samples)
            for name, times in of_phase.epochs(until).items():
                total[name] += times - before[name]
        return total

    return read


def check_same_data(state: dict[str, Any], corpus: Corpus, config: RunConfig) -> None:
    """Check that text and order are unchanged.

    Raises:
        UserError: the checkpoint was trained on other samples.
    """
    phase = phase_before(phases_of(config), state["step"])
    if state["data"] != data_fingerprints(corpus, phase):
        raise UserError(
            "data: the checkpoint was trained on other text, or in another order, than this run"
        )
