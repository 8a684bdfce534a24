"""Short runs whose losses are kept in tests/golden/losses.json: ``golden_runs.py DIRECTORY`` does
those of several processes, each of its ranks."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from tests.program import run_ranks
from tests.small_runs import SHAPE
from trainer.common.ranks import process_group
from trainer.data.corpus import prepare_corpus
from trainer.runs.directory import read_metrics
from trainer.runs.parsing import merged, parse
from trainer.training.fit import train

STEPS = 20
BASE = {
    "model": {
        **SHAPE,
        "initializer": "fan_in",
        "qk_norm": {"when": "after_drop"},
    },
    "data": {
        "source": "files",
        "sequence_length": 32,
        "needles": {"share": 0.5, "mentions": [2, 6]},
    },
    "tokenizer": {"vocab_size": 300},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "drop": {"at": 10, "effect_sequences": 4, "schedule": {"warmup_steps": 2}},
    "trainer": {
        "max_steps": STEPS,
        "batch_size": 4,
        "accelerator": "cpu",
        "threads": 1,
        "log_every": 1,
        "checkpoint_every": STEPS,
    },
}
BF16 = {"trainer": {"precision": "bf16"}}


def strategy(name, **more):
    return merged({"strategy": {"name": name}}, more)


ALONE = {
    "sdpa": {"model": {"attention_backend": "sdpa"}},
    "sdpa bf16": merged({"model": {"attention_backend": "sdpa"}}, BF16),
    "muon": {"optimizer": {"name": "muon"}},
    "compiled": {"trainer": {"compile": True}},
}
TOGETHER = {
    "ddp": strategy("ddp"),
    "ddp bf16": strategy("ddp", **BF16),
    "fsdp2": strategy("fsdp2"),
    "fsdp2 bf16": strategy("fsdp2", **BF16),
    "hsdp": strategy("hsdp", strategy={"shard_size": 1}),
}


def configs(directory, runs):
    """The configuration of each run, which lies in ``directory`` under its name."""
    files = {"data": {"files": [str(directory / "a.jsonl")], "cache_dir": str(directory / "cache")}}
    base = merged(BASE, files)
    return {
        name: parse(merged(base | {"run_dir": str(directory / name)}, changes))
        for name, changes in runs.items()
    }


def text_of(run):
    return prepare_corpus(run.config.data, run.config.tokenizer)


KEYS = ("loss", "gradient_norm")


def curves(directory):
    """Train all runs in an empty directory and return each one's losses and gradient norms.

    Compiled blocks are captured as graphs and run without generated code, which takes a minute.
    """
    texts = (f"Sentence {i} of a text that is {i * i} long. " for i in range(900))
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "a.jsonl").write_text("".join(lines))
    alone = configs(directory, ALONE)
    with patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        for run in alone.values():
            train(run, text_of(run))
    for rank in run_ranks(2, __file__, directory, cwd=directory):
        if rank.returncode:
            raise RuntimeError(rank.stderr[-8000:])
    return {
        name: {
            key: [row[key] for row in read_metrics(directory / name / "metrics.csv")]
            for key in KEYS
        }
        for name in (*ALONE, *TOGETHER)
    }


def main():
    torch.set_num_threads(1)
    with process_group("ddp"):
        for run in configs(Path(sys.argv[1]), TOGETHER).values():
            train(run, text_of(run))


if __name__ == "__main__":
    main()
