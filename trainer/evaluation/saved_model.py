"""A model that an evaluation, an analysis or a generation loads."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.common.errors import UserError
from trainer.config import RunConfig
from trainer.data.tokenizer import SpecialTokens
from trainer.model.backends import UnsupportedError
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)

Dtype = Literal["fp32", "bf16"]
"""Type of weights, as commands call it."""
PREFILL = 32768
"""Tokens of a long sequence that are read at once."""


def matmul_precision(dtype: Dtype, device: str) -> str:
    """Return the precision of matrix products with weights of ``dtype``: fp32, tf32 or bf16."""
    return "tf32" if (dtype, device) == ("fp32", "cuda") else dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel:
    """A model that can be loaded, with its name in tables.

    ``title``: what it is, such as ``DroPE``. ``name``: its name in tables, the title until
    :func:`distinct` adds a mark. ``reference``: the user's name for it. ``path``: the checkpoint,
    or the directory of published weights. ``home``: the run directory; for published weights a
    directory of their name among the runs. ``tokens``: tokenizer and special tokens. ``layout``:
    encodings of its layers, and C. ``read``: loads it onto a device and in a dtype.
    ``fingerprint``: hash that changes with the weights, C and the tokens that end answers.
    ``parameters``: their number. ``longest_context``: the longest context, in tokens, that it was
    trained with, that its own rescaling reaches, or that the user names. ``run``: configuration of
    the run that trained it (None: published weights). ``role``: its role in comparisons, such as
    ``drope``. ``is_dropped``: whether its run has dropped its encoding. ``computed_by``: the
    program that computes it, if not this one.

    ``state``: ``state.json`` of a run's checkpoint; empty for published weights. Keys read from it:
    ``step``, number of steps trained; ``end_of_text`` and ``token_files``, for an export;
    ``texts``, fingerprints of the prepared texts; ``effects``, losses before and after the change
    of each phase, by its name; ``benchmarks``, scores during training.
    """

    title: str
    name: str
    reference: str
    path: Path
    home: Path
    tokens: SpecialTokens
    layout: Layout
    read: Callable[[str, torch.dtype], LanguageModel]
    fingerprint: str
    parameters: int
    longest_context: int
    run: RunConfig | None = None
    role: str | None = None
    is_dropped: bool = False
    state: dict[str, Any] = field(default_factory=dict)
    computed_by: str | None = None

    @property
    def training_length(self) -> int:
        """C, from which methods and lengths count, in tokens."""
        return self.layout.training_length

    def load(self, device: str = "cpu", dtype: Dtype = "fp32") -> LanguageModel:
        """Load the model with its training length and the tokens that end its answers."""
        weights_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        model = self.read(device, weights_dtype)
        model.layout = self.layout
        model.end_tokens = self.tokens.stops
        return model

    def for_inference(self, device: str, dtype: Dtype) -> LanguageModel:
        """Load the model in evaluation mode, with the run's attention backend if possible."""
        model = self.load(device, dtype).eval()
        model.prefill_chunk = PREFILL
        half = dtype == "bf16"
        backend = "of transformers"
        if isinstance(model, Decoder):
            try:
                backend = model.use_backend(model.config.attention_backend, device, half=half)
            except UnsupportedError as error:
                backend = model.use_backend("auto", device, half=half)
                log.warning("%s: %s; computed with %s", self.name, error, backend)
        kind = f"{matmul_precision(dtype, device)} on {device}"
        log.info("%s: %s, attention %s", self.name, kind, backend)
        return model


def distinct(models: Sequence[SavedModel]) -> list[SavedModel]:
    """Give models of equal name, such as two seeds of a recipe, the directory of their run as a
    suffix, or if two directories have one name the user's names for the models. Raise a UserError
    if a model appears twice."""
    places = Counter((model.path.resolve(), model.computed_by) for model in models)
    twice = [m.reference for m in models if places[m.path.resolve(), m.computed_by] > 1]
    if twice:
        raise UserError(f"compare: {twice} are one model")
    shared = Counter(model.name for model in models)
    marks = [model.home.resolve().name for model in models]
    if len({(m.name, mark) for m, mark in zip(models, marks, strict=True)}) < len(models):
        marks = [model.reference for model in models]
    renamed = []
    for model, mark in zip(models, marks, strict=True):
        name = f"{model.name} ({mark})" if shared[model.name] > 1 else model.name
        renamed.append(replace(model, name=name))
    return renamed
