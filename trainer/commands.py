"""The commands, and Hydra, which composes their configurations.

Keys and defaults stand once, in :mod:`trainer.config`; ``ConfigStore`` hands them to Hydra, so that
``conf/`` holds only what differs.
"""

import inspect
import json
import logging
import os
import re
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import reduce
from itertools import chain, product
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from trainer import config as schema
from trainer.common.errors import REQUEUE_EXIT_CODE, PreemptedError, UserError, nearest
from trainer.common.fields import validated
from trainer.common.files import check_is_new
from trainer.common.processes import current_ranks, requeue
from trainer.runs.directory import (
    RECORD,
    check_files,
    check_model,
    check_start,
    differences,
    is_published,
    place_of_comparison,
    plain,
)
from trainer.runs.parsing import checked, parse
from trainer.runs.phases import Run

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""``conf/``: inside the package where it is installed, beside it in a checkout."""
OF_A_MACHINE = "trainer.threads", "data.num_workers", "data.cache_dir", "data.prepared"
"""Keys that may have another value on every rank."""
EXTRAS = {
    "lm_eval": "eval",
    "tensorboard": "tensorboard",
    "submitit": "slurm",
    "s3fs": "cloud",
    "gcsfs": "cloud",
    "gguf": "gguf",
}
"""Extra of the package that brings what an error names."""
RESUMABLE = "train", "recalibrate", "prepare", "evaluate"
"""Commands that resume what they have saved when they are stopped."""
NOT_OF_WEIGHTS = "model.attention_backend", "model.qk_norm.", "model.from_"
"""Beginnings of keys that a run with trained weights may choose."""
WITH_VALUE = "--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--info", "-i"
"""Options of Hydra whose value is the next word."""
SHOW_KEYS = "--cfg", "-c", "job", "--cfg=job"
MODEL = "checkpoint="
OPTIONS = {"train": "experiment", "evaluate": "evaluation", "analyze": "analysis"}
"""The group whose options a command's help lists."""

T = TypeVar("T")


class Job(NamedTuple):
    """The composed configuration of a command."""

    values: dict[str, Any]
    choices: Mapping[str, str]
    """The chosen option of each group."""
    words: Sequence[str]
    """The overrides."""


def register_schema() -> None:
    """Hand keys and defaults to Hydra."""
    schemas: dict[str, type] = {
        "train": schema.RunConfig,
        "evaluate": schema.EvaluationRequest,
        "analyze": schema.AnalysisRequest,
        "generate": schema.GenerationRequest,
        "export": schema.ExportRequest,
        "plan": schema.PlanKeys,
        "recalibrate": schema.RecalibrateKeys,
    }
    for name, kind in schemas.items():
        ConfigStore.instance().store(f"{name}_schema", asdict(kind()))


def overrides_of(name: str, words: Iterable[str]) -> list[str]:
    """Return the words of a command as Hydra reads them.

    Paths get their key. ``+evaluation=NAME`` becomes ``evaluation=NAME``, whether the command has a
    default for that group or not. Names are text: Hydra would read numbers.
    """
    paths, others = split_words(words)
    keys = [_as_hydra_reads(word) for word in others]
    if not paths:
        return keys
    quoted = json.dumps(paths, ensure_ascii=False)
    if name == "compare":
        return [f"runs={quoted}", *keys]
    if name in ("train", "prepare", "plan"):
        raise UserError(f"expected KEY=VALUE, got {paths[0]!r}")
    models = paths + [word.partition("=")[2] for word in keys if word.startswith(MODEL)]
    if len(models) > 1:
        raise UserError(f"expected one model, got {' and '.join(map(repr, models))}")
    return [f"checkpoint={quoted[1:-1]}", *keys]


