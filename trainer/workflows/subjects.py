"""Finished models as subjects of an evaluation: their held-out text, and the methods that apply to
them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from trainer.common.errors import Problem, UserError
from trainer.common.words import counted
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.tokenizer import same_tokens
from trainer.evaluation.method_config import LAYERS_KEY, MethodsConfig, heads_problems
from trainer.evaluation.methods import HAS_POSITIONS, LAYERS, Recipe, recipe
from trainer.evaluation.passes import Dtype, precision_of
from trainer.evaluation.plan import Subject
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import layer_problems
from trainer.runs.models import DTYPES, Candidate


def text_source(text: DataConfig | None, candidate: Candidate) -> DataConfig:
    """Return the configured text, or that of the model's own run, or the text that comes with
    Python."""
    return text or (candidate.run.data if candidate.run is not None else DataConfig())


def held_out_corpus(text: DataConfig | None, candidate: Candidate) -> Corpus:
    """Open the prepared splits of the source in the model's tokens.

    Raises:
        UserError: the text cannot be read, is too short, or differs from the run's.
    """
    source, run = text_source(text, candidate), candidate.run
    if text is None and run is not None and not run.model.is_trained:
        read = (candidate.state.get("data") or {}).get("texts")
        corpus = prepare_corpus(source, run.tokenizer, wanted=read)
        if not same_tokens(corpus.tokenizer, candidate.tokenizer):
            raise UserError.at(
                "checkpoint",
                "it was trained with another tokenizer than its text source gives here (another "
                "version of Python, or changed files); where a command takes text=, that names "
                "another source.",
            )
        return corpus
    try:
        return prepare_corpus(source, TokenizerConfig(), candidate.tokenizer)
    except UserError as error:
        if text is None:
            raise
        raise UserError(*(p.renamed({"data": "text"}) for p in error.problems)) from error


log = logging.getLogger(__name__)


def subject_of(
    candidate: Candidate,
    dtype: Dtype | None,
    device: str,
    *,
    chunk: int | None = None,
    tf32: bool = True,
) -> Subject:
    """Return a subject that loads the model onto a device ("cpu", "cuda").

    Args:
        candidate: a finished model.
        dtype: as configured (None: bf16 on a GPU, else fp32).
        device: where it computes.
        chunk: tokens of a sequence read at once; see ``LanguageModel.prefill_chunk``.
        tf32: whether a GPU multiplies float32 matrices in TF32; see :func:`multiplying`.
    """
    weights = precision_of(dtype, device)
    precision = multiplied_in(weights, device, tf32)

    def load() -> LanguageModel:
        model = candidate.load(device).to(DTYPES[weights])
        model.prefill_chunk = chunk
        half = weights == "bf16"
        try:
            backend = model.use_backend(model.config.attention_backend, device, half=half)
        except UserError:  # the run had a GPU or 16 bits, its evaluation has not
            backend = model.use_backend("auto", device, half=half)
        kind = f"{precision} on {device}"
        log.info("%s: %s, attention %s (%s)", candidate.name, kind, backend.name, backend.why)
        return model

    # Results of fp32, tf32 and bf16 differ by more than the order of sums and are kept apart. The
    # device is no part of the key: it changes only the order of sums.
    key = fingerprint(candidate.fingerprint, precision)
    own = candidate.computed_by is None
    return Subject(candidate.name, key, candidate.config, candidate.layout, load, own, device)


def multiplied_in(weights: Dtype, device: str, tf32: bool = True) -> str:
    """Return the precision of matrix products with such weights: fp32, tf32 or bf16."""
    return "tf32" if (weights, device, tf32) == ("fp32", "cuda", True) else weights


@contextmanager
def multiplying(device: str, tf32: bool = True) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32, or not, within the block; no effect on a CPU."""
    before = torch.get_float32_matmul_precision()
    try:
        if device == "cuda":
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def applicable(
    subjects: Sequence[Subject], config: MethodsConfig
) -> tuple[dict[str, list[Recipe]], list[str]]:
    """Return the methods that change each model, and a sentence for those that do not.

    Raises:
        UserError: no method changes any model, or one has to choose more heads than there are.
    """
    found: dict[str, list[Recipe]] = {subject.name: [] for subject in subjects}
    idle: dict[tuple[str, str], list[str]] = defaultdict(list)
    problems: list[Problem] = []
    for name in config.names:
        for subject in subjects:
            count = subject.config.num_hidden_layers
            if unknown := layer_problems(LAYERS_KEY, config.layers, count):
                problems += unknown
                continue
            made = recipe(name, subject.layout, config, own=subject.own)
            if isinstance(made, Recipe):
                found[subject.name].append(made)
                if "dope" in made.settings:
                    problems += heads_problems(subject.layout, subject.config, config.dope)
            else:
                idle[subject.name, made[0]].append(made[1])
    keys = {made.key for of_one in found.values() for made in of_one}
    if any(key.startswith("temperature") for key in keys):  # in the models that it is for
        idle = {at: titles for at, titles in idle.items() if at[1] != HAS_POSITIONS}
    notes = [f"{name} {why.format(', '.join(titles))}." for (name, why), titles in idle.items()]
    notes += [
        f"{subject.name}: {LAYERS_KEY} leaves rescalings and temperatures to "
        f"{counted(len(layers), 'layer')} of {subject.config.num_hidden_layers} "
        f"({', '.join(map(str, layers))})."
        for subject in subjects
        for layers in [m.settings[LAYERS] for m in found[subject.name] if LAYERS in m.settings][:1]
    ]
    names = [made.key for of_one in found.values() for made in of_one]
    problems += config.choice_problems(subjects[0].layout.training_length, names)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    if not any(found.values()):
        raise UserError(*(Problem("evaluation.methods", note) for note in notes))
    return found, notes
