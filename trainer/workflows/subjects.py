"""Finished models as what is measured, and the methods that do something to them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from trainer.common.errors import Problem, UserError
from trainer.common.words import counted
from trainer.evaluation.head_units import heads_problems
from trainer.evaluation.keys import fingerprint
from trainer.evaluation.method_config import LAYERS_KEY, MethodsConfig
from trainer.evaluation.methods import LAYERS, Recipe, recipe
from trainer.evaluation.passes import Dtype, precision_of
from trainer.evaluation.plan import Subject
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import layer_problems
from trainer.runs.models import DTYPES, Candidate

log = logging.getLogger(__name__)


def subject_of(
    candidate: Candidate,
    dtype: Dtype | None,
    device: str,
    *,
    chunk: int | None = None,
    tf32: bool = True,
) -> Subject:
    """Return the model, to be loaded onto a device ("cpu", "cuda").

    Args:
        candidate: a finished model.
        dtype: as configured (None: bf16 on a GPU, else fp32).
        device: where it is computed.
        chunk: tokens of a sequence that are read at once; see ``LanguageModel.prefill_chunk``.
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
        except UserError:  # the run had a GPU, or 16 bits, that its evaluation does not have
            backend = model.use_backend("auto", device, half=half)
        kind = f"{precision} on {device}"
        log.info("%s: %s, attention %s (%s)", candidate.name, kind, backend.name, backend.why)
        return model

    # Results of fp32, tf32 and bf16 differ by more than rounding in another order, so that none is
    # taken for another. The device itself is left out: it computes the same but for that.
    key = fingerprint(candidate.fingerprint, precision)
    own = candidate.computed_by is None
    return Subject(candidate.name, key, candidate.config, candidate.layout, load, own, device)


def multiplied_in(weights: Dtype, device: str, tf32: bool = True) -> str:
    """Return the precision in which matrices of that type are multiplied: fp32, tf32 or bf16."""
    return "tf32" if (weights, device, tf32) == ("fp32", "cuda", True) else weights


@contextmanager
def multiplying(device: str, tf32: bool = True) -> Iterator[None]:
    """Within it a GPU multiplies float32 matrices in TF32, or in float32; a CPU is left alone."""
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
    """Of every model the methods that do something to it, and a sentence for those that do not.

    Raises:
        UserError: none does anything to any of the models, or one has more to choose than there is.
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
