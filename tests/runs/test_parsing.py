"""From plain values to a configuration: what is derived, and what a command line can say."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from trainer.common.errors import UserError
from trainer.config import RunConfig, TrainerConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, {"a": 1, "g": {"b": 2, "c": {"d": 3}}}),
        ({"a": {"x": 1}}, {"a": {"x": 1}, "g": {"b": 2, "c": {"d": 3}}}),
        ({"g": None}, {"a": 1, "g": None}),
        ({"g": {"c": {"e": 4}}, "n": 5}, {"a": 1, "g": {"b": 2, "c": {"d": 3, "e": 4}}, "n": 5}),
        ({"g": {"c": 6}}, {"a": 1, "g": {"b": 2, "c": 6}}),
    ],
)
def test_changes_are_laid_over_what_they_name(changes, result):
    base = {"a": 1, "g": {"b": 2, "c": {"d": 3}}}
    assert merged(base, changes) == result
    assert base == {"a": 1, "g": {"b": 2, "c": {"d": 3}}}


def controlled(*, drop=None, **controls):
    values = {"run_dir": "runs/x", "trainer": {"max_steps": 10}}
    return values | {"drop": {"at": drop}, "controls": controls}


def test_a_control_is_the_run_with_its_changes_and_without_controls():
    values = controlled(drop=5, a={"branch": 3, "drop": {"at": 7}}, b={"seed": 4})
    run, control, other = parse(values).runs.values()
    assert (control.directory, control.config.seed) == (Path("runs/x/controls/a"), 0)
    assert (control.controls, control.config.controls) == ({}, {})
    assert (control.phases.drop_step, run.phases.drop_step) == (7, 5)
    assert (run.branch, control.branch, other.branch) == (None, 3, None)
    assert other.config.seed == 4


def test_branches_are_possible_from_every_step_until_which_both_are_changed_alike():
    ends = {"a": {"branch": 1}, "b": {"branch": 5}, "c": {"branch": "drop"}, "d": {"branch": None}}
    parse(controlled(drop=5, **ends))
    parse(controlled(a={"branch": 9}))
    for beyond in ({"branch": 10}, {"branch": 4, "trainer": {"max_steps": 4}}):
        with pytest.raises(UserError, match=r"controls\.a\.branch: .* before the control's end"):
            parse(controlled(a=beyond))
    parse(controlled(drop=5, a={"branch": 6}))


@pytest.mark.parametrize(
    ("changes", "is_alike"),
    [
        ({"phases": {"b": {"rescale": {"factor": 4.0}}}}, False),
        ({"phases": {"b": {"optimizer_state": "reset"}}}, False),
        ({"phases": {"b": {"schedule": {"peak": 0.5}}}}, True),
        ({"optimizer": {"muon_lr": 1.0}}, True),
    ],
)
def test_a_branch_is_from_where_the_phases_were_alike(changes, is_alike):
    phases = {"a": {"steps": 4}, "b": {"steps": 6, "rescale": {"factor": 2.0}}}
    for step in (4, 5):
        values = {"phases": phases, "controls": {"x": {"branch": step, **changes}}}
        expected = nullcontext()
        if step == 5 and not is_alike:
            expected = pytest.raises(UserError, match="before step 5")
        with expected:
            parse(values)


def test_every_step_and_length_that_a_run_has_follows_from_its_groups():
    values = {"data": {"sequence_length": 64}, "trainer": {"batch_size": 3, "max_steps": 10}}
    phases = parse({"run_dir": "x", **values, "drop": {"at": 2}}).phases
    assert (phases[-1].tokens_per_step, phases[-1].length, phases.drop_step) == (192, 64, 2)
    phases = {
        "a": {"steps": 2, "sequence_length": 32}, "b": {"steps": 3, "sequence_length": 128},
        "c": {"steps": 4, "drop": {}}, "d": {"steps": 1, "drop": {"to": "alibi"}},
    }  # fmt: skip
    phases = parse({"run_dir": "x", **values, "phases": phases}).phases
    assert (phases[-1].length, phases.drop_step) == (64, 5)


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ({"strategy": {"name": "ddp"}}, "trains in the processes of its run"),
        ({"data": {"sequence_length": 24}}, "trains on 24 tokens, the run on"),
    ],
)
def test_a_control_that_cannot_be_compared_is_refused(control, message):
    with pytest.raises(UserError, match=rf"controls\.other.*{message}"):
        parse(controlled(other=control))


def test_a_control_drops_where_its_run_has_nothing_to_drop():
    """Controls begin with the keys that were given, whatever the run itself makes of them."""
    values = {"positional": {"layers": ["nope"]}, "drop": {"at": 0.75}}
    run = parse(values | {"controls": {"drope": {"positional": {"layers": ["rope"]}}, "same": {}}})
    assert run.phases.drop_step is None
    assert run.controls["drope"].phases.drop_step == round(0.75 * run.config.trainer.max_steps)
    assert run.controls["same"].phases.drop_step is None


def test_a_control_branches_off_where_its_run_has_saved():
    """Before the first step a run saves nothing but its state before a drop."""
    for_drop = controlled(drop=0, other={"branch": "drop", "drop": {"at": 0}})
    assert parse(for_drop).controls["other"].branch == "drop"
    with pytest.raises(UserError, match=r"controls\.other\.branch: expected"):
        parse(controlled(other={"branch": 0}))
    with pytest.raises(UserError, match=r"controls\.other\.branch: 'drop', but"):
        parse(controlled(other={"branch": "drop"}))


def test_every_line_about_a_control_has_its_name():
    with pytest.raises(UserError) as error:
        parse(controlled(other={"trainer": {"max_steps": -1, "batch_size": -1}}))
    keys = [line.partition(":")[0] for line in str(error.value).splitlines()]
    names = ("max_steps", "batch_size")
    assert sorted(keys) == sorted(f"controls.other.trainer.{name}" for name in names)


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "fits"),
    [(32, 2, 6, False), (32, None, 48, False), (48, 8, 4, False), (32, 2, 16, True),
     (32, None, 1, True), (6, None, 2, True), (5, None, 2, False)],
)  # fmt: skip
def test_batches_divide_among_ranks_or_are_refused(batch, micro, processes, fits):
    trainer = TrainerConfig(batch_size=batch, micro_batch_size=micro)
    (phase,) = phases_of(RunConfig(trainer=trainer))
    if fits:
        assert phase.micro_batches(processes) * processes * (micro or batch // processes) == batch
        return
    with pytest.raises(UserError, match=rf"{batch} sequences .*\(ranks: {processes}\)"):
        phase.micro_batches(processes)


@pytest.mark.parametrize(
    ("phase", "key"),
    [
        ({"batch_size": 10, "micro_batch_size": 4}, "phases.a.batch_size"),
        ({"micro_batch_size": 5}, "phases.a.batch_size"),
        ({}, "trainer.batch_size"),
        ({"weights": {"zz": 1.0}}, "phases.a.weights"),
    ],
)
def test_what_a_phase_cannot_do_is_told_with_its_key(phase, key):
    values = {"trainer": {"batch_size": 8, "micro_batch_size": 3}}
    with pytest.raises(UserError) as error:
        parse(values | {"phases": {"a": {"steps": 4, **phase}}})
    assert str(error.value).startswith(f"{key}: ")


@pytest.mark.parametrize("at", [5e2, 500, 0.5])
def test_a_drop_is_at_a_whole_number_of_steps_or_a_share_of_them(at):
    values = {"trainer": {"max_steps": 1000}, "drop": {"at": at}}
    assert parse(values).phases.drop_step == 500
    with pytest.raises(UserError, match=r"^drop\.at: .*got 1\.5"):
        parse(values | {"drop": {"at": 1.5}})


@pytest.mark.parametrize(
    ("changes", "drops"),
    [
        ({}, False),
        ({"model": {"qk_norm": {"when": "after_drop"}}}, False),
        ({"model": {"num_hidden_layers": 1}, "positional": {"layers": ["nope", "rope"]}}, False),
        ({"positional": {"heads": {"rope": 1 / 3}}}, True),
        ({"drop": {"at": 5, "windows": [16]}}, True),
        ({"drop": {"at": 5, "to": "alibi"}}, True),
    ],
)
def test_a_drop_of_nope_counts_if_it_changes_the_encoding(changes, drops):
    values = {"positional": {"layers": ["nope"]}, "drop": {"at": 5}, "trainer": {"max_steps": 9}}
    run = parse(merged(values, changes))
    assert (run.phases.drop_step == 5) is drops
