"""Small texts in files, and held-out text of tokens in memory."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trainer.config import DataConfig
from trainer.data.corpus import HeldOutText


def write_texts(directory, files=3, documents=40, start=0):
    """``files`` files of JSON lines with so many documents of different lengths each."""
    directory.mkdir(parents=True, exist_ok=True)
    number = start
    for index in range(files):
        lines = []
        for _ in range(documents):
            words = f"Document {number} says something. " * (1 + number % 7)
            lines.append(json.dumps({"text": words}) + "\n")
            number += 1
        (directory / f"{index}.jsonl").write_text("".join(lines))


def held_out(*ids, weights=None):
    """Held-out text of parts with these tokens; by default of equal weights."""
    return HeldOutText(
        tuple(
            (weight, np.asarray(tokens))
            for weight, tokens in zip(weights or [1.0] * len(ids), ids, strict=True)
        )
    )


@pytest.fixture
def config(tmp_path):
    """Three files of forty documents, with shares that leave text everywhere."""
    write_texts(tmp_path / "texts")
    return DataConfig(
        source="files",
        files=[str(tmp_path / "texts")],
        sequence_length=16,
        validation=0.1,
        test=0.2,
        cache_dir=str(tmp_path / "cache"),
    )
