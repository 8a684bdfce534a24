"""Measure finished models with the engine of cells, and make one report."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from trainer.common.errors import UserError, renaming
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import same_tokens
from trainer.evaluation.config import MODEL_KEY, QUICK, EvaluationConfig
from trainer.evaluation.engine import measure_cells
from trainer.evaluation.key_tokens import Chooser, KeyTokens
from trainer.evaluation.outcomes import AS_IS, Outcomes
from trainer.evaluation.passes import precision_of, prefill_chunk
from trainer.evaluation.plan import plan_cells
from trainer.evaluation.results import KEY_TOKENS, STATEMENTS, Arm, Drop, Report
from trainer.evaluation.store import Share, Store, all_fields
from trainer.evaluation.tasks import HeldOut, check_prompts, make_tasks
from trainer.report.claims import ROLES, observe
from trainer.runs.descriptions import describe_task, environment, without_home
from trainer.runs.fitted_temperature import keep_temperature
from trainer.runs.memory import evaluation_problems
from trainer.runs.models import Candidate, distinct, find_candidate
from trainer.runs.origin import command
from trainer.workflows.fit_text import Prompts, fit_text
from trainer.workflows.subjects import applicable, multiplied_in, multiplying, subject_of

log = logging.getLogger(__name__)

STATED = {
    "tokens": "the lengths are given as multiples",
    "training_length": "a field of the report itself",
}
"""Settings of an evaluation that its report states otherwise, with the reason."""


@dataclass(frozen=True)
class Text:
    """Held-out text in the tokens of the ``first`` model: for perplexity, fits and haystacks."""

    corpus: Corpus
    first: Candidate

    @property
    def training_share(self) -> float | None:
        """Share of the first model's training sequences with statements; None if it was trained
        elsewhere."""
        return None if self.first.run is None else self.first.run.data.needles.share

    @property
    def held_out(self) -> HeldOut:
        """The test split, for tasks."""
        corpus = self.corpus
        return HeldOut(corpus, corpus.test, self.first.bos_token, self.training_share)


def measure_models(
    name: str,
    candidates: Sequence[Candidate],
    config: EvaluationConfig,
    text: Text,
    cells: Path,
    accelerator: str = "auto",
    share: Share = Share(),  # noqa: B008
    tf32: bool = True,
) -> Report:
    """Measure every method on every model; return a report without anything about training.

    Cells that are stored in ``cells``, by an interrupted evaluation or for another table, are not
    measured again. A temperature fitted for a run as trained is stored with its checkpoint.

    Args:
        name: name of the report.
        candidates: in the order of tables, see :func:`checked`; with the training length that
            ``config`` gives, if any.
        config: methods, tasks and lengths.
        text: text in the first candidate's tokens.
        cells: directory of finished cells.
        accelerator: cpu, or a GPU if there is one.
        share: share of this process if there are several; the report of the first one is complete.
        tf32: whether a GPU multiplies float32 matrices in TF32.

    Raises:
        UserError: a checkpoint or text cannot be read, a length does not fit a task, the text or
            the memory, or no method applies to any model.
    """
    with renaming(**{"evaluation.lengths": config.lengths_key}):
        return _measure(name, candidates, config, text, cells, accelerator, share, tf32)


def _measure(
    name: str,
    candidates: Sequence[Candidate],
    config: EvaluationConfig,
    text: Text,
    cells: Path,
    accelerator: str,
    share: Share,
    tf32: bool,
) -> Report:
    device = "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    dtype = precision_of(config.dtype, device)
    chunk = prefill_chunk(config.prefill_chunk, device)
    subjects = [subject_of(c, dtype, device, chunk=chunk, tf32=tf32) for c in candidates]
    C = subjects[0].layout.training_length
    lengths = config.in_tokens(C)
    config = replace(config.at(C), dtype=dtype)
    recipes, notes = applicable(subjects, config)
    shapes = {subject.name: subject.config for subject in subjects}
    chooser = None
    if KEY_TOKENS in config.tasks:
        chosen_by = subjects[0]
        if config.key_tokens.model is not None:
            named = _chooser(config.key_tokens.model, text)
            chosen_by = subject_of(named, dtype, device, chunk=chunk, tf32=tf32)
        chooser = Chooser(chosen_by, config.key_tokens, Store(cells), config.batch_tokens, share)
    if problems := evaluation_problems(shapes, max(lengths), config, device, share.processes):
        raise UserError(*problems)
    with multiplying(device, tf32):
        tasks, not_run = make_tasks(text.held_out, config, lengths, C, chooser)
    check_prompts(tasks, lengths)
    used = [recipe for of_one in recipes.values() for recipe in of_one]
    prompts = Prompts(config.needles, config.many_shot)
    fit = fit_text(text.corpus, text.first.bos_token, config, used, lengths, C, prompts)
    plans = plan_cells(subjects, recipes, tasks, lengths, fit)
    can_shorten = config.shortened() != replace(config, quick=True)
    shorter = f"{command(sys.argv)} evaluation.quick=true ({QUICK})" if can_shorten else ""
    with multiplying(device, tf32):
        measured = measure_cells(plans, fit, Store(cells), config.batch_tokens, share, shorter)
    if share.index:
        return unmeasured(name, C, text.corpus)
    chosen = len(set(config.temperature.grid)) > 1  # chosen from several, not given
    for candidate in candidates:
        if chosen and candidate.run is not None and candidate.name in measured.temperature:
            _keep(candidate, measured.temperature[candidate.name])
        if candidate.run is not None and candidate.name in measured.per_head:
            _keep(candidate, measured.per_head[candidate.name])
    order = config.names
    keys = [task.key for task in tasks]
    stated = dict(STATED)
    if KEY_TOKENS not in config.tasks:  # the report is then of the same request as an older one
        stated["key_tokens"] = "read by no task"
    asked = all_fields(asdict(config), stated)
    report = Report(
        name=name,
        training_length=C,
        cells=tuple(measured.cells),
        methods={r.key: r.title for key in order for r in used if r.key == key},
        tasks={task.key: task.title for task in tasks},
        notes=(
            *notes,
            *not_run,
            *([f"A quick evaluation: {QUICK}."] * config.quick),
            *measured.notes,
        ),
        config={"evaluation": without_home(json.loads(json.dumps(asked)))},
        environment={
            **environment(text.corpus),
            "precision": multiplied_in(dtype, device, tf32),
        },
        task=describe_task(text.training_share or 0.0, config.needles.needles)
        if STATEMENTS in keys
        else {},
        key_tokens=next((t.chosen.about for t in tasks if isinstance(t, KeyTokens)), {}),
    )
    titles = {m: Outcomes(report).name((m, "temperature")) for m in measured.temperature}
    coefficients = {titles[m]: of["coefficient"] for m, of in measured.temperature.items()}
    return replace(report, temperature=coefficients)


def unmeasured(name: str, training_length: int, corpus: Corpus) -> Report:
    """Return a report without cells."""
    return Report(name, training_length, (), {}, {}, (), {}, environment(corpus))


def with_observations(
    report: Report,
    candidates: Sequence[Candidate],
    drop: Drop | None = None,
    arms: Mapping[str, Arm] | None = None,
) -> Report:
    """Return the report with the papers' observations compared; ``arms``: by the models' names."""
    outcomes = Outcomes(report)
    rows: dict[str, str] = {}
    trained: dict[str, Arm] = {}
    for candidate in candidates:
        role, name = candidate.role or "", candidate.name
        for method in outcomes.methods:
            key = role if method == AS_IS else f"{role}_{method}"
            if key in ROLES and (name, method) in outcomes.rows:
                rows.setdefault(key, outcomes.name((name, method)))
        if role in ROLES and arms:
            trained.setdefault(role, arms[name])
    texts = [candidate.run and candidate.run.data for candidate in candidates if candidate.role]
    observations = observe(
        outcomes.results(),
        rows,
        drop=drop,
        arms=trained,
        temperature=report.temperature,
        one_text=all(text == texts[0] for text in texts),
    )
    return replace(report, observations=observations)


def checked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Check that the models fit together; return them under distinct names."""
    first = candidates[0]
    for candidate in candidates:
        if not same_tokens(candidate.tokenizer, first.tokenizer):
            raise UserError.at(
                "compare", f"{candidate.given!r} has another tokenizer than the first."
            )
        if candidate.layout.training_length != first.layout.training_length:
            raise UserError.at(
                "compare",
                f"{candidate.given!r} has a training length of {candidate.layout.training_length} "
                f"tokens, the first one of {first.layout.training_length}; "
                "evaluation.training_length=N counts the lengths of all models from one.",
            )
    return distinct(candidates)


def _chooser(given: str, text: Text) -> Candidate:
    """Find the model that chooses key tokens.

    Raises:
        UserError: there is none, or it has another tokenizer than the text.
    """
    candidate = find_candidate(given, MODEL_KEY)
    if not same_tokens(candidate.tokenizer, text.first.tokenizer):
        raise UserError.at(MODEL_KEY, f"{given!r} has another tokenizer than the first model.")
    return candidate


def _keep(candidate: Candidate, fitted: dict[str, float]) -> None:
    if (older := keep_temperature(candidate.path, fitted)) is None:
        log.info("The temperature of %s is kept with its checkpoint", candidate.name)
    else:
        log.info(
            "The temperature stored with %s stays as it is, 1 + c ln s with c = %.3g%s: it was "
            "fitted on more text than here",
            *(candidate.name, older, "" if older else ", which changes nothing"),
        )
