"""What a run and its controls must have in common, and how batches divide among ranks."""

from __future__ import annotations

import pytest

from trainer.common.errors import UserError
from trainer.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.arms import arms_of, check_arms, check_spread, shard_size
from trainer.runs.parsing import parse


def arms(**control):
    values = {"run_dir": "runs/run", "trainer": {"batch_size": 4}, "controls": {"other": control}}
    return arms_of(parse(RunConfig, values))


def test_a_control_is_the_run_with_its_changes():
    run, control = arms(trainer={"batch_size": 2}).values()
    assert (run.trainer.batch_size, control.trainer.batch_size) == (4, 2)
    assert control.run_dir == "runs/run/controls/other"
    check_arms({"main": run, "other": control})


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ({"strategy": {"name": "ddp"}}, "trains in the processes of its run"),
        ({"data": {"revision": "y"}}, "reads the texts and tokens of its run"),
        ({"tokenizer": {"vocab_size": 999}}, "reads the texts and tokens of its run"),
        ({"data": {"sequence_length": 24}}, "trains on 24 tokens, the run on"),
    ],
)
def test_a_control_that_cannot_be_compared_is_refused(control, message):
    with pytest.raises(UserError, match=rf"controls\.other.*{message}"):
        check_arms(arms(**control))


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "fits"),
    [(32, 2, 6, False), (32, None, 48, False), (48, 8, 4, False), (32, 2, 16, True),
     (32, None, 1, True), (6, None, 2, True), (5, None, 2, False)],
)  # fmt: skip
def test_batches_divide_among_ranks_or_are_refused(batch, micro, processes, fits):
    config = RunConfig(trainer=TrainerConfig(batch_size=batch, micro_batch_size=micro))
    if fits:
        check_spread(config, processes, processes)
        return
    with pytest.raises(UserError, match=f"{batch} sequences do not divide .* on {processes} ranks"):
        check_spread(config, processes, processes)


def test_a_hybrid_shards_inside_a_node():
    assert shard_size(StrategyConfig(name="hsdp"), 16, 8) == 8
    assert shard_size(StrategyConfig(name="hsdp", shard_size=4), 16, 8) == 4
    assert shard_size(StrategyConfig(name="fsdp2"), 16, 8) == 16
    uneven = StrategyConfig("hsdp", shard_size=4)
    with pytest.raises(UserError, match=r"strategy\.shard_size: 4 does not divide 6 ranks"):
        check_spread(RunConfig(trainer=TrainerConfig(batch_size=12), strategy=uneven), 6, 6)
