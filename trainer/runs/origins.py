"""The runs in which a model's training began, and the longest context that they trained it with."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.common.errors import UserError
from trainer.runs.checkpoints import find_checkpoint, read_state
from trainer.runs.config import RunConfig
from trainer.runs.directory import saved_config
from trainer.runs.phases import phases_of


def origins(config: RunConfig, step: int) -> Iterator[tuple[RunConfig, int]]:
    """Yield a run, and those before it in which its training began, with the steps of each.

    The last one names ``model.from_run`` if the run there is no longer on this machine or is
    damaged.
    """
    visited = {config.run_dir}
    yield config, step
    while (run := config.model.from_run) is not None and run not in visited:
        visited.add(run)
        try:
            state = read_state(find_checkpoint(run), hashed=False)
            config = saved_config(state["config"], "model.from_run", run)
        except UserError:
            return
        yield config, state["step"]


def longest_context(config: RunConfig, step: int, stored: int) -> int:
    """Return the longest context that the model was ever trained with.

    ``stored``: C of the checkpoint. A run that begins from nothing stores the configured length,
    though its phases up to ``step`` may be shorter.
    """
    runs = [*origins(config, step)]
    lengths = [
        phase.config.data.sequence_length
        for run, steps in runs
        for phase in phases_of(run)
        if phase.start < steps
    ]
    is_from_nothing = not runs[-1][0].model.is_trained
    return max(lengths) if is_from_nothing and lengths else max(stored, *lengths, 0)
