"""When a run is measured, on hand-made steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.evaluation.results import Milestone
from trainer.runs.config import RunConfig
from trainer.training.callbacks.monitor import Monitor, Remembering


class Noting(Monitor):
    """Notes the steps after which it measures."""

    def __init__(self, every, crossed, ends):
        phases = [SimpleNamespace(end=end) for end in ends]
        transitions = SimpleNamespace(phases=phases, crossed_at=crossed.__contains__)
        super().__init__(RunConfig(), every, transitions)
        self.noted = []

    def measure(self, trainer, module):
        self.noted.append(trainer.global_step)


@pytest.mark.parametrize(
    ("every", "crossed", "ends", "ended", "noted"),
    [
        (3, (), (8,), None, [3, 6, 8]),
        # Just before the drop and just after it.
        (100, (4,), (4, 8), None, [4, 4, 8]),
        (4, (4,), (8,), None, [4, 4, 8]),
        (100, (0,), (8,), None, [0, 8]),  # of trained weights
        (100, (), (8,), 5, [5]),  # at which its phase has ended early
    ],
)
def test_a_run_is_measured_when_due_around_changes_and_at_ends(every, crossed, ends, ended, noted):
    """Eight steps of two micro-batches."""
    callback = Noting(every, crossed, ends)
    trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=2)
    module = SimpleNamespace(phase_ended=False)
    for index in range(16):
        callback.on_train_batch_start(trainer, module, None, index)
        trainer.global_step += index % 2
        module.phase_ended = trainer.global_step == ended
        callback.on_train_batch_end(trainer, module, None, None, index)
        if module.phase_ended and index % 2:
            break
    assert callback.noted == noted


def test_measurements_are_remembered():
    class Scores(Remembering):
        kind = Milestone

        def measure(self, trainer, module):
            """Nothing."""

    transitions = SimpleNamespace(phases=[])
    one, other = (Scores(RunConfig(), 1, transitions) for _ in range(2))
    one.history = [Milestone(1, 64, False, {"a": 0.5}), Milestone(2, 128, True, {"a": None})]
    other.load_state_dict(one.state_dict())
    assert other.history == one.history
    assert one.state_dict()["history"][1] == {
        **{"step": 2, "tokens": 128, "dropped": True, "scores": {"a": None}},
    }
