"""The tensors of a run, by name: weights, optimizer state, random number generators.

Names depend on neither strategy nor world size, so that any of them can read what another wrote:
``model.<parameter>``, ``optimizer.<parameter>.<key>``, ``rng.<device>.<rank>``.
"""

from __future__ import annotations

import math
import pickle
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

from trainer.errors import UserError
from trainer.model.decoder import Decoder

Tensors = dict[str, Tensor]


def tensors_of(model: Decoder, optimizer: torch.optim.Optimizer) -> Tensors:
    """This rank's part of what a checkpoint holds: its shards; whole tensors on the first rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: Tensors = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{key}"] = value
    if rank:
        found = {name: value for name, value in found.items() if isinstance(value, DTensor)}
    return found | random_states(rank)


def random_states(rank: int) -> Tensors:
    """The state of this rank's generators; training draws nothing from them, plugins may."""
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def restore(model: Decoder, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Put a checkpoint's tensors into a model and its optimizer, whatever strategy wrote them.

    Raises:
        UserError: the checkpoint lacks a parameter, or has one of another shape.
    """
    saved = read_metadata(directory)
    parameters = dict(model.named_parameters())
    wanted: Tensors = {f"model.{name}": p.detach() for name, p in parameters.items()}
    check_shapes(wanted, saved, directory.name)
    state: dict[str, Tensors] = {name: {} for name in parameters}
    for key, about in saved.items():
        if key.startswith("optimizer."):
            name, _, part = key.removeprefix("optimizer.").rpartition(".")
            state[name][part] = _empty(parameters[name], about)
            wanted[key] = state[name][part]
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = {name: value for name, value in random_states(rank).items() if name in saved}
    load(wanted | mine, directory)
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if state[name]:
            optimizer.state[parameter] = state[name]
    for name, value in mine.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(value)


def _empty(parameter: Tensor, about: TensorStorageMetadata) -> Tensor:
    """Where a piece of optimizer state goes: laid out as its parameter, or a scalar beside it."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if about.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=about.properties.dtype, requires_grad=False)
    return torch.zeros(about.size, dtype=about.properties.dtype, device=local.device)


def check_shapes(wanted: Tensors, saved: dict[str, TensorStorageMetadata], name: str) -> None:
    """Refuse weights that do not fit.

    Raises:
        UserError: naming every parameter that is missing or has another shape.
    """
    problems = [
        f"checkpoint: {name!r} has no parameter {key.removeprefix('model.')!r}."
        if key not in saved
        else f"checkpoint: {key.removeprefix('model.')!r} is {tuple(saved[key].size)} in {name!r}, "
        f"but {tuple(value.shape)} in the model."
        for key, value in wanted.items()
        if key not in saved or saved[key].size != value.shape
    ]
    if problems:
        raise UserError(*problems)


def load(tensors: Tensors, directory: Path) -> None:
    """Read ``tensors`` in place from a checkpoint; all ranks together where there are several.

    Raises:
        UserError: its files cannot be read as its index says.
    """
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # known: alone
        try:
            dcp.load(dict(tensors), storage_reader=SafeReader(directory), no_dist=alone)
        # Damaged files may raise anything; of several ranks' reports DCP makes a BaseException.
        except (Exception, CheckpointException) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"checkpoint: {directory.name!r} cannot be read: {reason}") from error


def save(tensors: Tensors, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write ``tensors`` into a directory; all ranks of ``group`` together (None: this one alone).

    Raises:
        CheckpointException, OSError: on every rank, where one of them cannot write.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # known: alone
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(directory),
            process_group=group,
            no_dist=group is None,
        )


def read_metadata(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Sizes and types of the tensors in a checkpoint, by name.

    Raises:
        UserError: its index is damaged, or holds what has no place there.
    """
    try:
        found = SafeReader(directory).read_metadata().state_dict_metadata
    except pickle.UnpicklingError as error:
        raise UserError(
            f"checkpoint: the index of {directory.name!r} is refused: {error}"
        ) from error
    tensors = {k: about for k, about in found.items() if isinstance(about, TensorStorageMetadata)}
    for key, about in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in about.chunks) != math.prod(about.size):
            raise UserError(f"checkpoint: {directory.name!r} does not hold the whole of {key!r}.")
    return tensors


class SafeReader(dcp.FileSystemReader):
    """Reads DCP's files without ever running code from them.

    Tensors are read with ``weights_only=True`` anyway; DCP's index of them is a pickle, which here
    may name nothing but :data:`INDEX_CLASSES`, and files of the checkpoint's own directory.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index. Raises ``pickle.UnpicklingError`` where it is damaged or holds more."""
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = _IndexUnpickler(file).load()
            outside = {
                name
                for info in metadata.storage_data.values()
                if (name := info.relative_path) != Path(name).name or name == ".."
            }
            metadata.storage_meta.load_id = self.load_id
        except (pickle.UnpicklingError, OSError):
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise pickle.UnpicklingError(f"it is damaged ({error}).") from error
        if outside:
            raise pickle.UnpicklingError(
                f"it names files elsewhere ({', '.join(sorted(outside))})."
            )
        return metadata


INDEX_CLASSES = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    }
)
"""What an index may name: exact pairs of module and name. A dotted name, which pickle would resolve
through what a module imports, is never among them."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in INDEX_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index.")
        return super().find_class(module, name)
