"""What is impossible in the groups ``optimizer``, ``trainer``, ``strategy`` and ``monitor``."""

from __future__ import annotations

import pytest

from trainer.runs.training_config import (
    BenchmarksConfig,
    MonitorConfig,
    StrategyConfig,
    TrainerConfig,
    seconds_of,
)

POSSIBLE = [
    TrainerConfig(
        max_steps=1, batch_size=1, micro_batch_size=1, max_time="0:59:59", profile_steps=[1, 1]
    ),
    TrainerConfig(step_timeout=None, profile_steps=[1, 1000], batch_size=6, micro_batch_size=3),
    StrategyConfig("hsdp", shard_size=1, cpu_offload=True),
    StrategyConfig("fsdp2", cpu_offload=True, timeout=0.1),
    StrategyConfig("ddp"),
    MonitorConfig(
        lengths_every=1, lengths=[1], trials=0, windows=1, probe_every=1, probe_sequences=1
    ),
    BenchmarksConfig(every=1, tasks=["perplexity"], lengths=[0.5], limit=1),
    BenchmarksConfig(every_tokens=1, multiple_choice=["piqa"]),
    BenchmarksConfig(every=1, harness=["piqa"]),
]  # fmt: skip


@pytest.mark.parametrize("config", [type(c)() for c in POSSIBLE] + POSSIBLE)
def test_defaults_and_what_lies_just_within_the_bounds_are_possible(config):
    assert config.problems() == []


TIME = "trainer.max_time: expected hours:minutes:seconds such as 23:50:00, got "
PROFILED = (
    "trainer.profile_steps: expected the first and the last of steps 1 to 1000, such as [10, 13], "
    "got "
)
SHARDS = "strategy.shard_size: a number of ranks, for strategy=hsdp only."
IMPOSSIBLE = [
    *((TrainerConfig, {"max_time": t}, f"{TIME}{t!r}.") for t in ("1:60:00", "10:00", "1:1:1")),
    *(
        (TrainerConfig, {"profile_steps": steps}, f"{PROFILED}{steps}.")
        for steps in ([3], [5, 4], [2, 1001], [1, 2, 3])
    ),
    (
        TrainerConfig, {"batch_size": 8, "micro_batch_size": 3},
        "trainer.micro_batch_size: 3 does not divide trainer.batch_size 8.",
    ),
    (StrategyConfig, {"name": "fsdp2", "shard_size": 2}, SHARDS),
    *(
        (
            StrategyConfig, {"name": name, "cpu_offload": True},
            f"strategy.cpu_offload: strategy={name} does not shard; choose fsdp2 or hsdp.",
        )
        for name in ("single", "ddp")
    ),
    (MonitorConfig, {"lengths": []}, "monitor.lengths: expected one or more, got none."),
    (
        BenchmarksConfig, {"every": 1, "every_tokens": 1, "tasks": ["perplexity"]},
        "monitor.benchmarks.every_tokens: give steps (every) or tokens, not both.",
    ),
    *(
        (
            BenchmarksConfig, {key: 5},
            "monitor.benchmarks: expected tasks, multiple_choice or harness to name one or more, "
            "for instance 'monitor.benchmarks.multiple_choice=[piqa]'.",
        )
        for key in ("every", "every_tokens")
    ),
    *(
        (
            BenchmarksConfig, {key: ["perplexity"]},
            "monitor.benchmarks.every: expected the steps (or every_tokens) between them, for "
            "instance 1000.",
        )
        for key in ("tasks", "multiple_choice", "harness")
    ),
    (
        BenchmarksConfig, {"every": 1, "tasks": ["perplexity", "perplexit"]},
        "monitor.benchmarks.tasks: unknown task 'perplexit'. Did you mean 'perplexity'?",
    ),
    (
        BenchmarksConfig, {"lengths": []},
        "monitor.benchmarks.lengths: expected positive multiples of the training length, got [].",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("group", "values", "message"), IMPOSSIBLE)
def test_what_is_impossible_is_said_in_one_sentence(group, values, message):
    assert [*map(str, group(**values).problems())] == [message]


@pytest.mark.parametrize(
    ("micro", "ranks", "passes"), [(None, 1, 1), (None, 4, 1), (2, 1, 8), (2, 4, 2), (16, 1, 1)]
)
def test_a_rank_accumulates_what_of_its_share_does_not_fit_into_one_pass(micro, ranks, passes):
    assert TrainerConfig(batch_size=16, micro_batch_size=micro).accumulation(ranks) == passes


def test_hours_minutes_and_seconds_are_seconds():
    assert seconds_of("2:03:04") == 2 * 3600 + 3 * 60 + 4


def test_benchmarks_are_due_every_so_many_steps_or_whenever_so_many_tokens_were_passed():
    by_step = BenchmarksConfig(every=3)
    by_token = BenchmarksConfig(every_tokens=100)
    assert by_step.enabled
    assert by_token.enabled
    assert [step for step in range(1, 10) if by_step.is_due(0, 0, step)] == [3, 6, 9]
    read = [(40 * step, 40 * step + 40) for step in range(8)]
    assert [tokens for before, tokens in read if by_token.is_due(before, tokens, 1)] == [
        120, 200, 320,
    ]  # fmt: skip
    assert not BenchmarksConfig().enabled
    assert not BenchmarksConfig().is_due(0, 10**9, 100)
