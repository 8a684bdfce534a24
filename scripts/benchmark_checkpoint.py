#!/usr/bin/env python
"""Measure how long a checkpoint delays training, written asynchronously or within its step.

    python scripts/benchmark_checkpoint.py

A model of 135M parameters (SmolLM2's shape) on the CPU, 4 sequences of 512 tokens a step, AdamW:
weights and optimizer state are 1.6 GB. Both ways take turns in one run. A step's time starts at the
end of the step before and includes its checkpoint.
"""

from __future__ import annotations

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import logging
import tempfile
import time
from dataclasses import replace
from statistics import median
from typing import Any

import lightning as L
import torch
from benchmarks import table_of
from rich.console import Console

from trainer.commands.train import read_config
from trainer.data.corpus import prepare_corpus
from trainer.training.run import train


class Clock(L.Callback):
    """Callback that records when each step ended; must come after the callback that saves."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the duration of every step but the first."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama_135m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("trainer").setLevel(logging.ERROR)
    base = read_config(
        [
            f"model={options.model}",
            "model.vocab_size=49152",
            f"data.sequence_length={options.length}",
            f"trainer.batch_size={options.batch}",
            "trainer.max_steps=6",
            "trainer.checkpoint_every=3",
            "trainer.keep_checkpoints=1",
        ]
    )
    corpus = prepare_corpus(base.data, base.tokenizer)
    kinds = {"beside training": True, "at once": False}
    normal: list[float] = []
    saving: dict[str, list[float]] = {kind: [] for kind in kinds}
    after: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind, beside in kinds.items():
            with tempfile.TemporaryDirectory(prefix="unrope-benchmark-") as directory:
                config = replace(
                    base,
                    run_dir=directory,
                    trainer=replace(base.trainer, async_checkpoint=beside),
                )
                clock = Clock()
                train(config, corpus, callbacks=[clock])
                # Steps 2 to 6; the first warms up, the third saves, the last waits for the disk.
                second, third, fourth, fifth, _ = clock.seconds()
                normal += [second] if beside else [second, fourth, fifth]
                saving[kind].append(third)
                after[kind].append(fourth)
    usual = median(normal)
    table = table_of(
        f"{options.model}, {options.batch} x {options.length} tokens, {options.threads} threads: a "
        f"step takes {usual:.2f} s",
        *("checkpoint", "step that saves", "x a step", "step after it", "x a step"),
    )
    for kind in kinds:
        cells = []
        for times in (saving[kind], after[kind]):
            value = median(times)
            cells += [f"{value:.2f} s", f"{value / usual:.2f}"]
        table.add_row(kind, *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
