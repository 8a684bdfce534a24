"""What is impossible in the groups ``optimizer``, ``trainer``, ``strategy`` and ``monitor``."""

from __future__ import annotations

import pytest

from trainer.runs.monitoring import BenchmarksConfig, MonitorConfig
from trainer.runs.timeouts import TimeoutConfig
from trainer.runs.training_config import (
    COUNTS,
    OptimizerConfig,
    StrategyConfig,
    TrainerConfig,
    seconds_of,
)

POSSIBLE = [
    OptimizerConfig(
        lr=1e-9, eps=1e-30, muon_lr=1e-9, weight_decay=0, betas=(0, 0.99), muon_momentum=0
    ),
    TrainerConfig(
        **dict.fromkeys(COUNTS, 1), gradient_clip=0, z_loss=0, keep_best=0, step_timeout=0.1,
        checkpoint_minutes=0.1, max_time="0:59:59", profile_steps=[1, 1],
    ),
    TrainerConfig(step_timeout=None, profile_steps=[1, 1000], batch_size=6, micro_batch_size=3),
    StrategyConfig("hsdp", shard_size=1, cpu_offload=True),
    StrategyConfig("fsdp2", cpu_offload=True, timeouts=TimeoutConfig(0.1, 0.1, 0.1)),
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


BETAS = "optimizer.betas, optimizer.muon_momentum: expected numbers in [0, 1)."
NOT_NEGATIVE = "trainer.gradient_clip, trainer.z_loss: expected 0 or more."
TIME = "trainer.max_time: expected hours:minutes:seconds such as 23:50:00, got "
PROFILED = (
    "trainer.profile_steps: expected the first and the last of steps 1 to 1000, such as [10, 13], "
    "got "
)
SHARDS = "strategy.shard_size: a number of ranks, for strategy=hsdp only."
IMPOSSIBLE = [
    *(
        (OptimizerConfig, {key: 0.0}, f"optimizer.{key}: expected a positive number, got 0.0.")
        for key in ("lr", "eps", "muon_lr")
    ),
    (
        OptimizerConfig, {"weight_decay": -0.1},
        "optimizer.weight_decay: expected 0 or more, got -0.1.",
    ),
    (OptimizerConfig, {"betas": (-0.1, 0.9)}, BETAS),
    (OptimizerConfig, {"betas": (0.9, 1.0)}, BETAS),
    (OptimizerConfig, {"muon_momentum": 1.0}, BETAS),
    *((TrainerConfig, {key: 0}, f"trainer.{key}: expected 1 or more, got 0.") for key in COUNTS),
    (TrainerConfig, {"gradient_clip": -1.0}, NOT_NEGATIVE),
    (TrainerConfig, {"z_loss": -1e-4}, NOT_NEGATIVE),
    (TrainerConfig, {"keep_best": -1}, "trainer.keep_best: expected 0 or more, got -1."),
    (TrainerConfig, {"step_timeout": 0}, "trainer.step_timeout: expected seconds, got 0."),
    (
        TrainerConfig, {"checkpoint_minutes": -1},
        "trainer.checkpoint_minutes: expected minutes, got -1.",
    ),
    *((TrainerConfig, {"max_time": t}, f"{TIME}{t!r}.") for t in ("1:60:00", "10:00", "1:1:1")),
    *(
        (TrainerConfig, {"profile_steps": steps}, f"{PROFILED}{steps}.")
        for steps in ([3], [0, 2], [5, 4], [2, 1001], [1, 2, 3])
    ),
    (
        TrainerConfig, {"batch_size": 8, "micro_batch_size": 3},
        "trainer.micro_batch_size: 3 does not divide trainer.batch_size 8.",
    ),
    *(
        (
            StrategyConfig, {"timeouts": TimeoutConfig(**{key: 0.0})},
            f"strategy.timeouts.{key}: expected seconds, got 0.0.",
        )
        for key in ("start", "collective", "one_rank")
    ),
    (StrategyConfig, {"name": "hsdp", "shard_size": 0}, SHARDS),
    (StrategyConfig, {"name": "fsdp2", "shard_size": 2}, SHARDS),
    *(
        (
            StrategyConfig, {"name": name, "cpu_offload": True},
            f"strategy.cpu_offload: strategy={name} does not shard; choose fsdp2 or hsdp.",
        )
        for name in ("single", "ddp")
    ),
    *(
        (MonitorConfig, {key: 0}, f"monitor.{key}: expected 1 or more, got 0.")
        for key in ("lengths_every", "windows", "probe_every", "probe_sequences")
    ),
    *(
        (
            MonitorConfig, {"lengths": lengths},
            "monitor.lengths: expected multiples of the training length, 1 or more, got "
            f"{lengths}.",
        )
        for lengths in ([], [2, 0])
    ),
    (MonitorConfig, {"trials": -1}, "monitor.trials: expected 0 or more, got -1."),
    (
        MonitorConfig, {"benchmarks": BenchmarksConfig(limit=0)},
        "monitor.benchmarks.limit: expected 1 or more, got 0.",
    ),
    *(
        (
            BenchmarksConfig, {key: 0, "tasks": ["perplexity"]},
            f"monitor.benchmarks.{key}: expected 1 or more, got 0.",
        )
        for key in ("every", "every_tokens")
    ),
    (
        BenchmarksConfig, {"every": 1, "every_tokens": 1, "tasks": ["perplexity"]},
        "monitor.benchmarks.every_tokens: give steps (every) or tokens, not both.",
    ),
    *(
        (
            BenchmarksConfig, {key: 5},
            "monitor.benchmarks: expected tasks, multiple_choice or harness to name one or more, "
            "for instance monitor.benchmarks.multiple_choice=[piqa].",
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
    *(
        (
            BenchmarksConfig, {"lengths": lengths},
            "monitor.benchmarks.lengths: expected positive multiples of the training length, got "
            f"{lengths}.",
        )
        for lengths in ([], [1.0, 0.0])
    ),
]  # fmt: skip


@pytest.mark.parametrize(("group", "values", "said"), IMPOSSIBLE)
def test_what_is_impossible_is_said_in_one_sentence(group, values, said):
    assert [*map(str, group(**values).problems())] == [said]


def test_two_mistakes_are_named_and_sizes_are_compared_only_without_any():
    wrong = TrainerConfig(batch_size=0, micro_batch_size=3, keep_best=-1)
    assert [problem.split(":")[0] for problem in map(str, wrong.problems())] == [
        "trainer.batch_size",
        "trainer.keep_best",
    ]


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
