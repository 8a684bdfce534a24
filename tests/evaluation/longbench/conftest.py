"""A tokenizer of bytes, so that tokens can be counted by hand, and files of questions."""

from __future__ import annotations

import json

import pytest

from trainer.data.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer():
    return train_tokenizer([], 257, [])


@pytest.fixture
def write_rows(tmp_path):
    """A function that writes ``TASK.jsonl`` with rows that differ from a complete one as told."""

    def write(task, *rows, directory=tmp_path):
        complete = {
            "input": "Who?",
            "context": "Alice sat there.",
            "answers": ["Alice"],
            "length": 3,
            "dataset": task,
            "language": "en",
            "all_classes": None,
            "_id": "0f",
        }
        lines = [json.dumps(complete | row, ensure_ascii=False) for row in rows]
        file = directory / f"{task}.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    return write
