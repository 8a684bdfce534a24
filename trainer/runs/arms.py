"""Configurations of an experiment: the run, its controls, and the phases of each.

A check of the run alone misses faults of later phases and of controls, which would end the job
after hours. All checks therefore get their configurations from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from trainer.common.errors import Problem, listed
from trainer.config import MAIN, RunConfig, SourceConfig, StrategyConfig
from trainer.runs.descriptions import label
from trainer.runs.directory import differences, plain
from trainer.runs.parsing import control_config
from trainer.runs.phases import phases_of

Check = Callable[[RunConfig], Sequence[Problem]]
"""Function that returns the problems of a configuration."""


def arms_of(config: RunConfig, weights: bool = True) -> dict[str, RunConfig]:
    """Return the configurations of the run, first and as ``main``, and of its controls by name.

    ``weights``: whether the weights that they begin with are available; otherwise the configured
    shape is used.
    """
    controls = {name: control_config(plain(config), name, weights) for name in config.controls}
    return {MAIN: config, **controls}


def phase_configs(arms: Mapping[str, RunConfig]) -> list[tuple[str, RunConfig]]:
    """Return the configuration of every phase of every arm, with the name of the arm."""
    return [(name, phase.config) for name, arm in arms.items() for phase in phases_of(arm)]


def arm_problems(
    arms: Mapping[str, RunConfig],
    of_run: Sequence[Check] = (),
    of_phase: Sequence[Check] = (),
) -> list[Problem]:
    """Return the problems of all arms, each once; those of a control alone under its name.

    ``of_run``: checks of keys that stay the same during a run. ``of_phase``: checks of sizes,
    lengths and texts, which each phase may change.
    """
    problems_of = {name: [p for check in of_run for p in check(arm)] for name, arm in arms.items()}
    for name, config in phase_configs(arms):
        problems_of[name] += [problem for check in of_phase for problem in check(config)]
    shared = {*problems_of[MAIN]}
    named = [
        problem if name == MAIN or problem in shared else problem.under(f"controls.{name}")
        for name, problems in problems_of.items()
        for problem in problems
    ]
    return list(dict.fromkeys(named))


def _texts_of(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the keys that decide on each text of a run, by the name of the text."""
    keys = [*(key.name for key in fields(SourceConfig)), "prepared"]
    return {
        name: {key: getattr(text, key) for key in keys}
        for name, (text, _) in config.data.texts.items()
    }


@listed
def control_problems(arms: Mapping[str, RunConfig]) -> Iterator[Problem]:
    """Check that no two arms have one label, and that controls share what they must with their run.

    All arms train in the same processes, one after the other, and read the run's text; a control
    may omit texts of a mixture and weight them differently. A table is for one training length.
    """
    run, names = arms[MAIN], dict[str, str]()
    texts = _texts_of(run)
    for name, arm in arms.items():
        key, called = f"controls.{name}", label(arm)
        if names.setdefault(called, name) != name:
            drops = arm.drop_step is not None
            no_drop = f", or {key}.drop.enabled=false if it is not to drop" if drops else ""
            yield Problem(
                f"{key}.label",
                f"{called!r} is what {names[called]} is called too; give it another{no_drop}.",
            )
        if arm.training_length != run.training_length:
            yield Problem(
                key,
                f"its longest sequences have {arm.training_length:,} tokens, and those of the run "
                f"{run.training_length:,}; a table is for one length.",
            )
        for text, source in _texts_of(arm).items():
            if texts.get(text) != source:
                yield Problem(
                    f"{key}.data",
                    f"a control reads the text of its run, and {text!r} is another; train it as a "
                    "run of its own.",
                )
        if differing := differences(asdict(run.tokenizer), asdict(arm.tokenizer), ()):
            yield Problem(
                f"{key}.tokenizer",
                "a control reads the tokens of its run, and has another "
                f"{', '.join(k for k, *_ in differing)}; train it as a run of its own.",
            )
        if (arm.strategy.name == "single") != (run.strategy.name == "single"):
            yield Problem(
                f"{key}.strategy",
                f"{arm.strategy.name!r}, but the processes of the run are started for "
                f"{run.strategy.name!r}; leave it out, or train it as a run of its own.",
            )
        for device_key in ("accelerator", "threads"):
            value, shared = (getattr(config.trainer, device_key) for config in (arm, run))
            if value != shared:
                yield Problem(
                    f"{key}.trainer.{device_key}",
                    f"{value!r}, but a control trains in the processes of its run, which has "
                    f"{shared!r}; leave it out.",
                )


@listed
def spread_problems(config: RunConfig, processes: int, on_a_node: int) -> Iterator[Problem]:
    """Check that a run fits this number of processes."""
    run = config.trainer
    micro = run.micro_batch_size or 1
    if run.batch_size % processes:
        yield Problem(
            "trainer.batch_size",
            f"{run.batch_size} sequences do not divide into micro-batches of {micro} on "
            f"{processes} ranks; start {_near_divisors(run.batch_size // micro, processes)} ranks.",
        )
    elif run.batch_size % (processes * micro):
        share = run.batch_size // processes
        yield Problem(
            "trainer.micro_batch_size",
            f"the {share} sequences of each of {processes} ranks do not divide into micro-batches "
            f"of {micro}; choose {_near_divisors(share, micro)}.",
        )
    tokens = (run.micro_batch_size or run.batch_size // processes) * config.data.sequence_length
    if run.fp8 and tokens % 16:
        yield Problem(
            "trainer.fp8",
            f"float8 products need a multiple of 16 tokens, and a micro-batch has {tokens:,}.",
        )
    size = shard_size(config.strategy, processes, on_a_node)
    if config.strategy.name == "hsdp" and processes % size:
        yield Problem(
            "strategy.shard_size",
            f"{size} does not divide the {processes} ranks; by default it is the number of ranks "
            "on a node.",
        )


def _near_divisors(number: int, near: int) -> str:
    """Return the divisors of a number just below and above ``near``: ``4 or 8``."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below, above = [n for n in divisors if n <= near], [n for n in divisors if n > near]
    return " or ".join(map(str, [*below[-1:], *above[:1]]))


def gpus_that_fit(config: RunConfig, nodes: int) -> int:
    """Return how many GPUs per node (at most eight) can share the batches of all phases and
    controls.

    ``nodes``: number of nodes. 1 for the strategy ``single``.
    """
    arms = arms_of(config, weights=False)
    if any(arm.strategy.name == "single" for arm in arms.values()):
        return 1
    configs = [config for _, config in phase_configs(arms)]

    def fits(gpus: int) -> bool:
        return not any(spread_problems(config, nodes * gpus, gpus) for config in configs)

    return next(filter(fits, (8, 4, 2)), 1)


def shard_size(config: StrategyConfig, processes: int, on_a_node: int) -> int:
    """Return the number of ranks that share one copy of the parameters."""
    if config.name == "hsdp":
        return config.shard_size or on_a_node
    return processes
