"""Methods change a model's layout for an extension factor; some are fitted on text.

A function registers itself with :func:`method`, in a file that ``plugins`` names too; its name is
then known to ``evaluation.methods``, alone or joined with others by ``+``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.common.registry import Registry
from trainer.config import EvaluationConfig
from trainer.evaluation.saved_model import SavedModel

Need = Callable[[SavedModel, EvaluationConfig], str]
"""Returns why a method cannot change a model; empty if it can."""
F = TypeVar("F", bound=Callable[..., Any])
SETTINGS = "dynamic_ntk_alpha", "temperature", "longrope", "choice", "dope", "weighted_rope"
"""Keys of ``evaluation`` that a method may read unless it declares its own."""


@dataclass(frozen=True)
class Method:
    """Change of a model's layout for an extension factor s.

    ``title``: in tables. ``apply``: maps a layout, s and the configuration to a layout; if it
    ``is_fitted``, see :func:`~trainer.evaluation.temperature.fit_temperature`. ``needs``: of the
    model. ``reads``: keys of ``evaluation`` besides ``layers`` that the layout depends on; with
    ``lengths``, one fit is for all lengths.
    """

    title: str
    apply: Callable[..., Any]
    needs: tuple[Need, ...] = ()
    is_fitted: bool = False
    reads: tuple[str, ...] = SETTINGS


METHODS = Registry[Method]("method")
"""Registered methods by the names of ``evaluation.methods``."""


def method(
    name: str, title: str, *needs: Need, is_fitted: bool = False, reads: tuple[str, ...] = SETTINGS
) -> Callable[[F], F]:
    """Register a function as :class:`Method` ``name``."""

    def register(function: F) -> F:
        METHODS.add(name, Method(title, function, needs, is_fitted, reads), function)
        return function

    return register


def own_decoder(model: SavedModel, config: EvaluationConfig) -> str:
    """Need the decoder of this program."""
    if not model.computed_by:
        return ""
    return "is computed by transformers, and this method needs the decoder of this program"


def rotation(model: SavedModel, config: EvaluationConfig) -> str:
    """Need heads that rotate."""
    return "" if model.layout.rotates else "has no rotation"


NO_LAYER = "has no such layer that sees more than the training length (evaluation.layers)"


def far_rotation(model: SavedModel, config: EvaluationConfig) -> str:
    """Need heads that rotate in the layers of ``evaluation.layers``."""
    if model.layout.of_layers(config.layers).rotates:
        return ""
    return rotation(model, config) or NO_LAYER


def far_layers(model: SavedModel, config: EvaluationConfig) -> str:
    """Need layers of ``evaluation.layers`` whose logits do not follow the length."""
    C = model.layout.training_length
    chosen = model.layout.of_layers(config.layers)
    if not chosen.layers:
        return NO_LAYER
    is_trained = any(spectrum.temperature.is_trained(C) for spectrum in chosen.spectra)
    return "was trained with logits that follow the length" if is_trained else ""
