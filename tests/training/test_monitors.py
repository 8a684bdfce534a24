"""When a run is measured, on hand-made steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.evaluation.results import Milestone, Reach
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.training.callbacks.monitors import Monitors


class Noting:
    """Notes the steps after which it measures, and whether the encoding was dropped."""

    def __init__(self, every):
        self.every, self.noted = every, []

    def is_due(self, module, step):
        return step % self.every == 0

    def measure(self, trainer, module, has_dropped):
        self.noted.append((trainer.global_step, has_dropped))
        return {"measured": trainer.global_step}


def monitors(*measures, changes=(), ends=(), add_metrics=None):
    """Monitors of a run whose model changes after such steps, and whose phases end so."""
    transitions = SimpleNamespace(
        phases=[SimpleNamespace(end=end) for end in ends],
        changed_at=changes.__contains__,
        has_dropped=False,
    )
    callback = Monitors(RunConfig(), None, Ranks(), transitions, add_metrics)
    callback.measures = list(measures)
    return callback, transitions


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
    added = []
    measure = Noting(every)
    callback, _ = monitors(measure, changes=crossed, ends=ends, add_metrics=added.append)
    trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=2)
    module = SimpleNamespace(phase_ended=False)
    for index in range(16):
        callback.on_train_batch_start(trainer, module, None, index)
        trainer.global_step += index % 2
        module.phase_ended = trainer.global_step == ended
        callback.on_train_batch_end(trainer, module, None, None, index)
        if module.phase_ended and index % 2:
            break
    assert measure.noted == [(step, False) for step in noted]
    assert added == [{"measured": step} for step in noted]


def test_each_measure_has_its_own_schedule_and_a_change_is_measured_by_all():
    often, seldom = Noting(2), Noting(3)
    callback, transitions = monitors(often, seldom, changes=(4,), ends=(8,), add_metrics=len)
    trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=1)
    module = SimpleNamespace(phase_ended=False)
    for index in range(8):
        transitions.has_dropped = trainer.global_step >= 4
        callback.on_train_batch_start(trainer, module, None, index)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, index)
    assert often.noted == [(2, False), (4, False), (4, True), (6, True), (8, True)]
    assert seldom.noted == [(3, False), (4, True), (6, True), (8, True)]


@pytest.mark.parametrize(
    ("step", "trained", "milestones", "measured"),
    [(0, True, [], True), (1, True, [], False), (0, False, [], False), (0, True, ["one"], False)],
)
def test_trained_weights_are_measured_before_the_first_step(step, trained, milestones, measured):
    measure, done = Noting(1), []
    callback, _ = monitors(measure, add_metrics=done.append)
    callback.first_measure = measure if trained else None
    callback.milestones = milestones
    module = SimpleNamespace(timer=SimpleNamespace(read=lambda: done.append("clock")))
    callback.on_train_start(SimpleNamespace(global_step=step), module)
    assert done == ([{"measured": 0}, "clock"] if measured else [])


def test_measurements_are_kept_by_a_run_that_measures_no_more():
    reach = Reach(3, False, 32, (32,), (2.0,), (), (0, 32), (2.0,))
    milestone = Milestone(1, 64, False, {"a": 0.5})
    callback, _ = monitors()
    callback.restore(SimpleNamespace(lengths=[reach], benchmarks=[milestone]))
    assert (callback.reaches, callback.milestones) == ([reach], [milestone])
