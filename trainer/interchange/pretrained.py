"""Published weights: checked by their headers, and read into a decoder one tensor at a time.

A model is a directory as Hugging Face publishes it (``config.json``, ``model.safetensors`` or
shards with an index, ``tokenizer.json``), one of our exports, or a hub id. Only tensors are read;
no code in a file is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from trainer.common.errors import UserError
from trainer.interchange.hf_config import is_unused, named_bos, shape_and_layout
from trainer.interchange.hub import find_pretrained, tokenizer_from_file
from trainer.interchange.token_files import eos_ids, read_token_files, stop_ids
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder, initial_value
from trainer.positional.layout import Layout

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 1 << 22
"""Elements that are read at a time."""


class StoredTensor(Protocol):
    """A tensor in a file, to be read later."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        ...

    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (contiguous, of this shape), converting to its type."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor in a safetensors file, under its name there."""

    name: str
    shape: tuple[int, ...]
    path: Path

    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (of this shape), converting to its type."""
        for rows, piece in zip(out.detach().split(self._rows), self.pieces(), strict=True):
            rows.copy_(piece)

    def pieces(self) -> Iterator[Tensor]:
        """Yield some rows after the other.

        The file is opened anew for each: mapped pages count as memory once they were touched, so
        otherwise a model would need its size twice.
        """
        for first in range(0, self.shape[0], self._rows):
            with safe_open(self.path, framework="pt") as file:
                yield file.get_slice(self.name)[first : first + self._rows]

    @property
    def _rows(self) -> int:
        """Number of rows that are read at a time."""
        return max(1, PIECE * self.shape[0] // max(math.prod(self.shape), 1))


def read_headers(directory: Path) -> dict[str, FileTensor]:
    """Return every tensor of the model in ``directory``, sharded or not, by its name there."""
    names = [SINGLE]
    if not (directory / SINGLE).is_file() and (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text("utf-8"))
        # Files beside the index only.
        names = sorted({Path(name).name for name in index["weight_map"].values()})
    tensors: dict[str, FileTensor] = {}
    for name in names:
        with safe_open(directory / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(key).get_shape())
                tensors[key] = FileTensor(key, shape, directory / name)
    return tensors


@dataclass(frozen=True)
class Pretrained:
    """A model whose files were checked, and whose weights are still in them.

    ``tensors``: by the decoder's parameter names. ``token_files``: reads what
    :func:`~trainer.interchange.token_files.read_token_files` returns. ``eos`` and ``stops``: see
    :func:`~trainer.interchange.token_files.eos_ids` and ``stop_ids`` there.
    ``tokenizer``: None if the model came without one. ``bos_token``: see
    :func:`~trainer.interchange.hf_config.named_bos`.
    """

    name: str
    config: ModelConfig
    layout: Layout
    tokenizer: Tokenizer | None
    tensors: Mapping[str, StoredTensor]
    bos_token: int | None = None
    token_files: Callable[[], dict[str, str]] = dict
    eos: tuple[int, ...] = ()
    stops: frozenset[int] = frozenset()

    @torch.no_grad()
    def fill(self, model: Decoder) -> None:
        """Read the weights into a decoder of this shape, in place.

        Parameters missing from the file, the query and key norms that wait for a drop, get their
        initial values.
        """
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                self.tensors[name].read_into(parameter)
            else:
                parameter.copy_(initial_value(model.config, name, parameter.shape, seed=0))

    def decoder(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
        """Load the model directly onto the device and in ``dtype``; takes hardly more memory than
        its size."""
        with torch.device("meta"):
            model = Decoder(self.config, self.layout).to(dtype)
        model.to_empty(device=device)
        self.fill(model)
        return model

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            UserError: the model came without one.
        """
        if self.tokenizer is None:
            raise UserError(f"{self.name}: there is no tokenizer.json beside its weights")
        return self.tokenizer


def read_pretrained(location: str) -> Pretrained:
    """Check the files of a model without reading weights.

    ``location``: a directory or a hub id.

    Raises:
        UserError: the model is not supported, or its tensors are not those of its configuration.
        OSError: a file is missing.
    """
    path = find_pretrained(location)
    values, tensors, tokenizer = read_config(path), read_headers(path), read_tokenizer(path)
    try:
        config, layout = shape_and_layout(values)
    except ValueError as error:
        raise UserError(f"{location}: config.json: {error}") from error
    ours = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not is_unused(values, name)
    }
    with torch.device("meta"):
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in Decoder(config, layout).named_parameters()
            if not waits(name, layout)
        }
    redundant = "rotary_emb.inv_freq", *(["lm_head.weight"] if config.tie_word_embeddings else [])
    given = {n: t.shape for n, t in ours.items() if n in shapes or not n.endswith(redundant)}
    for name, _ in sorted(shapes.items() ^ given.items()):
        expected, got = shapes.get(name), given.get(name)
        raise UserError(f"{location}: tensor {name}: expected the shape {expected}, got {got}")
    head = ours.get("lm_head.weight") if config.tie_word_embeddings else None
    if head is not None and not all(
        map(torch.equal, head.pieces(), ours["embed_tokens.weight"].pieces())
    ):
        raise UserError(
            f"{location}: tensor lm_head.weight: differs from the embeddings, which the model uses "
            "as its head; tie_word_embeddings: false in config.json uses lm_head.weight"
        )
    files = read_token_files(path)
    return Pretrained(
        location,
        config,
        layout,
        tokenizer,
        {name: ours[name] for name in shapes},
        named_bos(values),
        partial(read_token_files, path),
        () if tokenizer is None else eos_ids(files, tokenizer),
        frozenset() if tokenizer is None else stop_ids(files, tokenizer),
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``."""
    values = json.loads((directory / "config.json").read_text("utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"{directory}: config.json: expected keys and values")
    return values


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Read ``tokenizer.json``, or return None if there is none."""
    path = directory / "tokenizer.json"
    return tokenizer_from_file(str(path)) if path.is_file() else None


def published_name(name: str) -> str:
    """Return a parameter's name in Hugging Face's Llama."""
    return name if name.startswith("lm_head") else f"model.{name}"


def waits(name: str, layout: Layout) -> bool:
    """Whether a parameter is a query or key norm of a layer whose norms are disabled."""
    parts = name.split(".")
    return parts[-2] in ("q_norm", "k_norm") and not layout.layers[int(parts[1])].qk_norm
