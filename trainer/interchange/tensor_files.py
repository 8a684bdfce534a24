"""Tensors in safetensors files: found by their headers, read in slices.

The ``safetensors`` library checks every header against the size of its file, and maps files into
memory. Mapped pages count as memory once they were touched, so a file is opened anew for every
slice: otherwise a model would need its size twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.common.errors import Problem, UserError, collecting, raise_all
from trainer.common.formats import read_plain

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
"""Types that weights may have, as headers call them."""
PIECE = 1 << 22
"""Elements that are read at a time."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor in a safetensors file, under its name there."""

    name: str
    shape: tuple[int, ...]
    path: Path

    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (of this shape), converting to its type.

        Raises:
            UserError: the file was damaged or removed since its header was read.
        """
        if out.numel() <= PIECE:
            with _opened(self.path) as file:
                out.detach().copy_(file.get_tensor(self.name))
            return
        rows = max(1, PIECE * len(out) // out.numel())
        for index, part in enumerate(out.detach().split(rows)):
            with _opened(self.path) as file:
                part.copy_(file.get_slice(self.name)[index * rows : (index + 1) * rows])

    def equals(self, other: FileTensor) -> bool:
        """Whether both have the same type, the same shape and the same bytes."""
        with _opened(self.path) as ours, _opened(other.path) as theirs:
            a, b = ours.get_tensor(self.name), theirs.get_tensor(other.name)
            return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bytes(a), _bytes(b))


def read_headers(directory: Path) -> dict[str, FileTensor]:
    """Return every tensor of the model in ``directory``, sharded or not, by its name there.

    Raises:
        UserError: no safetensors file, missing or damaged ones; every problem is named.
    """
    headers: dict[str, FileTensor] = {}
    problems: list[Problem] = []
    for path in _weight_files(directory):
        with collecting(problems):
            headers |= _read_header(path)
    raise_all(problems)
    return headers


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file that others may read: the library restricts it to its owner."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def weights_problem(directory: Path) -> str | None:
    """Why there are no complete weights in ``directory``, or None."""
    try:
        missing = [path.name for path in _weight_files(directory) if not path.is_file()]
    except UserError as error:
        return str(error)
    return f"{missing[0]!r} is missing" if missing else None


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return _shards(directory)
    if any(directory.glob("pytorch_model*.bin")):
        raise UserError.at(
            "",
            "the weights are a pytorch_model.bin, which can run code as it is read; convert them "
            "to safetensors.",
        )
    raise UserError.at("", f"there is no {SINGLE!r} in {str(directory)!r}.")


def _shards(directory: Path) -> list[Path]:
    try:
        index = read_plain(directory / INDEX)
        names = sorted(set(index["weight_map"].values()))
        elsewhere = [name for name in names if name in ("", "..") or name != Path(name).name]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError.at(
            "",
            f"{INDEX!r} is damaged: its 'weight_map' should name the file of every tensor "
            f"({error!r}).",
        ) from error
    if elsewhere:
        raise UserError.at(
            "",
            f"{INDEX!r} names files outside its directory: {', '.join(map(repr, elsewhere))}; "
            "expected names of files beside it.",
        )
    return [directory / name for name in names]


def _read_header(path: Path) -> dict[str, FileTensor]:
    if not path.is_file():
        raise UserError.at("", f"the file {path.name!r} that the index names is missing.")
    with _opened(path) as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        dtypes = {name: header.get_dtype() for name, header in headers.items()}
        shapes = {name: tuple(header.get_shape()) for name, header in headers.items()}
    if problems := [
        Problem("", f"tensor {name!r} has the type {dtype}; expected {', '.join(DTYPES)}.")
        for name, dtype in dtypes.items()
        if dtype not in DTYPES
    ]:
        raise UserError(*problems)
    return {name: FileTensor(name, shape, path) for name, shape in shapes.items()}


def _opened(path: Path) -> Any:
    """Open the file as a context manager; it is mapped into memory."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError.at(
            "", f"{path.name!r} is truncated, damaged or no safetensors file ({error})."
        ) from error


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
