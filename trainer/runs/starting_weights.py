"""Trained weights that a run begins with: published ones, or another run's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from trainer.common.errors import UserError, renaming
from trainer.interchange.pretrained import Pretrained, read_pretrained
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig
from trainer.positional.layout import Layout
from trainer.runs.checkpoints import find_checkpoint, model_config, read_state
from trainer.runs.descriptions import is_dropped, label
from trainer.runs.directory import saved_config
from trainer.runs.index import read_index
from trainer.runs.phases import phases_of
from trainer.runs.state import check_shapes, load, tensors_in

FROM_RUN = "model.from_run"
OF_MODEL = "model."
"""How the names of a checkpoint's weights begin."""


def starting_weights(config: ModelConfig) -> Pretrained | None:
    """Return the model that ``model.from_pretrained`` or ``model.from_run`` names, or None.

    Reads and hashes no weights; see ``damage_together`` for the process that does.

    Raises:
        UserError: the model does not exist or is damaged, or both keys are set.
    """
    if config.from_pretrained is not None and config.from_run is not None:
        raise UserError.at("model", "from_pretrained and from_run are given; leave out one.")
    if config.from_pretrained is not None:
        return read_pretrained(config.from_pretrained)
    if config.from_run is None:
        return None
    with renaming(checkpoint=FROM_RUN):
        return _of_run(config.from_run)


def normalizes(layout: Layout) -> bool:
    """Whether any query and key norms are enabled.

    Otherwise the norms still wait for a drop, and are no part of the published weights.
    """
    return any(layer.qk_norm for layer in layout.layers)


def encodings_of(reference: str) -> tuple[PositionalConfig, str | None]:
    """Return the encodings of the checkpoint that ``model.from_run`` names, and their label.

    The label is None if it follows from the encodings.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    with renaming(checkpoint=FROM_RUN):
        path = _checkpoint(reference)
        state = read_state(path, hashed=False)
    file = f"the configuration in {str(path)!r}"
    config, step = saved_config(state["config"], FROM_RUN, file), state["step"]
    positional, depth = config.positional, config.model.num_hidden_layers
    dropped = is_dropped(config, step)
    for phase in phases_of(config):
        change = phase.drop
        if change is None or phase.start >= step or change.heads is not None or change.of_pairs:
            continue  # A partial drop leaves an encoding that has no name.
        chosen = {layer % depth for layer in change.layers or range(depth)}
        before = [positional.layers[i % len(positional.layers)] for i in range(depth)]
        layers = [change.to if i in chosen else name for i, name in enumerate(before)]
        if len(chosen) == depth:
            layers, positional = [change.to], replace(positional, heads={})
        positional = replace(positional, layers=layers)
    return positional, label(config, dropped) if dropped else None


def _of_run(reference: str) -> Pretrained:
    path = _checkpoint(reference)
    state, index = read_state(path, hashed=False), read_index(path)
    config, layout = model_config(state), Layout.from_dict(state["layout"])
    with torch.device("meta"):
        shapes = dict(Decoder(config, layout).named_parameters())
    check_shapes({OF_MODEL + n: p for n, p in shapes.items()}, tensors_in(index), path.name)
    wait = not normalizes(layout)
    tensors = {
        name: _Saved(name, tuple(p.shape), path, index)
        for name, p in shapes.items()
        if not (wait and any(norm in name for norm in ("q_norm", "k_norm")))
    }
    return Pretrained(str(path), config, layout, Tokenizer.from_str(state["tokenizer"]), tensors)


@dataclass(frozen=True)
class _Saved:
    """A weight in a checkpoint, to be read later."""

    name: str
    shape: tuple[int, ...]
    checkpoint: Path
    index: Metadata

    def read_into(self, out: Tensor) -> None:
        """Fill ``out``, converting to its dtype; each rank reads independently."""
        saved = torch.empty(self.shape)
        load({OF_MODEL + self.name: saved}, self.checkpoint, self.index, alone=True)
        out.copy_(saved)


def _checkpoint(reference: str) -> Path:
    if not reference:
        raise UserError.at(
            "model.from_run",
            "expected a run directory or a checkpoint, got nothing; null begins from nothing.",
        )
    return find_checkpoint(reference)
