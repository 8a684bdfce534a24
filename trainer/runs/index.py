"""Safe reader of DCP's index of tensors (``.metadata``).

The file is a pickle, that is, a program for a small virtual machine, and may come from a stranger.
Here it may name only the classes that an index consists of, and gets stand-ins instead of them. The
index is rebuilt from these stand-ins, with the type and range of each value checked.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.common.errors import UserError, is_transient
from trainer.common.formats import read_content

FILE = ".metadata"
LARGEST = 1 << 30
"""Bytes of an index; a thousand tensors on a thousand ranks need a fifth of them."""
MOST_DIMENSIONS = 8
LONGEST_REASON = 300
"""Characters of an error message, which may quote the index."""

_METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = frozenset(
    {
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
"""Classes that an index may name besides torch's dtypes: exact pairs of module and name. No name
has a dot: pickle would resolve it through the imports of a module."""
DTYPES = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
}
"""Opcodes that DCP's writer uses, in any of pickle's protocols from 2. Other opcodes allocate
memory before they read, or are known to fail within the interpreter."""

T = TypeVar("T")


def read_index(directory: Path) -> Metadata:
    """Read the index of a checkpoint without running its code; all files must be in ``directory``.

    Raises:
        UserError: the index is damaged or contains foreign objects.
    """
    try:
        data = read_content(directory / FILE, LARGEST)
        _check_program(data)
        return _metadata(_Unpickler(io.BytesIO(data)).load(), directory)
    except Exception as error:  # a damaged pickle may raise anything
        reason = str(error) if isinstance(error, Refused) else f"it is damaged ({error})."
        line = "".join(c if c.isprintable() else "?" for c in reason[:LONGEST_REASON])
        message = f"the index of {directory.name!r} is refused: {line}"
        raise UserError.at("checkpoint", message, transient=is_transient(error)) from error


def _check_program(data: bytes) -> None:
    stored = 0
    for opcode, place, _ in pickletools.genops(data):
        if opcode.name not in OPCODES:
            raise Refused(f"the opcode {opcode.name} has no place in a checkpoint's index.")
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            # Memo entries are numbered consecutively; a huge number would allocate memory up to it.
            if place is None or place > stored:
                raise Refused(f"it keeps its value number {stored} as {place}.")
            stored += 1


class Refused(pickle.UnpicklingError):
    """An index contains an object that is not allowed."""


class StandIn:
    """Stand-in for an object of an allowed class: its arguments and state."""

    def __new__(cls, *args: Any) -> StandIn:
        """Create the object as pickle does."""
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        """Set the state as pickle does."""
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler with new stand-in classes for each reading, so that a pickle cannot modify shared
    ones."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes = {pair: type(pair[1], (StandIn,), {}) for pair in CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in DTYPES:
            return DTYPES[module, name]
        if (module, name) not in CLASSES:
            raise Refused(f"{module}.{name} has no place in a checkpoint's index.")
        return self._classes[module, name]


def _metadata(loaded: Any, directory: Path) -> Metadata:
    state = _state(loaded, "Metadata")
    tensors = {
        _typed(str, key): _tensor(about, key)
        for key, about in _typed(dict, state.get("state_dict_metadata")).items()
    }
    storage = dict(map(_stored, _typed(dict, state.get("storage_data")).items()))
    if outside := sorted(filter(_is_elsewhere, {s.relative_path for s in storage.values()})):
        raise Refused(f"it names files elsewhere ({', '.join(outside)}).")
    _check_places(tensors, storage, directory)
    return Metadata({**tensors}, storage_data=storage, storage_meta=StorageMeta())


def _is_elsewhere(name: str) -> bool:
    return name != Path(name).name or name in ("", "..")


def _check_places(
    tensors: Mapping[str, TensorStorageMetadata],
    storage: Mapping[MetadataIndex, _StorageInfo],
    directory: Path,
) -> None:
    """Check that each piece of each tensor lies within its file and has enough bytes."""
    sizes: dict[str, int] = {}
    for key, about in tensors.items():
        for chunk in about.chunks:
            if (stored := storage.get(MetadataIndex(key, chunk.offsets))) is None:
                raise Refused(f"it does not say where {key!r} is.")
            name = stored.relative_path
            if name not in sizes:
                sizes[name] = (directory / name).stat().st_size
            needed = math.prod(chunk.sizes) * about.properties.dtype.itemsize
            if stored.length < needed or stored.offset + stored.length > sizes[name]:
                raise Refused(f"{key!r} does not fit into {name!r}.")


def _tensor(loaded: Any, key: str) -> TensorStorageMetadata:
    state = _state(loaded, "TensorStorageMetadata")
    dtype = _typed(tuple, _state(state.get("properties"), "TensorProperties", tuple))[0]
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"{key!r} has no type.")
    size = _size(state.get("size"))
    chunks = [_chunk(chunk, size) for chunk in _typed(list, state.get("chunks"))]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise Refused(f"it does not hold the whole of {key!r}.")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _chunk(loaded: Any, whole: torch.Size) -> ChunkStorageMetadata:
    state = _state(loaded, "ChunkStorageMetadata")
    offsets, sizes = _size(state.get("offsets")), _size(state.get("sizes"))
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    if len(ends) != len(whole) or any(end > size for end, size in zip(ends, whole, strict=True)):
        raise Refused("a piece lies outside its tensor.")
    return ChunkStorageMetadata(offsets, sizes)


def _stored(item: tuple[Any, Any]) -> tuple[MetadataIndex, _StorageInfo]:
    place, about = _state(item[0], "MetadataIndex"), _state(item[1], "_StorageInfo")
    if about.get("transform_descriptors"):
        raise Refused("its tensors are packed in a way that is not written here.")
    offset = place.get("offset")
    return (
        MetadataIndex(_typed(str, place.get("fqn")), None if offset is None else _size(offset)),
        _StorageInfo(
            _typed(str, about.get("relative_path")),
            _count(about.get("offset")),
            _count(about.get("length")),
        ),
    )


def _state(loaded: Any, name: str, kind: type[Any] = dict) -> Any:
    if not isinstance(loaded, StandIn) or type(loaded).__name__ != name:
        raise Refused(f"it has {type(loaded).__name__!r} where {name!r} belongs.")
    return _typed(kind, loaded.state)


def _size(loaded: Any) -> torch.Size:
    if not isinstance(loaded, StandIn) or type(loaded).__name__ != "Size" or len(loaded.args) != 1:
        raise Refused("it has an invalid tensor shape.")
    numbers = loaded.args[0]
    if not isinstance(numbers, list | tuple) or len(numbers) > MOST_DIMENSIONS:
        raise Refused("it has an invalid tensor shape.")
    return torch.Size([_count(number) for number in numbers])


def _count(loaded: Any) -> int:
    if type(loaded) is not int or not 0 <= loaded < 1 << 62:
        raise Refused("it has a size that is not a whole number from 0.")
    return loaded


def _typed(kind: type[T], loaded: Any) -> T:
    if type(loaded) is not kind:
        raise Refused(f"it has {type(loaded).__name__!r} where {kind.__name__!r} belongs.")
    return loaded
