"""Preparation of all texts of a run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.data.conftest import write_texts
from trainer.config import RunConfig
from trainer.runs.parsing import parse
from trainer.workflows.prepare import prepare_texts


def test_all_texts_of_a_mixture_have_the_tokenizer_of_the_first(tmp_path):
    write_texts(tmp_path / "texts")
    mixture = {name: {"files": [str(tmp_path / "texts" / f"{name}.jsonl")]} for name in "01"}
    data = {"source": "files", "mixture": mixture, "cache_dir": str(tmp_path / "cache")}
    config = parse(RunConfig, {"data": data, "tokenizer": {"vocab_size": 300}})
    first, second = lines = list(prepare_texts(config))
    for line in lines:
        assert re.fullmatch(r".*jsonl: 40 documents, tokens train [\d,]+, val.*, test .*", line)
    places = [Path(line.rpartition(" in ")[2]) / "tokenizer.json" for line in (first, second)]
    assert places[0].read_text() == places[1].read_text()
    assert list(prepare_texts(config)) == lines
