"""Analysis of a model under a method of ``evaluation.methods`` instead of its trained layout."""

from __future__ import annotations

from pathlib import Path

from trainer.common.errors import UserError
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.methods import recipe
from trainer.evaluation.store import Store
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, layer_problems
from trainer.runs.models import Candidate
from trainer.workflows.requests import LAYERS_KEY


def use_method(
    model: LanguageModel, of: Candidate, name: str, length: int, layers: LayerChoice = None
) -> str:
    """Set the layout that a method has for texts of ``length`` tokens; return a sentence about it.

    The method chooses nothing on text.

    Raises:
        UserError: the method changes nothing in ``layers`` of this model.
    """
    if problems := layer_problems(LAYERS_KEY, layers, len(of.layout.layers)):
        raise UserError(*problems)
    config = EvaluationConfig(methods=[name], layers=layers)
    own = of.computed_by is None
    made = recipe(name, of.layout, config, own=own, layers_key=LAYERS_KEY)
    if isinstance(made, tuple):
        why, titles = made
        raise UserError.at("analysis.method", f"{of.name} {why.format(titles)}.")
    # Such a method reads no text and stores no choice.
    unread = Fitting(model, "", FitText({}, 0, ""), Store(Path()), batch_tokens=1)
    C = of.layout.training_length
    model.layout = made.make(unread).layout_at(max(1.0, length / C))
    return f"{of.name} is read with {made.title}, set for {length:,} tokens of {C:,} in training."
