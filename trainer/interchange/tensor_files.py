"""Tensors in safetensors files, found by their headers and read in pieces.

The format: eight bytes with the header's length, the header in JSON (name to type, shape and
place), then the tensors' bytes. Plain reads, since every page of a memory map that was touched
counts as memory: a model would need its size twice.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 1 << 22
"""Elements that are read at a time."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class FileTensor:
    """One tensor in a file: its name there, and its first byte."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    start: int

    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (contiguous, of this shape), converting to its type.

        Raises:
            UserError: the file has become shorter.
        """
        flat = out.detach().view(-1)
        buffer = torch.empty(min(PIECE, flat.numel()), dtype=self.dtype)
        with self.path.open("rb") as file:
            file.seek(self.start)
            for part in flat.split(PIECE):
                piece = buffer[: part.numel()]
                if file.readinto(piece.view(torch.uint8).numpy()) < piece.nbytes:
                    raise UserError(f"{str(self.path)!r} ended within the tensor {self.name!r}.")
                part.copy_(piece)

    def equals(self, other: FileTensor) -> bool:
        """Whether both hold the same bytes."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        left = math.prod(self.shape) * self.dtype.itemsize
        with self.path.open("rb") as ours, other.path.open("rb") as theirs:
            ours.seek(self.start)
            theirs.seek(other.start)
            while left > 0:
                if ours.read(min(PIECE, left)) != theirs.read(min(PIECE, left)):
                    return False
                left -= PIECE
        return True


def read_headers(directory: Path) -> dict[str, FileTensor]:
    """Every tensor of the model in ``directory``, one file or sharded, by its name there.

    Raises:
        UserError: no safetensors file, missing or damaged ones; every problem is named.
    """
    found: dict[str, FileTensor] = {}
    problems: list[str] = []
    for path in _weight_files(directory):
        try:
            found |= _read_header(path)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def weights_problem(directory: Path) -> str | None:
    """Why there are no complete weights in ``directory``, or None."""
    try:
        missing = [path.name for path in _weight_files(directory) if not path.is_file()]
    except UserError as error:
        return str(error)
    return f"{missing[0]!r} is missing." if missing else None


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        try:
            shards = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return [directory / name for name in sorted(set(shards.values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{INDEX!r} names no files ({error!r}).") from error
    if any(directory.glob("pytorch_model*.bin")):
        raise UserError(
            "the weights are a pytorch_model.bin, which can run code as it is read; convert them "
            "to safetensors."
        )
    raise UserError(f"there is no {SINGLE!r} in {str(directory)!r}.")


def _read_header(path: Path) -> dict[str, FileTensor]:
    if not path.is_file():
        raise UserError(f"the file {path.name!r} that the index names is missing.")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise UserError(
                f"{path.name!r} is truncated or no safetensors file: its header should have "
                f"{length} bytes, but the file has {size}."
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [
                (name, entry["dtype"], tuple(entry["shape"]), *map(int, entry["data_offsets"]))
                for name, entry in header.items()
            ]
            end = max((stop for *_, stop in entries), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path.name!r} has a header that is none ({error!r}).") from error
    begin = 8 + length
    if begin + end != size:
        raise UserError(
            f"{path.name!r} is truncated or damaged: it should have {begin + end} bytes, but has "
            f"{size}."
        )
    problems, found = [], {}
    for name, kind, shape, start, stop in entries:
        dtype = _DTYPES.get(kind)
        if dtype is None:
            problems.append(f"tensor {name!r} has the type {kind}; expected {', '.join(_DTYPES)}.")
        elif stop - start != math.prod(shape) * dtype.itemsize:
            problems.append(f"tensor {name!r} of {path.name!r} has not the bytes of its shape.")
        else:
            found[name] = FileTensor(name, shape, dtype, path, begin + start)
    if problems:
        raise UserError(*problems)
    return found
