"""Evaluation of finished models: cells measured by the engine, and a report made of them."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainer.common.errors import UserError
from trainer.common.files import expecting
from trainer.common.processes import current_ranks, default_threads, use_cores
from trainer.common.ranks import best_precision, device_of, device_type
from trainer.config import DataConfig, EvaluationConfig, EvaluationRequest, ModelsRequest, RunConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.tokenizer import same_tokens, vocabulary_size
from trainer.evaluation.engine import Setup, measure
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.methods import title_of, why_not
from trainer.evaluation.perplexity import unigram_loss
from trainer.evaluation.results import MEAN, TRIAL_COLUMNS, averaged, rows_of
from trainer.evaluation.saved_model import SavedModel, matmul_precision
from trainer.evaluation.store import Store
from trainer.evaluation.tasks import check_names, make_tasks
from trainer.plotting import use_style
from trainer.report.claims import Evidence, observe
from trainer.report.pages import write_renderings
from trainer.report.report import FACTS, Report
from trainer.runs.directory import FREE_TO_CHANGE, differences, first_free, plain
from trainer.runs.models import environment, find_models, origins, provenance, without_home
from trainer.runs.parsing import texts_read

log = logging.getLogger(__name__)

DEFAULT = "default"
"""Name of the evaluation that a run ends with."""


def evaluate_lengths(request: EvaluationRequest, name: str = DEFAULT) -> tuple[Report, Path] | None:
    """Measure every method on every model; write the report and return it with its directory.

    Several processes, started by torchrun or srun, share the work; all but the first return None.
    The same request writes its report again. Another one writes beside it, as NAME-2; both share
    their cells.

    ``name``: name of the evaluation and of its directory in the run, unless the request has one.

    Raises:
        UserError: a checkpoint or text cannot be read, models do not fit together, a length does
            not fit a task or the text, or no method applies to any model.
    """
    use_cores(max(1, default_threads() // current_ranks().local_size))
    if torch.cuda.is_available():
        torch.cuda.set_device(device_of("auto"))
    use_style(**asdict(request.plots))
    evaluation = request.evaluation
    check_names(evaluation)
    references = [request.checkpoint, *request.compare]
    C = evaluation.training_length
    models = find_models(references, C, with_origins=not request.compare)
    first = next(model for model in models if model.reference == request.checkpoint)
    name = request.name or name
    of_name = Path("evaluation") if name == DEFAULT else Path("lengths", name)
    output = Path(request.output or first.home / of_name)
    directory = place_of(request, output) if current_ranks().rank == 0 else output
    text = held_out_of(held_out_corpus(request.text, first), first)
    title = "Length evaluation" if first.run is None else first.run.name
    report = measure_models(title, models, evaluation, text, output / "cells")
    if report is None:
        return None
    report = replace(report, config=report.config | {"request": plain_request(request)})
    return publish(report, models, directory), directory


def plain_request(request: ModelsRequest) -> dict[str, Any]:
    """Return what a request measures, as JSON values: its models and text, and how they are read,
    not where results go or how they look."""
    free = "name", "output", "plots", "plugins"
    values = without_home(asdict(request))
    return {key: value for key, value in values.items() if key not in free}


def place_of(request: ModelsRequest, output: Path) -> Path:
    """Return the directory of results: ``output``, or if that holds those of another request the
    first of those numbered beside it that does not; raise a UserError if the request names a
    directory that does."""
    changed = changes_since(request, output)
    if changed:
        text = f"{str(output)!r} holds other results ({changed})"
        if request.output or request.name:
            key = "output" if request.output else "name"
            raise UserError(f"{key}: {text}")
        log.info("%s", text)
    return first_free(output, lambda place: not changes_since(request, place))


def changes_since(request: ModelsRequest, place: Path) -> str:
    """Return the keys in which a request differs from that of the results in a directory, with both
    values; "of a run" if a run wrote them; empty without results, or if 0.3.0 wrote them."""
    facts = place / FACTS
    if not facts.is_file():
        return ""
    with expecting("the facts of a report", facts):
        config = json.loads(facts.read_bytes())["config"]
    if "controls" in config:
        return "of a run"
    before = config.get("request")
    return differences(before, plain_request(request), ()) if before else ""


def held_out_corpus(text: DataConfig | None, model: SavedModel) -> Corpus:
    """Open the prepared splits of ``text`` in the model's tokens.

    ``text``: None for the text of the model's run, or, if it was trained elsewhere, the text that
    comes with Python.

    Raises:
        UserError: the text cannot be read, is too short, or differs from the run's.
    """
    run = model.run
    if text is not None or run is None:
        return prepare_corpus(text or DataConfig(), model.tokens)
    tokens = model.tokens if run.model.is_trained else run.tokenizer
    corpus = prepare_corpus(run.data, tokens, wanted=model.state.get("texts"))
    if not same_tokens(corpus.tokenizer, model.tokens.tokenizer):
        raise UserError("text: the run's text has changed, and its tokenizer with it")
    return corpus


def held_out_of(corpus: Corpus, first: SavedModel) -> HeldOut:
    """Return the test split, in the tokens of the first model, for tasks and fits."""
    share = None if first.run is None else first.run.data.needles.share
    bos = () if first.tokens.first is None else (first.tokens.first,)
    return HeldOut(corpus, corpus.test, bos, share)


def measure_models(
    name: str,
    models: Sequence[SavedModel],
    config: EvaluationConfig,
    text: HeldOut,
    directory: Path,
    accelerator: str = "auto",
) -> Report | None:
    """Measure every method on every model; return a report without anything about training.

    Cells that are stored in ``directory``, by an interrupted evaluation or for another table, are
    not measured again.

    ``models``: as :func:`find_models` returns them. ``text``: in the first one's tokens.
    ``directory``: of finished cells. ``accelerator``: cpu, or a GPU if there is one.
    Ranks share the work; all but the first one return None.
    """
    ranks = current_ranks()
    device = device_type(accelerator)
    dtype = config.dtype or best_precision(device)
    C = models[0].training_length
    lengths = list(dict.fromkeys(config.tokens or [round(C * x) for x in config.lengths]))
    if min(lengths) < 2:
        raise UserError(f"evaluation.lengths: expected 2 tokens or more, got {min(lengths)}")
    factors = config.lengths if config.tokens is None else [n / C for n in lengths]
    config = replace(config, training_length=C, lengths=factors, tokens=None, dtype=dtype)
    corpus = text.corpus
    methods, notes = applicable(models, config)
    tasks, task_notes = make_tasks(text, config, lengths, C)
    used = {method for applied in methods.values() for method in applied}
    fit = FitText(replace(text, split=corpus.validation), config.fit_windows)
    for note in task_notes:
        log.warning("%s", note)
    store = Store(directory, ranks.rank, ranks.world_size)
    trials, fit_notes = measure(models, methods, tasks, Setup(config, fit, store, device, dtype))
    if ranks.rank:
        return None
    task_titles = {key: title for task in tasks for key, title in task.titles.items()}
    mean_of = averaged(trials)
    if mean_of:
        titles = ", ".join(task_titles[key] for key in mean_of)
        task_titles[MEAN] = f"Mean over {len(mean_of)} tasks ({titles})"
    reach = {model.name: model.layout.longest for model in models}
    rows = rows_of(trials, name, config.needles.seed)
    vocabulary = vocabulary_size(corpus.tokenizer)
    return Report(
        name=name,
        training_length=C,
        trained=max(model.longest_context for model in models),
        rows=rows.assign(reach=rows["model"].map(reach)),
        trials=trials[[*TRIAL_COLUMNS]],
        unigram_loss=unigram_loss(corpus.test, corpus.validation, vocabulary),
        methods={method: title_of(method) for method in config.methods if method in used},
        tasks=task_titles,
        notes=(*notes, *task_notes, *fit_notes),
        config={"evaluation": without_home(asdict(config))},
        environment={**environment(corpus, device), "precision": matmul_precision(dtype, device)},
        training_share=text.training_share,
    )


def applicable(
    models: Sequence[SavedModel], config: EvaluationConfig
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the methods that change each model, by its name, and a sentence for each that changes
    none.

    Raises:
        UserError: no method changes any model, or a model has no such layer.
    """
    for model in models:
        model.layout.chosen(config.layers, f"evaluation.layers: {model.name}")
    methods: dict[str, list[str]] = {model.name: [] for model in models}
    notes = []
    for name in config.methods:
        reasons = {model.name: why_not(name, model, config) for model in models}
        for model in models:
            if not reasons[model.name]:
                methods[model.name].append(name)
        if all(reasons.values()):
            why = "; ".join(f"{model} {reason}" for model, reason in reasons.items())
            notes.append(f"{name}: {why}.")
    if len(notes) == len(config.methods):
        raise UserError(f"evaluation.methods: {' '.join(notes)}")
    return methods, notes


