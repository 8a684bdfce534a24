"""A checkpoint's index as a stranger may have written it; see scripts/fuzz_checkpoints.py too."""

from __future__ import annotations

import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp

from trainer.errors import UserError
from trainer.runs.index import FILE, read_index


def test_an_index_of_dcp_is_read(tmp_path):
    dcp.save({"model.weight": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    assert read_index(tmp_path).state_dict_metadata["model.weight"].size == torch.Size([3, 2])


def test_a_number_takes_no_memory_for_all_below_it(tmp_path):
    keep = b"r" + struct.pack("<I", 1 << 27)  # LONG_BINPUT: 2 GiB in the interpreter's machine
    (tmp_path / FILE).write_bytes(b"\x80\x04N" + keep + b".")
    with pytest.raises(UserError, match=f"keeps its value number 0 as {1 << 27}"):
        read_index(tmp_path)
