"""``python -m trainer +experiment=NAME key=value ...``: train, evaluate, report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.evaluate import (
    OF_A_RUN,
    asks_for_statements,
    both_lengths,
    kind_problem,
)
from trainer.commands.hydra.command import Command, Named
from trainer.common.errors import Problem, listed
from trainer.common.words import override_value

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.runs.config import RunConfig


CPU_TOKENS = 10**9
"""Tokens up to which training a published model on a CPU is realistic."""


def read_config(words: Sequence[str]) -> RunConfig:
    """Return the checked configuration of a command line.

    Raises:
        UserError: with all problems of keys, types and values together.
    """
    from trainer.commands.hydra.composing import compose_words

    return read_run(compose_words(words))


def read(composed: Composed) -> Named[RunConfig]:
    """Return the checked run, as :func:`read_run`.

    Raises:
        UserError: with all problems of keys, types and values together.
    """

    config = read_run(composed)
    return Named(config.name, config, composed.words)


def read_run(
    composed: Composed, known: Sequence[Problem] = (), *, weights: bool = True
) -> RunConfig:
    """Return the checked configuration of a run.

    ``known``: problems to report too. ``weights``: False if a published model's shape is taken from
    the configuration, because its weights are missing.

    Raises:
        UserError: with all problems of keys, types and values together.
    """
    from trainer.runs.config import RunConfig
    from trainer.runs.parsing import parse

    values, kind = composed.without_kind("evaluation")
    ignored = _ignored(composed, "from_run")
    of_weights = _ignored(composed, "from_pretrained") if weights else []
    problems = [*composed.problems, *ignored, *of_weights, *_word_problems(composed), *known]
    problems += both_lengths(composed)
    if kind not in OF_A_RUN:
        problems.append(kind_problem(composed.choices["evaluation"], kind, OF_A_RUN))
        values = {key: value for key, value in values.items() if key != "evaluation"}
    return parse(RunConfig, values, problems, weights=weights)


def _ignored(composed: Composed, source: str) -> list[Problem]:
    """Return the problems of words that set what the weights of ``source`` already have."""
    from trainer.runs.parsing import ignored_keys

    is_set = composed.value(f"model.{source}") is not None
    return ignored_keys(composed.named_keys, source) if is_set else []


@listed
def _word_problems(composed: Composed) -> Iterator[Problem]:
    """Check for words without effect: another word, or an experiment's own keys, override them."""
    from trainer.runs.parsing import idle_keys

    yield from idle_keys(composed.named_keys, composed.values)
    value, named_keys = composed.value, composed.named_keys
    for option, differing in composed.overruled.items():
        keys = differing
        if option == "drop=never":  # without a step no other key matters
            steps = {"drop.at", "drop.at_tokens"} if value("drop.enabled") else set()
            keys = {key: differing[key] for key in differing if key in steps}
        if not keys:
            continue
        settings = ", ".join(f"{key}={override_value(value)}" for key, (value, _) in keys.items())
        as_well = [f"{key}={override_value(value)}" for key, (_, value) in keys.items()]
        write = f"write {shlex.join(as_well)} as well"
        if option == "drop=never":
            controls = (value("controls") or {}).values()
            branches = any(isinstance(c, dict) and c.get("branch") == "drop" for c in controls)
            write = "write drop.enabled=false"
            write += (
                ", and leave out the controls that begin at the drop (controls=null)" * branches
            )
        yield Problem(option, f"the experiment sets {settings}, which stands above it; {write}.")
    tokens = value("trainer.max_tokens")
    if "trainer.max_steps" in named_keys and tokens is not None:
        both = "give steps or trainer.max_tokens, not both."
        stands_above = (
            f"the experiment sets trainer.max_tokens={tokens}, which stands above it; write "
            "trainer.max_tokens=null as well."
        )
        are_both_named = "trainer.max_tokens" in named_keys
        yield Problem("trainer.max_steps", both if are_both_named else stands_above)
    source, files = value("data.source"), value("data.files")
    is_list = isinstance(files, list) and files  # a wrong type is reported with the values
    if "data.files" in named_keys and source != "files" and is_list:
        yield Problem(
            "data.files", f"data.source={source} reads no files; write data=files as well."
        )
    # Statements alone are reported with the values.
    among_others = value("evaluation.tasks") != ["statements"]
    if asks_for_statements(composed.words) and among_others and value("data.needles.share") == 0:
        yield Problem(
            "evaluation.tasks",
            "'statements' asks for what the training text does not carry; set data.needles.share, "
            "such as data.needles.share=0.5, or leave the task out.",
        )


def execute(named: Named[RunConfig]) -> None:
    """Train, and print the report."""
    from trainer.commands.console import print_report, set_up_console

    set_up_console()
    from trainer.workflows.experiment import run_experiment

    config = named.request
    if (outcome := run_experiment(config)) is not None:
        report, existing = outcome
        print_report(report, config.run_dir, existing)


def compare_sweep(place: Path) -> None:
    """Compare the runs of a sweep."""
    from trainer.commands import compare
    from trainer.workflows.requests import CompareRequest

    compare.execute(CompareRequest([str(place)]))


def wordless(named: Named[RunConfig]) -> str:
    """Return the text for a command line without words: what to type, and what it would train."""
    config = named.request
    model, trainer, data = config.model, config.trainer, config.data
    shape = f"{model.num_hidden_layers} layers of width {model.hidden_size}"
    reads = f"{trainer.max_steps:,} steps of {trainer.batch_size} x {data.sequence_length} tokens"
    return f"""name an experiment, or say what a run of your own is:
  python -m trainer +experiment=drope_demo  RoPE, its drop and two controls: minutes on two cores
  python -m trainer name={config.name:18} the defaults alone, in {config.run_dir}, without a drop:
        {", ".join(config.positional.layers)}, {shape}, {reads} of {data.source}
  python -m trainer --help                  experiments, commands, groups and keys"""


HELP = """
unrope: train decoders with any positional encoding, drop it, and see how far they reach.

python -m trainer +experiment=NAME KEY=VALUE ...      train, evaluate, report
python -m trainer recalibrate MODEL text=FILES        drop a trained model's encoding
python -m trainer prepare +experiment=NAME            turn its text into tokens on disk, once
python -m trainer evaluate runs/NAME ...              evaluate a checkpoint
python -m trainer compare runs/A runs/B ...           the runs of a sweep beside each other
python -m trainer analyze runs/NAME +analysis=all     show its attention geometry
python -m trainer generate runs/NAME prompt="..."     continue a text
python -m trainer export runs/NAME to=DIR             write it for transformers
python -m trainer plan +experiment=NAME ...           what it will need: memory, hours, disk
python -m trainer COMMAND --help                      more about one of them

Try first:      python -m trainer +experiment=drope_demo
All values:     python -m trainer +experiment=drope_demo --cfg job
Words, such as cell, arm, control, phase: docs/glossary.md; problems: docs/troubleshooting.md
"""
COMMAND = Command(
    "config",
    HELP,
    read,
    execute,
    output=lambda named: named.request.run_dir,
    output_keys=("run_dir", "name"),
    described=("experiment",),
    together=compare_sweep,
    wordless=wordless,
)
