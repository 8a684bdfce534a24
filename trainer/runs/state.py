"""Tensors of a run by name: weights, optimizer state, random number generators.

Names depend on neither strategy nor world size, so that any of them can read what another wrote:
``model.<parameter>``, ``optimizer.<parameter>.<key>``, ``rng.<device>.<rank>``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trainer.common.errors import UserError, first_line
from trainer.model.decoder import Decoder
from trainer.runs.index import read_index

Tensors = dict[str, Tensor]


def tensors_of(model: Decoder, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return this rank's part of a checkpoint: its shards, and on rank 0 the unsharded tensors."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    if rank:
        tensors = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    return tensors | random_states(rank)


def random_states(rank: int) -> Tensors:
    """Return the states of this rank's generators; training does not use them, but plugins may."""
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def restore(model: Decoder, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Load a checkpoint's tensors into a model and its optimizer, whatever strategy wrote them.

    Raises:
        UserError: a parameter is missing from the checkpoint, has another shape, or is unknown.
    """
    index = read_index(directory)
    saved = tensors_in(index)
    parameters = dict(model.named_parameters())
    wanted: Tensors = {f"model.{name}": p.detach() for name, p in parameters.items()}
    check_shapes(wanted, saved, directory.name)
    state: dict[str, Tensors] = {name: {} for name in parameters}
    for key, about in saved.items():
        if key.startswith("optimizer."):
            name, _, part = key.removeprefix("optimizer.").rpartition(".")
            if name not in parameters:
                raise UserError.at(
                    "checkpoint", f"{directory.name!r} holds {key!r} of no parameter."
                )
            state[name][part] = _empty(parameters[name], about)
            wanted[key] = state[name][part]
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = {name: value for name, value in random_states(rank).items() if name in saved}
    check_shapes(mine, saved, directory.name)
    load(wanted | mine, directory, index)
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if state[name]:
            optimizer.state[parameter] = state[name]
    for name, value in mine.items():
        try:
            (torch.cuda if ".cuda." in name else torch).set_rng_state(value)
        except RuntimeError as error:
            raise UserError.at(
                "checkpoint", f"{directory.name!r} holds no state of a generator in {name!r}."
            ) from error


def _empty(parameter: Tensor, about: TensorStorageMetadata) -> Tensor:
    """Allocate a tensor of optimizer state, sharded like its parameter, or a scalar."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if about.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=about.properties.dtype, requires_grad=False)
    return torch.zeros(about.size, dtype=about.properties.dtype, device=local.device)


def check_shapes(wanted: Tensors, saved: dict[str, TensorStorageMetadata], name: str) -> None:
    """Check that saved weights have the model's shapes.

    Raises:
        UserError: names the first parameter that is missing or has another shape, and their number.
    """
    problems = []
    for key, value in wanted.items():
        parameter = key.removeprefix("model.")
        if key not in saved:
            problems.append(f"{name!r} has no parameter {parameter!r}")
        elif (size := saved[key].size) != value.shape:
            shapes = f"{tuple(size)} in {name!r}, but {tuple(value.shape)} in the model"
            problems.append(f"{parameter!r} is {shapes}")
    if problems:
        others = f"; {len(problems) - 1} others do not fit either" if len(problems) > 1 else ""
        raise UserError.at("checkpoint", f"{problems[0]}{others}.")


def load(
    tensors: Tensors, directory: Path, index: Metadata | None = None, *, alone: bool = False
) -> None:
    """Read ``tensors`` in place from a checkpoint, all ranks together or each ``alone``.

    ``index``: the checkpoint's index if it was read before; with many ranks, reading it takes
    seconds.

    Raises:
        UserError: verified files cannot be read as the index says: a disk or another rank failed.
    """
    alone = alone or not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected here
        try:
            dcp.load(dict(tensors), storage_reader=SafeReader(directory, index), no_dist=alone)
        # Damaged files may raise anything; DCP wraps several ranks' errors in a BaseException.
        except (Exception, CheckpointException) as error:
            reason = first_line(error)
            message = f"{directory.name!r} cannot be read: {reason}"
            raise UserError.at("checkpoint", message, transient=True) from error


def save(tensors: Tensors, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write ``tensors`` into a directory, all ranks of ``group`` together (None: this rank alone).

    Raises:
        CheckpointException, OSError: on every rank, if one cannot write.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected here
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(directory),
            process_group=group,
            no_dist=group is None,
        )


def read_metadata(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Return sizes and dtypes of a checkpoint's tensors, by name.

    Raises:
        UserError: the index is damaged or contains foreign objects.
    """
    return tensors_in(read_index(directory))


def tensors_in(index: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return sizes and dtypes of the tensors, by name."""
    tensors = index.state_dict_metadata
    return {k: about for k, about in tensors.items() if isinstance(about, TensorStorageMetadata)}


class SafeReader(dcp.FileSystemReader):
    """Reader of DCP's files that never runs code from them.

    Tensors are read with torch's ``weights_only=True``, their index by :func:`read_index`.
    """

    def __init__(self, directory: Path, index: Metadata | None = None) -> None:
        super().__init__(directory)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            UserError: the index is damaged or contains foreign objects.
        """
        metadata = self.index or read_index(Path(self.path))
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata
