"""From which steps on a control can go on as its run was."""

from __future__ import annotations

import pytest

from trainer.common.errors import UserError
from trainer.runs.config import RunConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import branch_problems

BASE = {"run_dir": "x", "trainer": {"max_steps": 20}}


def configured(**changes):
    return parse(RunConfig, merged(BASE, changes))


LATER = "branch: after step {} the run and the control are not changed alike, and step {}, from"
SAMPLES = "branch: from step {} on the run reads other samples than the control."
LONGER = {"phases": {"a": {"steps": 10}, "b": {"steps": 10, "sequence_length": 32}}}
SMALLER = {"phases": {"a": {"steps": 10}, "b": {"steps": 10, "batch_size": 4}}}
EARLY = {"phases": {"a": {"steps": 10, "until": {"every": 5, "flat": 0.1}}}}
RESET = {"optimizer_state": "reset"}
SLOWER = {"rescale": {"factor": 2.0}}


@pytest.mark.parametrize(
    ("run", "control", "step", "said"),
    [
        ({}, {}, 20, None),
        ({"drop": {"at": 10}}, {"drop": {"at": 10}}, 15, None),
        ({"drop": {"at": 10}}, {}, 10, None),
        ({"drop": {"at": 10}}, {}, 11, LATER.format(10, 11)),
        ({}, {"drop": {"at": 10}}, 11, LATER.format(10, 11)),
        ({"drop": {"at": 10}}, {"drop": {"at": 10, "to": "alibi"}}, 11, LATER.format(10, 11)),
        ({"drop": {"at": 10}}, {"drop": {"at": 10, **RESET}}, 11, None),
        (
            {"drop": {"at": 10}}, {"drop": {"at": 10, "optimizer_state": "keep"}}, 11,
            LATER.format(10, 11),
        ),
        # A phase that begins without a change is no other run than one that goes on.
        ({"phases": {"a": {"steps": 10}, "b": {"steps": 10, "log_every": 1}}}, {}, 20, None),
        (
            {"phases": {"a": {"steps": 10}, "b": {"steps": 10, **RESET}}}, {}, 11,
            LATER.format(10, 11),
        ),
        (
            {"phases": {"a": {"steps": 10}, "b": {"steps": 10, **SLOWER, **RESET}}},
            {"phases": {"a": {"steps": 10}, "b": {"steps": 10, **SLOWER}}}, 11,
            LATER.format(10, 11),
        ),
        ({}, {"trainer": {"batch_size": 4}}, 1, SAMPLES.format(0)),
        ({}, {"data": {"sequence_length": 32}}, 1, SAMPLES.format(0)),
        ({}, {"trainer": {"batch_size": 4}}, 0, None),
        (LONGER, {}, 10, None),
        (LONGER, {}, 11, SAMPLES.format(10)),
        (SMALLER, {}, 11, SAMPLES.format(10)),
        ({}, SMALLER, 11, SAMPLES.format(10)),
        (LONGER, LONGER, 20, None),
        (EARLY, EARLY, 1, "branch: 'a' may end early, so that step 1 may lie behind it."),
        (EARLY, EARLY, 0, None),
    ],
)  # fmt: skip
def test_a_control_goes_on_from_where_both_were_alike(run, control, step, said):
    found = [*map(str, branch_problems(configured(**run), configured(**control), step))]
    assert len(found) == (said is not None)
    assert not said or found[0].startswith(said)


def test_a_control_that_does_not_branch_off_may_read_other_samples():
    other = {"trainer": {"batch_size": 4}}
    assert configured(controls={"c": other}).controls == {"c": other}
    with pytest.raises(
        UserError, match=r"^controls\.c\.branch: from step 0 on the run reads other"
    ):
        configured(controls={"c": {**other, "branch": 5}})
