"""A checkpoint's index as a stranger may have written it; see scripts/fuzz_checkpoints.py too."""

from __future__ import annotations

import pickle
import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.common.errors import UserError
from trainer.runs.index import FILE, read_index


def test_an_index_of_dcp_is_read(tmp_path):
    dcp.save({"model.weight": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    assert read_index(tmp_path).state_dict_metadata["model.weight"].size == torch.Size([3, 2])


def test_a_number_takes_no_memory_for_all_below_it(tmp_path):
    keep = b"r" + struct.pack("<I", 1 << 27)  # LONG_BINPUT: 2 GiB in the interpreter's machine
    (tmp_path / FILE).write_bytes(b"\x80\x04N" + keep + b".")
    with pytest.raises(UserError, match=f"keeps its value number 0 as {1 << 27}"):
        read_index(tmp_path)


HALVES = [
    ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
    ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3])),
]
"""Of a tensor of four rows of three float32, in 48 bytes from the second of its file on."""


def written(directory, dtype=torch.float32, size=(4, 3), chunks=HALVES, places=None, **storage):
    """An index as DCP pickles it, with changes."""
    (directory / "file").write_bytes(bytes(49))
    about = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), list(chunks))
    stored = {"relative_path": "file", "offset": 1, "length": 24} | storage
    places = {
        MetadataIndex("a", chunk.offsets): _StorageInfo(**stored | {"offset": 1 + 24 * i})
        if "offset" not in storage
        else _StorageInfo(**stored)
        for i, chunk in enumerate(HALVES)
    } | (places or {})
    index = Metadata({"a": about}, storage_data=places)
    (directory / FILE).write_bytes(pickle.dumps(index))
    return directory


def test_what_an_index_says_is_read_to_the_last_number(tmp_path):
    index = read_index(written(tmp_path))
    about = index.state_dict_metadata["a"]
    assert (about.size, about.properties.dtype) == (torch.Size([4, 3]), torch.float32)
    assert about.chunks == HALVES
    for i, chunk in enumerate(HALVES):
        stored = index.storage_data[MetadataIndex("a", chunk.offsets)]
        assert (stored.relative_path, stored.offset, stored.length) == ("file", 1 + 24 * i, 24)


NO_SIZE = "it has a size that is not a whole number from 0."
NO_SHAPE = "it has an invalid tensor shape."
REFUSED = {
    "it names files elsewhere (../b).": {"relative_path": "../b"},
    "it names files elsewhere (..).": {"relative_path": ".."},
    "it names files elsewhere ().": {"relative_path": ""},
    "it does not say where 'a' is.": {
        "chunks": [
            ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 1])),
            ChunkStorageMetadata(torch.Size([0, 1]), torch.Size([4, 2])),
        ]
    },
    "'a' does not fit into 'file'.": {"length": 23},
    "'a' does not fit into 'file'. ": {"offset": 26},
    "'a' does not fit into 'file'.  ": {"dtype": torch.float64},
    "it does not hold the whole of 'a'.": {"chunks": HALVES[:1]},
    "a piece lies outside its tensor.": {"size": (3, 4)},
    "a piece lies outside its tensor. ": {"size": (4, 3, 1)},
    f"{NO_SIZE}": {"length": -1},
    f"{NO_SIZE} ": {"length": 1 << 62},
    f"{NO_SIZE}  ": {"offset": True},
    f"{NO_SHAPE}": {"size": (1,) * 9},
    "it has 'int' where 'str' belongs.": {"relative_path": 1},
    "'a' has no type.": {"dtype": None},
    "its tensors are packed in a way that is not written here.": {"transform_descriptors": ["zip"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_place_in_an_index_is_refused(tmp_path, message):
    with pytest.raises(UserError) as error:
        read_index(written(tmp_path, **REFUSED[message]))
    why = message.rstrip()
    assert str(error.value) == f"checkpoint: the index of {tmp_path.name!r} is refused: {why}"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": (4, 3), "dtype": torch.bfloat16},  # more bytes than are needed
        {"places": {MetadataIndex("b"): _StorageInfo("elsewhere", 0, (1 << 62) - 1)}},
        {"transform_descriptors": []},
    ],
)
def test_what_takes_nothing_is_let_through(tmp_path, changes):
    assert read_index(written(tmp_path, **changes)).state_dict_metadata.keys() == {"a"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(print), "builtins.print has no place in a checkpoint's index."),
        (pickle.dumps(Metadata), "it has 'type' where 'Metadata' belongs."),
        (pickle.dumps(torch.Size([1])), "it has 'Size' where 'Metadata' belongs."),
        (pickle.dumps({}), "it has 'dict' where 'Metadata' belongs."),
        (pickle.dumps(1.5), "the opcode BINFLOAT has no place in a checkpoint's index."),
        (pickle.dumps(Metadata({1: None})), "it has 'int' where 'str' belongs."),
        (pickle.dumps(Metadata([])), "it has 'list' where 'dict' belongs."),
        (b"", "it is damaged (pickle exhausted before seeing STOP)."),
    ],
)
def test_what_is_no_index_is_refused(tmp_path, content, message):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_index(tmp_path)
    assert str(error.value) == f"checkpoint: the index of {tmp_path.name!r} is refused: {message}"
    assert type(error.value) is UserError


def test_what_is_said_of_an_index_is_one_short_line(tmp_path):
    nameless = TensorStorageMetadata(TensorProperties(dtype=None), torch.Size([1]), [])
    for quoted in ("a\n" * 400, "\n"):
        (tmp_path / FILE).write_bytes(pickle.dumps(Metadata({quoted: nameless})))
        with pytest.raises(UserError) as error:
            read_index(tmp_path)
        begins = f"checkpoint: the index of {tmp_path.name!r} is refused: "
        why = str(error.value).removeprefix(begins)
        assert why == f"{quoted!r} has no type."[:300]


def test_numbers_that_are_kept_in_order_are_let_through(tmp_path):
    """``x`` is kept as 0, as old protocols write it, and 0 again."""
    program = b"\x80\x02X\x01\x00\x00\x00xq\x00q\x01."
    (tmp_path / FILE).write_bytes(program)
    with pytest.raises(UserError, match="it has 'str' where 'Metadata' belongs"):
        read_index(tmp_path)
    (tmp_path / FILE).write_bytes(program.replace(b"q\x01", b"q\x02"))
    with pytest.raises(UserError, match="it keeps its value number 1 as 2"):
        read_index(tmp_path)