def seeds_of(models: Sequence[SavedModel]) -> dict[str, str]:
    """Return for each model that differs from others in its seed alone the name of their mean:
    their title, or if another recipe has it too the name of the first "and other seeds"."""
    defaults = plain(RunConfig())
    free = {*FREE_TO_CHANGE, "seed", "controls"}
    recipes: dict[tuple[str, int], list[SavedModel]] = {}
    for model in models:
        if model.run is not None:
            recipe = differences(defaults, plain(model.run), free), model.state["step"]
            recipes.setdefault(recipe, []).append(model)
    titles = Counter(model.title for model in models)
    seeds: dict[str, str] = {}
    for alike in recipes.values():
        mean = alike[0].title
        if titles[mean] > len(alike):
            mean = f"{alike[0].name} and other seeds"
        if len(alike) > 1:
            seeds |= dict.fromkeys([model.name for model in alike], mean)
    return seeds


def one_text(models: Sequence[SavedModel]) -> bool:
    """Whether runs read the same texts in the same way, wherever these lie."""
    texts = []
    for model in models:
        assert model.run is not None
        texts.append((model.state["texts"], texts_read(model.run.data, prepared=None)))
    return all(text == texts[0] for text in texts)


def publish(report: Report, models: Sequence[SavedModel], directory: Path) -> Report:
    """Judge the papers' claims, write page and results, and return the report."""
    report = replace(
        report, origins=origins(models), seeds=seeds_of(models), made=provenance(models)
    )
    known = [model for model in models if model.role]
    by_role: dict[str, str] = {}
    for model in known:
        by_role.setdefault(str(model.role), report.seeds.get(model.name, model.name))
    evidence = Evidence(report.over_seeds(), by_role, one_text(known))
    notes = [
        f"{mean}: mean of {count} seeds, with Student's 95% interval over them."
        for mean, count in Counter(report.seeds.values()).items()
    ]
    report = replace(report, observations=observe(evidence), notes=(*notes, *report.notes))
    write_renderings(report, directory)
    report.write(directory)
    return report
