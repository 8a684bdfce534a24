"""Commands: each takes its composed configuration, works, and prints the outcome."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.commands.composing import Composed, compose_words
from trainer.commands.help import quoted
from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.common.processes import is_first_process, stopping_at_once
from trainer.config import (
    AnalysisRequest,
    CompareRequest,
    EvaluationConfig,
    EvaluationRequest,
    ExportRequest,
    GenerationRequest,
    PlanKeys,
    RecalibrateKeys,
    RunConfig,
)
from trainer.runs.directory import check_start
from trainer.runs.parsing import parse

log = logging.getLogger(__name__)

STOPS = signal.SIGTERM, signal.SIGUSR1
"""Signals of a batch system, which requeues the job; its command then resumes."""

T = TypeVar("T")


def read_config(words: Sequence[str], *, weights: bool = True) -> RunConfig:
    """Return the checked configuration of a run.

    ``weights``: whether the weights that it begins with are available.
    """
    return read_run(compose_words(words), weights=weights)


def read_run(composed: Composed, *, weights: bool = True) -> RunConfig:
    """Return the checked configuration of a composed run.

    Raises:
        UserError: a key of the shape is among the words, but trained weights bring theirs.
    """
    model = composed.values["model"]
    if model["from_pretrained"] or model["from_run"]:
        for word in composed.words:
            if re.match(r"\+*model\.(?!attention_backend|qk_norm\.|from_)", word):
                raise UserError(
                    f"{word.partition('=')[0].lstrip('+')}: the trained weights bring their shape"
                )
    return parse(RunConfig, composed.values, weights=weights)


def split_keys(composed: Composed, schema: type[T]) -> tuple[T, Composed]:
    """Return a command's own keys, and the run without them."""
    names = {field.name for field in fields(schema)}  # type: ignore[arg-type]  # a dataclass
    own = {key: value for key, value in composed.values.items() if key in names}
    others = {key: value for key, value in composed.values.items() if key not in names}
    return validated(schema, own), replace(composed, values=others)


def train(composed: Composed) -> None:
    """Train, and print the report."""
    config = read_run(composed)
    if is_first_process():
        check_start(config)  # before torch is imported
    from trainer.commands.console import print_report, set_up_console

    set_up_console()
    if composed.values["drop"]["at"] is not None and config.drop.at is None:
        log.warning("drop: the encoding has nothing to drop, so the run has no drop")
    from trainer.workflows.experiment import run_experiment

    with stopping_at_once("Stopped", *STOPS):  # while training, its own handlers save first
        if (outcome := run_experiment(config)) is not None:
            print_report(outcome[0], config.run_dir, outcome[1])


def prepare(composed: Composed) -> None:
    """Prepare the text of a run, and say what there is."""
    config = read_run(composed)
    from trainer.commands.console import set_up_console
    from trainer.workflows.text import prepare_texts

    set_up_console()
    with stopping_at_once("Stopped", signal.SIGTERM):
        for line in prepare_texts(config):
            print(line)


def plan(composed: Composed) -> None:
    """Print the tables of a plan; without weights on this machine it is for the configured
    shape."""
    keys, run = split_keys(composed, PlanKeys)
    from trainer.commands.console import print_plan
    from trainer.workflows.plan import plan as tables_of

    models = (run.values["model"][key] for key in ("from_pretrained", "from_run"))
    weights = all(model is None or Path(model).expanduser().is_dir() for model in models)
    config = read_run(run, weights=weights)
    gpus = 1 if config.strategy.name == "single" else keys.gpus
    print_plan(tables_of(config, gpus, keys.mfu))


def evaluate(composed: Composed) -> None:
    """Evaluate, print the tables, write the report."""
    request = parse(EvaluationRequest, composed.values)
    name = composed.choices["evaluation"]
    from trainer.commands.console import print_benchmarks, print_report, set_up_console

    set_up_console()
    is_resumable = isinstance(request.evaluation, EvaluationConfig)  # benchmarks store nothing
    with stopping_at_once("Stopped", *STOPS, is_resumable=is_resumable):
        if is_resumable:
            from trainer.workflows.evaluate import evaluate_lengths

            if (outcome := evaluate_lengths(request, name)) is not None:
                print_report(outcome[0], str(outcome[1]), existing=False)
        else:
            from trainer.workflows.benchmarks import run_benchmarks

            print_benchmarks(*run_benchmarks(request, name))


def compare(composed: Composed) -> None:
    """Print the table of several runs."""
    request = parse(CompareRequest, composed.values)
    from trainer.commands.console import report_console
    from trainer.report.tables import terminal_tables
    from trainer.workflows.compare import compare as tables_of
    from trainer.workflows.compare import missing_control

    out = report_console()
    out.print(terminal_tables(tables_of(request.runs), out.width))
    if note := missing_control(request.runs):
        out.print(note)


