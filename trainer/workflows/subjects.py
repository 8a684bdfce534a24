"""Finished models as what is measured, and the methods that do something to them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from trainer.common.errors import Problem, UserError
from trainer.evaluation.head_units import heads_problems
from trainer.evaluation.keys import fingerprint
from trainer.evaluation.method_config import MethodsConfig
from trainer.evaluation.methods import Recipe, recipe
from trainer.evaluation.plan import Subject
from trainer.model.language_model import LanguageModel
from trainer.runs.models import DTYPES, Candidate

log = logging.getLogger(__name__)


def subject_of(candidate: Candidate, dtype: str, device: str) -> Subject:
    """The model, to be loaded with weights of that type onto a device ("cpu", "cuda")."""

    def load() -> LanguageModel:
        model = candidate.load(device).to(DTYPES[dtype])
        needs = {"half": dtype == "bf16", "many_lengths": True}
        try:
            backend = model.use_backend(model.config.attention_backend, device, **needs)
        except UserError:  # the run had a GPU, or 16 bits, that its evaluation does not have
            backend = model.use_backend("auto", device, **needs)
        kind = f"{dtype} on {device}"
        log.info("%s: %s, attention %s (%s)", candidate.name, kind, *backend)
        return model

    # Not the device: it computes the same but for rounding.
    weights = fingerprint(candidate.fingerprint, dtype)
    own = candidate.computed_by is None
    return Subject(candidate.name, weights, candidate.config, candidate.layout, load, own)


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
            made = recipe(name, subject.layout, config, own=subject.own)
            if isinstance(made, Recipe):
                found[subject.name].append(made)
                if "dope" in made.settings:
                    problems += heads_problems(subject.layout, subject.config, config.dope)
            else:
                idle[subject.name, made[0]].append(made[1])
    notes = [f"{name} {why.format(', '.join(titles))}." for (name, why), titles in idle.items()]
    names = [made.key for of_one in found.values() for made in of_one]
    problems += config.choice_problems(subjects[0].layout.training_length, names)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    if not any(found.values()):
        raise UserError(*(Problem("evaluation.methods", note) for note in notes))
    return found, notes
