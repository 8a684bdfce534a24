"""What an evaluation measures: a cell of every model, method, task and length, and what each
depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.evaluation.fitting import FitText
from trainer.evaluation.measurements import Measurement
from trainer.evaluation.methods import CHOICE, Recipe
from trainer.model.config import ModelConfig
from trainer.model.flops import forward_flops
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout


@dataclass(frozen=True)
class Subject:
    """A model that is not in memory yet; ``load`` reads it straight onto the device.

    ``fingerprint`` changes whenever its weights do. ``own``: whether our decoder computes it.
    """

    name: str
    fingerprint: str
    config: ModelConfig
    layout: Layout
    load: Callable[[], LanguageModel]
    own: bool = True


@dataclass(frozen=True)
class Plan:
    """One model with one method in one task at one length; ``key``: all that it depends on."""

    subject: Subject
    recipe: Recipe
    task: Measurement
    length: int
    key: dict[str, Any]

    @property
    def work(self) -> float:
        """Approximate operations of reading every sequence once."""
        return self.task.sequences(self.length) * self.of_one(self.length)

    @property
    def factor(self) -> float:
        """The length in training lengths."""
        return self.length / self.subject.layout.training_length

    @property
    def fits(self) -> dict[int, int]:
        """How many sequences, by their length, fitting the method for this length reads."""
        C = self.subject.layout.training_length
        return {round(s * C): n for s, n in self.recipe.fits(self.factor).items()}

    def of_one(self, length: int) -> float:
        """Approximate operations of reading one sequence."""
        return forward_flops(self.subject.config, self.subject.layout, length)


def plan_cells(
    subjects: Sequence[Subject],
    recipes: dict[str, list[Recipe]],
    tasks: Sequence[Measurement],
    lengths: Sequence[int],
    text: FitText,
) -> list[Plan]:
    """All cells, a model after the other, and of a model a method after the other.

    Args:
        subjects: the models.
        recipes: the methods that apply to each, by its name.
        tasks: what is measured.
        lengths: in tokens.
        text: what methods choose on.
    """

    def key(subject: Subject, recipe: Recipe, length: int, task: Measurement) -> dict[str, Any]:
        fits = recipe.fits(length / subject.layout.training_length)
        read = text.choice_key if CHOICE in recipe.settings else text.key
        return {
            "model": subject.fingerprint,
            "method": [recipe.key, recipe.settings, read if fits else None],
            "task": [task.key, task.fingerprint(length)],
            "length": length,
        }

    return [
        Plan(subject, recipe, task, length, key(subject, recipe, length, task))
        for subject in subjects
        for recipe in recipes[subject.name]
        for length in lengths
        for task in tasks
    ]
