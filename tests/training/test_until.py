"""When a phase ends before its steps are done, by hand-made losses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from trainer.recalibration.config import DropConfig
from trainer.runs.config import RunConfig
from trainer.runs.phase_config import UntilConfig
from trainer.runs.phases import phases_of
from trainer.training.callbacks.until import Until


@pytest.fixture
def ended():
    """Go through a phase that begins after step 100 with such losses, measured every two steps of
    two micro-batches: after how many steps it ended, and what was said to others."""

    def go(losses, *, before=3.0, steps=20, drop=None, decides=lambda over: over, **until):
        (phase,) = phases_of(RunConfig())
        options = UntilConfig(**{"every": 2, "patience": 2, "flat": None} | until)
        phase = replace(phase, start=100, end=100 + steps, until=options, drop=drop)
        said, left = [], iter(losses)
        transitions = SimpleNamespace(
            effects={phase.name: {"loss_before": before}},
            losses=lambda module, phase: [next(left)] * 2,
            measure_end=lambda module, phase: said.append("measured"),
        )
        checkpointing = SimpleNamespace(save_now=lambda trainer: said.append("saved"))
        callback = Until(phase, transitions, checkpointing)
        trainer = SimpleNamespace(
            global_step=100,
            accumulate_grad_batches=2,
            should_stop=False,
            strategy=SimpleNamespace(broadcast=decides),
        )
        module = SimpleNamespace(phase_ended=False)
        for index in range(2 * steps):
            trainer.global_step += index % 2
            callback.on_train_batch_end(trainer, module, None, None, index)
            if trainer.should_stop:
                break
        callback.on_train_end(trainer, module)
        assert module.phase_ended == trainer.should_stop == (callback.ended is not None)
        return callback.ended, said, callback.losses

    return go


def test_a_phase_ends_where_its_loss_is_flat_over_its_patience(ended):
    """It fell by 1.0, 0.5, 0.25 over two measurements; less than 0.25 is flat."""
    losses = [4.0, 3.5, 3.0, 3.0, 2.75, 2.8125, 9.0]
    assert ended(losses, flat=0.25) == (12, ["measured", "saved"], losses[:6])


def test_a_phase_ends_where_its_loss_is_back(ended):
    assert ended([4.0, 3.51, 3.5], back_within=0.5)[0] == 6
    assert ended([4.0, 3.51, 3.5], back_within=0.5, flat=1.0)[0] == 6
    assert ended([4.0] * 10, back_within=0.5) == (None, [], [4.0] * 10)


def test_a_phase_whose_steps_are_done_ends_by_itself(ended):
    """Its last step is measured too, and ends nothing early."""
    assert ended([4.0, 3.75, 3.0], back_within=0.0, steps=6) == (None, [], [4.0, 3.75, 3.0])


def test_nothing_is_measured_while_angles_shrink(ended):
    assert ended([3.0], back_within=0.0, drop=DropConfig(anneal_steps=5))[::2] == (6, [3.0])
    assert ended([3.0], back_within=0.0, drop=DropConfig(anneal_steps=6))[::2] == (6, [3.0])


def test_the_first_rank_decides(ended):
    assert ended([9.0], back_within=0.0, decides=lambda _: True)[0] == 2
    assert ended([1.0] * 10, back_within=0.0, decides=lambda _: False)[0] is None


def test_losses_of_another_phase_are_not_remembered():
    (phase,) = phases_of(RunConfig())
    callback = Until(phase, None, None)
    callback.load_state_dict({"phase": "another", "losses": [1.0]})
    assert callback.state_dict() == {"phase": phase.name, "losses": []}
    callback.load_state_dict({"phase": phase.name, "losses": [1.0]})
    assert callback.state_dict() == {"phase": phase.name, "losses": [1.0]}