def split_words(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the bare words, such as paths, and the others: overrides, options and their values."""
    bare: list[str] = []
    others: list[str] = []
    before = ""
    for word in words:
        if word.lstrip("+~").startswith("="):
            raise UserError(f"expected KEY=VALUE, got {word!r}")
        # Something may lie at a path that holds "=", and a text may hold one after a space.
        is_bare = os.path.lexists(word) or not re.match(r"[-+~]|[^\s=]+=", word)
        if is_bare and before not in WITH_VALUE:
            bare.append(word)
        else:
            others.append(word)
        before = word
    return bare, others


def split_prompts(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the words of ``generate`` without its texts, and the texts."""
    bare, others = split_words(words)
    keyed = [word for word in others if word.startswith("prompt=")]
    paths = 0 if any(word.startswith(MODEL) for word in others) else 1
    texts = [*bare[paths:], *(word.removeprefix("prompt=") for word in keyed)]
    return [*bare[:paths], *(word for word in others if word not in keyed)], texts


def _as_hydra_reads(word: str) -> str:
    """Return a word without the plus of a group, with ``~`` expanded, and with names in quotes."""
    key, _, value = word.partition("=")
    if key in ("+evaluation", "+analysis"):
        return word[1:]
    if value.startswith("~/"):
        return f"{key}={Path(value).expanduser()}"
    if key in ("name", "run_dir") and re.fullmatch(r"[\w.+-]+", value):
        return f"{key}='{value}'"
    return word


def job_of(config: DictConfig, hydra_config: Any) -> Job:
    """Return the plain values of a composed configuration without Hydra's own.

    Its ``plugins`` are run, so that it can name what they register; those of its controls as well.
    """
    config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        usage = str(inspect.getdoc(COMMANDS[hydra_config.job.config_name])).splitlines()[2]
        raise UserError(f"{', '.join(missing)}: expected a value: {usage}")
    values: Any = OmegaConf.to_container(config, resolve=True)
    controls = values.get("controls")
    runs = [values, *controls.values()] if isinstance(controls, dict) else [values]
    runs = [run for run in runs if isinstance(run, dict)]  # others are refused later
    for path in chain.from_iterable(run.get("plugins") or () for run in runs):
        if not path.endswith(".py"):
            raise UserError(f"plugins: expected Python files, got {path!r}")
        runpy.run_path(path)
    return Job(values, hydra_config.runtime.choices, list(hydra_config.overrides.task))


def compose_words(words: Sequence[str], name: str = "train") -> Job:
    """Compose the words of a command, such as ``+experiment=drope_demo seed=1``."""
    register_schema()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(name, overrides_of(name, words), return_hydra_config=True)
        return job_of(config, config.hydra)


def run_command(name: str, words: Sequence[str]) -> None:
    """Run a command with what Hydra composes of its words: once, or for each job of ``-m``."""
    if name == "recalibrate" and re.search(r"(^| )(--cfg[= ]|-c )job( |$)", " ".join(words)):
        job = compose_words([word for word in words if word not in SHOW_KEYS], name)
        keys, _ = choose_keys(job, time.time())  # Hydra would show none of the chosen ones
        print(OmegaConf.to_yaml(asdict(keys) | job.values), end="")
        return
    register_schema()
    prompts: list[str] = []
    if name == "generate":
        words, prompts = split_prompts(words)
    words = overrides_of(name, words)
    errors: list[Exception] = []
    sweep = Sweep(words)
    argv = sys.argv

    def run(config: DictConfig) -> None:
        """Run one job; keep its error."""
        settings = HydraConfig.get()
        is_swept = settings.mode == RunMode.MULTIRUN
        try:
            sys.argv = argv  # as a page about the results quotes it
            if is_swept:
                sweep.name_job(config, settings)
            job = job_of(config, settings)
            if current_ranks().world_size > 1:
                check_alike(job.values)
            if prompts:
                job.values["prompts"] += prompts
            from trainer.common.progress import show_log  # imports rich, which --cfg does not need

            show_log()
            COMMANDS[name](job)
            if is_swept:
                sweep.outcomes[settings.job.num] = "ran"
                if name == "train":
                    sweep.runs.append(job.values["run_dir"])
        except (Exception, PreemptedError) as error:
            if is_swept:
                sweep.note(settings, error)
            if isinstance(error, PreemptedError):
                raise
            errors.append(error)  # if it were raised here, Hydra would print the words, too

    sys.argv = ["unrope", *words]  # which Hydra reads
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(run)()
    finally:
        sys.argv = argv
        sweep.show()
    if sweep.outcomes and errors:
        sys.exit(1)
    if errors:
        raise errors[0]


class Sweep:
    """The jobs of ``--multirun``, and what became of them.

    ``outcomes``: by the number of a job; empty without ``--multirun``, and where a launcher runs
    the jobs in processes of its own. ``runs``: directories of the jobs that ran. ``names``: the
    overrides that tell the jobs apart, one string a job, in Hydra's order.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = [word for word in words if "=" in word and not word.startswith("-")]
        self.outcomes: dict[int, str] = {}
        self.runs: list[str] = []
        self.names: list[str] = []

    def name_job(self, config: DictConfig, settings: Any) -> None:
        """Add a job's overrides to its name, unless names were given, or depend on keys."""
        # Choices stand in hydra.sweeper.params, too. A word replaces the choices of its key.
        params = settings.sweeper.get("params") or {}
        words = [*(f"{key}={value}" for key, value in params.items()), *self.words]
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        choices = {}
        for override in parser.parse_overrides(words):
            key = override.get_key_element()
            choices[key] = [""]
            if override.is_sweep_override():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        self.names = [" ".join(filter(None, job)) for job in product(*choices.values())]
        values: Any = OmegaConf.to_container(config)
        name = values.get("name")
        is_named = any(re.match(r"\+*(name|run_dir)=", word) for word in words)
        if isinstance(name, str) and "${" not in name and not is_named:
            overrides = re.sub(r"[^\w.+-]+", "-", self.names[settings.job.num])
            config.name = f"{name}-{overrides}"

    def note(self, settings: Any, error: Exception | PreemptedError) -> None:
        """Note that a job failed or was stopped. After a failure the next one follows, unless other
        ranks run; a job in a process of its own ends as a command does."""
        if not settings.launcher._target_.endswith("BasicLauncher"):  # a process of its own
            if isinstance(error, PreemptedError):
                print(error, file=sys.stderr)
                requeue(error.reason)
                sys.exit(REQUEUE_EXIT_CODE)
            raise error
        if isinstance(error, PreemptedError):
            self.outcomes[settings.job.num] = "stopped"
            return
        self.outcomes[settings.job.num] = "failed"
        if current_ranks().world_size > 1:
            raise SystemExit(1) from error
        print(f"Job {settings.job.num} of the sweep failed:", file=sys.stderr)
        if is_of_user(error):
            print(explain(error), file=sys.stderr)
        else:
            traceback.print_exception(error)

    def show(self) -> None:
        """Print what became of the jobs, and compare the results of several runs."""
        if not self.outcomes or current_ranks().rank:
            return
        print("Jobs of the sweep:")
        for number, name in enumerate(self.names):
            print(f"  {self.outcomes.get(number, 'skipped'):8} {number}  {name}")
        if len(self.runs) > 1:
            with suppress(UserError):  # a run without results, which evaluation.enabled=false has
                compare(Job({"runs": self.runs, "output": "runs/sweep"}, {}, ()))


def check_alike(values: dict[str, Any]) -> None:
    """Raise a UserError unless rank 0 has the same keys, and as many ranks on its machine."""
    from trainer.common.ranks import shared_value

    mine = json.loads(json.dumps(values | {"ranks of a node": current_ranks().local_size}))
    changed = differences(shared_value(lambda: mine), mine, OF_A_MACHINE)
    if changed:
        raise UserError(
            f"rank {current_ranks().rank} was started with other keys than rank 0 ({changed})"
        )


def is_of_user(error: BaseException) -> bool:
    """Whether a line about an error is enough: of the command line, of files or of libraries."""
    lines = ValueError, OSError, LookupError, ImportError, HydraException, OmegaConfBaseException
    return isinstance(error, lines)


def explain(error: BaseException) -> str:
    """Return an error's message as lines; the nearest key of one that is unknown follows."""
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
    text = str(cause)
    if isinstance(cause, HydraException | OmegaConfBaseException):
        lines = text.partition("\nConfig search path")[0].splitlines()
        text = ", ".join(line.strip() for line in lines if line and "object_type=" not in line)
    elif not isinstance(cause, UserError):
        text = f"{type(cause).__name__}: {text}"
    if isinstance(cause, ImportError):
        text = text.partition("\n")[0]  # Lightning adds a line for each package that would do
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        known = [str(key) for key in cause.parent_node]
        text += nearest(str(cause.key), known)
        if not known:
            text += f"; +{cause.full_key}=VALUE adds it"
    if isinstance(cause, ImportError | HydraException):
        extras = [extra for word, extra in EXTRAS.items() if word in text]
        text += "".join(f"; pip install '.[{extra}]' brings it" for extra in extras[:1])
    return "\n".join(f"error: {line}" for line in text.splitlines())


def run_of(job: Job) -> Run:
    """Return the run that a job describes, checked and resolved.

    Raises:
        UserError: a key of the shape or the encoding is among the words, but trained weights bring
            theirs.
    """
    model = job.values["model"]
    if model["from_pretrained"] or model["from_run"]:
        for word in job.words:
            key = word.lstrip("+").partition("=")[0]
            if re.match(r"model(\.|$)", key) and not key.startswith(NOT_OF_WEIGHTS):
                raise UserError(f"{key}: the trained weights bring their shape")
            if re.match(r"positional($|\.(layers|heads|windows)\b)", key):
                raise UserError(f"{key}: the trained weights bring their encoding")
    run = parse(job.values)
    drops = run.phases.drop_step is not None or run.controls  # which may drop
    if run.config.model.qk_norm.when == "after_drop" and not drops:
        raise UserError("model.qk_norm.when: 'after_drop', but there is no drop")
    return run


def forget_absent_weights(values: dict[str, Any]) -> None:
    """Clear ``from_pretrained`` and ``from_run`` of a run and its controls unless they name a
    directory on this machine. A hub id counts as absent, even if it is in the cache."""
    for key, value in values.items():
        if isinstance(value, dict):
            forget_absent_weights(value)
        elif key.startswith("from_") and value and not Path(str(value)).expanduser().is_dir():
            values[key] = None


def take_keys(job: Job, keys: type[T]) -> T:
    """Take a command's own keys out of the values, which leaves those of a run."""
    names = [field.name for field in fields(keys)]  # type: ignore[arg-type]  # a dataclass
    return validated(keys, {name: job.values.pop(name) for name in names})


def train(job: Job) -> None:
    """Train a model and its controls, evaluate and report: the command if none is named.

    python -m trainer +experiment=NAME [KEY=VALUE ...]

    The same command resumes an interrupted run.
    """
    run = run_of(job)
    if current_ranks().rank == 0:
        check_start(run.config)  # before torch is imported
    from trainer.report.terminal import print_report

    if job.values["drop"]["at"] is not None and run.config.drop.at is None:
        log.warning("drop: the encoding has nothing to drop, so the run has no drop")
    from trainer.workflows.experiment import run_experiment

    report = run_experiment(run)
    if report is not None:
        print_report(report, run.config.run_dir)


def recalibrate(job: Job) -> None:
    """Drop the positional encoding of a trained model, and recalibrate it in some minutes.

    python -m trainer recalibrate MODEL text=FILES [minutes=20] [KEY=VALUE ...]

    The model is evaluated and exported for transformers. Keys that are not given follow from its
    size and this machine's speed, unless the run has begun; docs/pretrained.md has the rules.
    """
    began = time.time()
    keys, values = choose_keys(job, began)
    from trainer.report.terminal import print_report
    from trainer.workflows import recalibrate as workflow
    from trainer.workflows.export import export_checkpoint

    run = run_of(job)
    run_dir = run.directory
    to = Path(keys.to or run_dir / "export")
    if to != run_dir / "export":
        check_is_new(to)
    report = workflow.recalibrate(run, values, keys.checkpoint, keys.minutes, began)
    print_report(report, str(run_dir))
    print(f"Recalibrated for {report.runs[0].tokens:,} tokens; {workflow.EXPECTED}.")
    if not to.exists() or not any(to.iterdir()):
        export_checkpoint(schema.ExportRequest(str(run_dir), str(to)))
    print(f"For transformers: {to}")


def choose_keys(job: Job, began: float) -> tuple[schema.RecalibrateKeys, dict[str, Any]]:
    """Take the keys of ``recalibrate`` out of the values, and set those of a run that follow from
    them; return both. ``began``: when the minutes began, in seconds since the epoch."""
    keys = take_keys(job, schema.RecalibrateKeys)
    values = job.values
    if keys.text is None and job.choices["data"] == "files":
        raise UserError("text: expected files to recalibrate on, or data=stdlib_docs, got null")
    named = [word.lstrip("+").partition("=")[0] for word in job.words if word[0] != "~"]
    if "name" not in named:
        stem = re.sub(r"[^\w.+-]", "-", Path(keys.checkpoint).absolute().name)
        values["name"] = f"{stem.lstrip('-.+')}-drope"
        if "run_dir" not in named:
            values["run_dir"] = f"runs/{values['name']}"
    if keys.text:
        values["data"]["files"] = [keys.text] if isinstance(keys.text, str) else keys.text
    config = checked(values)
    values.update(plain(config))
    if "evaluation.lengths" in named:
        named.append("evaluation.tokens")  # they would take the place of the lengths
    given = {key: reduce(getitem, key.split("."), values) for key in named if "." in key}
    record = Path(config.run_dir) / RECORD
    begun = record if record.is_file() and not config.overwrite else None
    if begun is None and config.data.source == "files":
        check_files(config.data.files)  # before torch is imported
    from trainer.workflows import recalibrate as workflow

    source = "from_pretrained" if is_published(keys.checkpoint) else "from_run"
    values["model"][source] = keys.checkpoint
    chosen = workflow.chosen_keys(keys.checkpoint, keys.minutes, given, began, begun)
    for key, value in chosen.items():
        *groups, last = key.split(".")
        reduce(getitem, groups, values)[last] = value
    return keys, chosen


def prepare(job: Job) -> None:
    """Turn the text of a run into tokens on disk, once, before it trains on a cluster.

    python -m trainer prepare +experiment=NAME [KEY=VALUE ...]
    """
    run = run_of(job)
    from trainer.workflows.text import prepare_texts

    for line in prepare_texts(run):
        print(line)


def plan(job: Job) -> None:
    """Say what a run will need: parameters, tokens, operations, memory, hours.

    python -m trainer plan +experiment=NAME [gpus=8] [mfu=0.4] [KEY=VALUE ...]

    If the weights that it begins with are not in a directory on this machine, as with a hub id, the
    plan is for the configured shape.
    """
    keys = take_keys(job, schema.PlanKeys)
    from trainer.workflows import plan as workflow

    forget_absent_weights(job.values)
    run = run_of(job)
    gpus = 1 if run.config.strategy.name == "single" else keys.gpus
    workflow.print_plan(workflow.plan(run, gpus, keys.mfu))


def evaluate(job: Job) -> None:
    """Measure retrieval and loss of checkpoints, all on the same trials.

    python -m trainer evaluate PATH [compare=[PATH,...]] [+evaluation=NAME] [KEY=VALUE ...]

    At multiples of the training length, as they are and with methods that extend the context.
    """
    request = validated(schema.EvaluationRequest, job.values)
    for reference in (request.checkpoint, *request.compare):
        check_model(reference)  # before torch is imported
    from trainer.report.terminal import print_report
    from trainer.workflows.evaluate import evaluate_lengths

    outcome = evaluate_lengths(request, job.choices["evaluation"])
    if outcome is not None:
        report, directory = outcome
        print_report(report, str(directory))


def compare(job: Job) -> None:
    """Put runs beside each other, in a table for each task and metric.

    python -m trainer compare RUN [RUN ...] [output=DIRECTORY]
    """
    from trainer.report.pages import write_comparison
    from trainer.report.tables import compare as tables_of
    from trainer.report.terminal import print_tables
    from trainer.runs.models import provenance

    runs = job.values["runs"]
    shown = tables_of(runs)
    print_tables(shown)
    made = provenance(()) | {"Models": ", ".join(runs)}
    place = place_of_comparison(Path(job.values["output"]).expanduser(), runs)
    print(f"Report: {write_comparison(shown, place, made)}")


def analyze(job: Job) -> None:
    """Read held-out text with a model once, and write a page about its attention.

    python -m trainer analyze PATH +analysis=NAME [KEY=VALUE ...]
    """
    request = validated(schema.AnalysisRequest, job.values)
    from trainer.workflows.analyze import analyze as write_page

    _, page = write_page(request, job.choices["analysis"])
    print(f"Numbers: {page.with_name('results.csv')}")
    print(f"Report: {page}")


def generate(job: Job) -> None:
    """Continue texts with a trained checkpoint or a published model.

    python -m trainer generate PATH TEXT [TEXT ...] [KEY=VALUE ...]

    prompt=TEXT is a text too, whatever characters are in it.
    """
    request = validated(schema.GenerationRequest, job.values)
    if not request.prompts:
        raise UserError("prompts: expected a text: python -m trainer generate PATH TEXT")
    from trainer.workflows.generate import continue_prompts

    for prompt, text in zip(request.prompts, continue_prompts(request), strict=True):
        print(f"{prompt}{text}\n")


def export(job: Job) -> None:
    """Write a checkpoint as a directory that transformers loads, and compare the logits.

    python -m trainer export PATH to=DIRECTORY [KEY=VALUE ...]
    """
    request = validated(schema.ExportRequest, job.values)
    check_model(request.checkpoint)  # before torch is imported
    check_is_new(request.to)
    from trainer.interchange.hf_config import OWN
    from trainer.workflows.export import export_checkpoint

    architecture = export_checkpoint(request)
    trust = ", trust_remote_code=True" if architecture == OWN else ""
    print(f"Load it with: AutoModelForCausalLM.from_pretrained({request.to!r}{trust})")


COMMANDS: dict[str, Callable[[Job], None]] = {
    command.__name__: command
    for command in (train, recalibrate, prepare, evaluate, compare, analyze, generate, export, plan)
}


def help_text(name: str) -> str:
    """Return the help of a command."""
    lines = [inspect.getdoc(COMMANDS[name]) or "", ""]
    if name == "train":
        commands = ((other, inspect.getdoc(command)) for other, command in COMMANDS.items())
        lines += ["Commands:", *(f"  {n:12} {str(t).splitlines()[0]}" for n, t in commands), ""]
    if name in OPTIONS:
        group = OPTIONS[name]
        lines += [f"{group}: {', '.join(sorted(p.stem for p in (CONF / group).iterdir()))}", ""]
    lines += [
        "All keys and their values: add --cfg job. Their meanings: docs/keys.md.",
        "Several jobs: --multirun KEY=A,B. Options of your own: --config-dir DIRECTORY.",
    ]
    return "\n".join(lines)
