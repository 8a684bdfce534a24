"""What each command does with its composed configuration, and what it prints."""

from __future__ import annotations

import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from trainer.commands.composing import Composed, compose_words
from trainer.commands.help import quoted
from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.common.processes import stopping_at_once
from trainer.config import (
    AnalysisRequest,
    CompareRequest,
    EvaluationRequest,
    ExportRequest,
    GenerationRequest,
    HarnessRequest,
    MultipleChoiceRequest,
    PlanKeys,
    RecalibrateKeys,
    RunConfig,
)
from trainer.runs.parsing import parse

log = logging.getLogger(__name__)

T = TypeVar("T")
REQUESTS: dict[str, Any] = {
    "lengths": EvaluationRequest,
    "multiple_choice": MultipleChoiceRequest,
    "harness": HarnessRequest,
}
"""Requests by ``evaluation.kind``."""


def read_config(words: Sequence[str], *, weights: bool = True) -> RunConfig:
    """Return the checked configuration of a run.

    ``weights``: whether the weights that it begins with are available.
    """
    return read_run(compose_words(words), weights=weights)


def read_run(composed: Composed, *, weights: bool = True) -> RunConfig:
    """Return the checked configuration of a composed run.

    Raises:
        UserError: ``trainer.max_steps`` is among the words, but ``trainer.max_tokens`` decides; or
            a key of the shape, but trained weights bring theirs.
    """
    model = composed.values["model"]
    if model["from_pretrained"] or model["from_run"]:
        for word in composed.words:
            if re.match(r"\+*model\.(?!attention_backend|qk_norm\.|from_)", word):
                raise UserError(
                    f"{word.partition('=')[0].lstrip('+')}: the trained weights bring their shape"
                )
    tokens = composed.values["trainer"]["max_tokens"]
    if tokens is not None and any(w.startswith("trainer.max_steps=") for w in composed.words):
        raise UserError(f"trainer.max_steps: trainer.max_tokens={tokens} decides; set it to null")
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
    from trainer.commands.console import print_report, set_up_console

    set_up_console()
    if composed.values["drop"]["at"] is not None and config.drop.at is None:
        log.warning("drop: the encoding has nothing to drop, so the run has no drop")
    from trainer.workflows.experiment import run_experiment

    if (outcome := run_experiment(config)) is not None:
        print_report(outcome[0], config.run_dir, outcome[1])


def prepare(composed: Composed) -> None:
    """Prepare the text of a run, and say what there is."""
    config = read_run(composed)
    from trainer.commands.console import set_up_console
    from trainer.workflows.prepare import prepare_texts

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
    from trainer.workflows.plan import weights_are_here

    model = run.values["model"]
    weights = weights_are_here(model["from_pretrained"], model["from_run"])
    config = read_run(run, weights=weights)
    gpus = 1 if config.strategy.name == "single" else keys.gpus
    print_plan(tables_of(config, gpus, keys.mfu))


def evaluate(composed: Composed) -> None:
    """Evaluate, print the tables, write the report."""
    request = read_evaluation(composed)
    name = composed.choices["evaluation"]
    from trainer.commands.console import print_benchmarks, print_report, set_up_console

    set_up_console()
    # A batch script requeues the job. Its command then resumes from the stored results.
    with stopping_at_once("Stopped", signal.SIGTERM, signal.SIGUSR1):
        if isinstance(request, EvaluationRequest):
            from trainer.workflows.evaluate import evaluate_lengths

            if (outcome := evaluate_lengths(request, name)) is not None:
                print_report(outcome[0], str(outcome[1]), existing=False)
        else:
            from trainer.workflows.benchmarks import run_benchmarks

            print_benchmarks(*run_benchmarks(request, name))


def read_evaluation(composed: Composed) -> Any:
    """Return the checked request of the kind that ``evaluation.kind`` names."""
    kind = composed.values["evaluation"].get("kind")
    if kind not in REQUESTS:
        raise UserError(f"evaluation.kind: expected one of {', '.join(REQUESTS)}, got {kind!r}")
    return parse(REQUESTS[kind], composed.values)


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
    from trainer.commands.console import show
    from trainer.workflows.generate import continue_prompts

    done = continue_prompts(
        request,
        show=lambda text: show(text, end=""),
        say=lambda text: print(text, file=sys.stderr),
    )
    if request.stream and len(request.prompts) == 1:
        print()
    elif len(done.texts) == 1:
        show(done.texts[0])
    else:
        for prompt, text in zip(request.prompts, done.texts, strict=True):
            show(f"{prompt}{text}\n")
    print(done.speed(), file=sys.stderr)


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


def recalibrate(composed: Composed) -> None:
    """Choose the keys that are open, show them, then recalibrate, evaluate and export."""
    keys, run = split_keys(composed, RecalibrateKeys)
    if keys.text is None and composed.choices["data"] == "files":
        raise UserError("text: expected files to recalibrate on, or data=stdlib_docs, got null")
    from trainer.commands.console import print_report, set_up_console
    from trainer.interchange.export import check_destination
    from trainer.workflows.export import export_checkpoint
    from trainer.workflows.recalibrate import chosen, source_of, verdict
    from trainer.workflows.recalibrate import recalibrate as recalibrate_run

    set_up_console()
    began = time.time()
    model = keys.checkpoint
    given = {key: _at(run.values, key) for key in named_keys(composed.words)}
    stem = re.sub(r"[^\w.+-]", "-", Path(model).absolute().name)
    words: dict[str, Any] = {"name": f"{stem.lstrip('-.+')}-drope"}
    words[f"model.{source_of(model)}"] = model
    if keys.text:
        words["data.files"] = [keys.text] if isinstance(keys.text, str) else keys.text
    run_dir = run.values["run_dir"]
    if not {"name", "run_dir"} & given.keys():
        run_dir = f"runs/{words['name']}"
    overwrite = run.values["overwrite"] is True
    values = chosen(model, keys.minutes, given, Path(run_dir), overwrite, began)
    words |= values
    own = [f"{key}={word_of(value)}" for key, value in words.items() if key not in given]
    _, run = split_keys(compose_words([*own, *composed.words], "recalibrate"), RecalibrateKeys)
    config = read_run(run)
    for key, value in values.items():
        print(f"{key}={word_of(value)}")
    to = Path(keys.to or Path(config.run_dir, "export"))
    is_exported = (to / "config.json").is_file() and not overwrite
    if not is_exported and not to.is_relative_to(config.run_dir):
        check_destination(to)
    report = recalibrate_run(config, values, model, keys.minutes, began)
    print_report(report, config.run_dir, existing=False)
    print(verdict(report))
    if not is_exported:
        export_checkpoint(ExportRequest(config.run_dir, str(to), threads=config.trainer.threads))
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
    if isinstance(value, str):
        return quoted(value)
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


EXECUTE: dict[str, Callable[[Composed], None]] = {
    function.__name__: function
    for function in (
        *(train, recalibrate, prepare, evaluate, compare, analyze, generate, export, plan),
    )
}
