"""Published weights: checked by their headers, and read into a decoder one tensor at a time.

A model is a directory as Hugging Face publishes it (``config.json``, ``model.safetensors`` or
shards with an index, ``tokenizer.json``), one of our exports, a hub id, or a ``.gguf`` file. Only
tensors are read; no code in a file is run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.common.errors import Problem, UserError
from trainer.common.formats import read_plain
from trainer.interchange.hf_config import (
    code_remark,
    from_drope_config,
    from_hf_config,
    from_own_config,
    is_drope,
    is_own,
    is_unused,
    named_bos,
)
from trainer.interchange.hub import find_pretrained, tokenizer_from_file
from trainer.interchange.tensor_files import FileTensor, read_headers
from trainer.interchange.token_files import CONFIG, eos_ids, read_token_files, stop_ids
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder, initial_value
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)

NAMES_SHOWN = 5
DEEP, MATRICES = 256, 7
"""Layers that take long to be compared with tensors one by one; matrices of a layer."""
T = TypeVar("T")


class StoredTensor(Protocol):
    """A tensor in a file, to be read later."""

    @property
    def name(self) -> str:
        """Name in the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        ...

    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (contiguous, of this shape), converting to its type."""


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
            raise UserError.at(
                self.name, "there is no tokenizer.json; put the model's beside its weights."
            )
        return self.tokenizer


def read_pretrained(location: str) -> Pretrained:
    """Check the files of a model without reading weights.

    ``location``: a directory, a hub id or a ``.gguf`` file.

    Raises:
        UserError: the model is not found, not supported, or its files are incomplete or damaged;
            names every problem.
    """
    path = find_pretrained(location)
    problems: list[Problem] = []

    def attempt(function: Callable[..., T], *args: Any, place: str = location) -> T | None:
        try:
            return function(*args)
        except UserError as error:
            problems.extend(problem.in_file(place) for problem in error.problems)
            return None

    values: dict[str, Any] | None
    tensors: Mapping[str, StoredTensor] | None
    token_files = partial(read_token_files, path)
    settings: dict[str, str] | None
    if path.suffix == ".gguf":
        from trainer.interchange.gguf import gguf_token_files, read_gguf

        token_files = partial(gguf_token_files, path)
        place = f"{location}: metadata"
        values, tensors, tokenizer = attempt(read_gguf, path) or (None, None, None)
        settings = {CONFIG: json.dumps({"eos_token_id": (values or {}).get("eos_token_id")})}
    else:
        place = f"{location}: config.json"
        values = attempt(read_config, path)
        tensors = attempt(read_headers, path)
        tokenizer = attempt(read_tokenizer, path)
        read_settings = partial(read_token_files, path, to_publish=False)
        settings = None if values is None else attempt(read_settings)
    model = attempt(_shape, values, place=place) if values is not None else None
    if values is None or model is None or tensors is None:
        raise UserError(*problems)
    config, layout = model
    if config.num_hidden_layers > DEEP and len(tensors) < MATRICES * config.num_hidden_layers:
        raise UserError.at(
            location,
            f"num_hidden_layers: {len(tensors)} tensors are no model of "
            f"{config.num_hidden_layers} layers.",
        )
    with torch.device("meta"):
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in Decoder(config, layout).named_parameters()
            if not waits(name, layout)
        }
    ours = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not is_unused(values, name)
    }
    attempt(_check, shapes, ours, config.tie_word_embeddings)
    if problems:
        raise UserError(*problems)
    if remark := code_remark(values, location):
        log.warning(remark)
    wanted, bos_token = {n: ours[n] for n in shapes}, named_bos(values)
    eos: tuple[int, ...] = ()
    stops: frozenset[int] = frozenset()
    if tokenizer is not None and settings is not None:
        eos, stops = eos_ids(settings, tokenizer), stop_ids(settings, tokenizer)
    others = bos_token, token_files, eos, stops
    return Pretrained(location, config, layout, tokenizer, wanted, *others)


def _shape(values: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """Return shape and layout from any supported kind of configuration."""
    if is_own(values):
        return from_own_config(values)
    if is_drope(values):
        return from_drope_config(values)
    return from_hf_config(values)


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise UserError.at("", f"there is no 'config.json' in {str(directory)!r}.")
    try:
        values = read_plain(path)
    except (OSError, ValueError) as error:
        raise UserError.at("", f"'config.json' cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise UserError.at("", "'config.json' holds no keys.")
    return values


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Read ``tokenizer.json``, or return None if there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return tokenizer_from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError.at("", f"'tokenizer.json' is damaged ({error}).") from error


def _check(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor], tied: bool
) -> None:
    """Check that the tensors are those of a decoder with parameters of these shapes."""
    missing = [published_name(name) for name in shapes if name not in tensors]
    extra = [
        tensor.name
        for name, tensor in tensors.items()
        if name not in shapes and not _is_harmless(name, tensors, tied)
    ]
    problems = [
        Problem(
            "",
            f"tensor {tensors[name].name!r} has the shape {list(tensors[name].shape)}; the "
            f"configuration asks for {list(shape)}.",
        )
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if extra:
        problems.insert(
            0, Problem("", f"tensors that the model has no place for: {_listed(extra)}.")
        )
    if missing:
        problems.insert(0, Problem("", f"tensors that are missing: {_listed(missing)}."))
    if problems:
        raise UserError(*problems)


def _is_harmless(name: str, tensors: Mapping[str, StoredTensor], tied: bool) -> bool:
    """Whether an extra tensor is redundant: a table of rotations, or a copy of tied embeddings."""
    head, embeddings = tensors[name], tensors.get("embed_tokens.weight")
    return name.endswith("rotary_emb.inv_freq") or (
        tied
        and name == "lm_head.weight"
        and isinstance(head, FileTensor)
        and isinstance(embeddings, FileTensor)
        and head.equals(embeddings)
    )


def published_name(name: str) -> str:
    """Return a parameter's name in Hugging Face's Llama."""
    return name if name.startswith("lm_head") else f"model.{name}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(map(repr, names[:NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


def waits(name: str, layout: Layout) -> bool:
    """Whether a parameter is a query or key norm of a layer whose norms are disabled."""
    parts = name.split(".")
    return parts[-2] in ("q_norm", "k_norm") and not layout.layers[int(parts[1])].qk_norm
