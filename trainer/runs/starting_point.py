"""Starting point of a run (its newest sound checkpoint, a branch, or nothing), and its samples."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint import (
    check_sound,
    newest_checkpoint,
    read_state,
    regular_checkpoints,
)
from trainer.common.errors import UserError
from trainer.data.corpus import Corpus
from trainer.data.dataset import TrainingSamples
from trainer.runs.directory import read_metrics, write_metrics
from trainer.runs.phases import Phase

log = logging.getLogger(__name__)


def starting_point(
    run_dir: Path, corpus: Corpus, branch: Path | None
) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that a run resumes from and its ``state.json``: the newest sound one,
    else ``branch``, else None and step 0. Cut the metrics file to it.

    Rank 0 calls this.

    Raises:
        UserError: all checkpoints of the run are damaged, or it was trained on another text.
    """
    directory = run_dir / "checkpoints"
    directory.mkdir(parents=True, exist_ok=True)
    for partly in directory.glob(".*.partial"):  # of a killed process
        shutil.rmtree(partly)
    start = newest_checkpoint(directory) or (branch and check_sound(branch))
    state: dict[str, Any] = {"step": 0}
    if start is not None:
        state = read_state(start)
        if state["texts"] != corpus.fingerprints:
            raise UserError("data: the checkpoint was trained on another text than this run")
        log.info("Resuming from %s (step %d)", start.name, state["step"])
    metrics = run_dir / "metrics.csv"
    of_branch = branch is not None and not metrics.exists()
    rows = read_metrics(branch.parent.parent / "metrics.csv" if branch and of_branch else metrics)
    write_metrics(metrics, [row for row in rows if row["step"] <= state["step"]])
    return start, state


def texts_read(run_dir: Path) -> list[str] | None:
    """Return fingerprints of the texts that the run in a directory has read, or None."""
    for path in reversed(regular_checkpoints(run_dir / "checkpoints")):
        with suppress(ValueError):  # damaged, or of another format
            return read_state(path)["texts"]
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