def analyze(composed: Composed) -> None:
    """Write the page, and print what was found."""
    request = parse(AnalysisRequest, composed.values)
    from trainer.commands.console import set_up_console
    from trainer.workflows.analyze import analyze as write_page

    set_up_console()
    with stopping_at_once("Stopped", signal.SIGTERM, is_resumable=False):
        _, page = write_page(request, composed.choices["analysis"])
    print(f"Numbers: {page.with_name('results.csv')}")
    print(f"Report: {page}")


def generate(composed: Composed) -> None:
    """Print one continuation as it grows, several with their prompts at the end."""
    request = parse(GenerationRequest, composed.values)
    if not request.prompts:
        raise UserError("prompt: expected one or more")
    from trainer.workflows.generate import continue_prompts

    texts = continue_prompts(
        request,
        show=lambda text: print(text, end="", flush=True),
        say=lambda text: print(text, file=sys.stderr),
    )
    if len(request.prompts) == 1:
        print()
    elif len(texts) == 1:
        print(texts[0])
    else:
        for prompt, text in zip(request.prompts, texts, strict=True):
            print(f"{prompt}{text}\n")


def export(composed: Composed) -> None:
    """Write the directory, and print how it is loaded."""
    request = parse(ExportRequest, composed.values)
    from trainer.commands.console import set_up_console

    set_up_console()
    from trainer.interchange.hf_config import OWN
    from trainer.workflows.export import export_checkpoint

    with stopping_at_once("Stopped", signal.SIGTERM, is_resumable=False):
        architecture = export_checkpoint(request)
    trust = ", trust_remote_code=True" if architecture == OWN else ""
    print(f"Load it with: AutoModelForCausalLM.from_pretrained({request.to!r}{trust})")


def with_chosen_keys(words: Sequence[str]) -> tuple[list[str], Callable[[Composed], None]]:
    """Return the words of ``recalibrate`` with the keys that it chooses, and what they run.

    They follow from this machine's speed, unless the run has begun.
    """
    composed = compose_words(words, "recalibrate")
    keys, run = split_keys(composed, RecalibrateKeys)
    if keys.text is None and composed.choices["data"] == "files":
        raise UserError("text: expected files to recalibrate on, or data=stdlib_docs, got null")
    from trainer.commands.console import set_up_console
    from trainer.workflows.recalibrate import chosen, source_of

    set_up_console()
    began = time.time()
    model = keys.checkpoint
    given = {key: _at(run.values, key) for key in named_keys(words)}
    stem = re.sub(r"[^\w.+-]", "-", Path(model).absolute().name)
    own: dict[str, Any] = {"name": f"{stem.lstrip('-.+')}-drope"}
    own[f"model.{source_of(model)}"] = model
    if keys.text:
        own["data.files"] = [keys.text] if isinstance(keys.text, str) else keys.text
    run_dir = run.values["run_dir"]
    if not {"name", "run_dir"} & given.keys():
        run_dir = f"runs/{own['name']}"
    overwrite = run.values["overwrite"] is True
    values = chosen(model, keys.minutes, given, Path(run_dir), overwrite, began)
    own |= values
    added = [f"{key}={word_of(value)}" for key, value in own.items() if key not in given]
    return [*added, *words], partial(recalibrate, values=values, began=began)


def recalibrate(composed: Composed, values: Mapping[str, Any], began: float) -> None:
    """Show the chosen keys, then recalibrate, evaluate and export."""
    keys, run = split_keys(composed, RecalibrateKeys)
    config = read_run(run)
    from trainer.commands.console import print_report
    from trainer.interchange.export import check_destination
    from trainer.workflows.export import export_checkpoint
    from trainer.workflows.recalibrate import recalibrate as recalibrate_run

    for key, value in values.items():
        print(f"{key}={word_of(value)}")
    to = Path(keys.to or Path(config.run_dir, "export"))
    is_exported = (to / "config.json").is_file() and not config.overwrite
    if not is_exported and not to.is_relative_to(config.run_dir):
        check_destination(to)
    with stopping_at_once("Stopped", *STOPS):
        report = recalibrate_run(config, values, keys.checkpoint, keys.minutes, began)
        print_report(report, config.run_dir, existing=False)
        if not is_exported:
            export_checkpoint(ExportRequest(config.run_dir, str(to)))
    print(f"For transformers: {to}")


def named_keys(words: Sequence[str]) -> list[str]:
    """Return the keys and groups that overrides name."""
    return [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in words]


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def word_of(value: Any) -> str:
    """Return a value as Hydra reads it from a word."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word_of, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


EXECUTE: dict[str, Callable[[Composed], None]] = {
    function.__name__: function
    for function in (*(train, prepare, evaluate, compare, analyze, generate, export, plan),)
}
