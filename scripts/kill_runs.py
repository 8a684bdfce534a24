#!/usr/bin/env python
"""Kill a run repeatedly at random moments and compare it with an uninterrupted one.

    python scripts/kill_runs.py --kills 30 --steps 200

The run is a small copy of an experiment that drops its encoding halfway. Every third kill waits
until a checkpoint is being written. Each process writes a hash of the tokens of every step: no
sample may be lost, repeated or out of order. Final metrics and weights must be bitwise equal.
"""

from __future__ import annotations

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import hashlib
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from trainer.commands.train import read_config
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.runs.checkpoints import regular_checkpoints, step_of
from trainer.runs.config import RunConfig
from trainer.runs.metrics_file import read_metrics
from trainer.training.run import train
from trainer.workflows.drill import first_difference, shrink


class Notes(L.Callback):
    """Callback that writes a line for every step: its number and a hash of its tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = hashlib.sha256()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: dict[str, torch.Tensor], i: int
    ) -> None:
        """Add the micro-batch; write at the end of the step."""
        self.digest.update(batch["input_ids"].numpy().tobytes())
        if (i + 1) % trainer.accumulate_grad_batches == 0:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step} {self.digest.hexdigest()}\n")
            self.digest = hashlib.sha256()


def small_run(steps: int, directory: Path) -> RunConfig:
    """Return the configuration of the run to kill."""
    config = shrink(read_config(["+experiment=drope_demo"]), directory)
    return replace(
        config,
        drop=replace(config.drop, at=steps // 2),
        trainer=replace(config.trainer, max_steps=steps, checkpoint_every=5),
    )


def start(config: RunConfig, corpus: Corpus, notes: Path) -> Any:
    """Start training in a new process."""

    def run() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        train(config, corpus, callbacks=[Notes(notes)])

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def wait_for_saving(process: Any, directory: Path) -> bool:
    """Wait until a checkpoint is being written; return false if the run ended first."""
    while process.is_alive():
        if any(directory.glob("checkpoints/.*.partial")):
            return True
        time.sleep(0.0005)
    return False


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    checkpoints = regular_checkpoints(run_dir / "checkpoints")
    return step_of(checkpoints[-1]) if checkpoints else 0


def kill(
    process: Any, config: RunConfig, target: int, wait: float, saving: bool
) -> list[str] | None:
    """Kill a process ``wait`` seconds after it logged step ``target``.

    With ``saving``, kill it ``wait`` seconds after it then began to write a checkpoint.

    Returns:
        Cells of the table: last step, whether a checkpoint was half written, and the step of the
        newest checkpoint; None if the run ended before.
    """
    run_dir = Path(config.run_dir)
    while process.is_alive():
        rows = read_metrics(run_dir / "metrics.csv")
        if rows and rows[-1]["step"] >= target:
            break
        time.sleep(0.002)
    if saving and not wait_for_saving(process, run_dir):
        return None
    time.sleep(wait)
    if not process.is_alive():
        return None
    process.kill()
    process.join()
    rows = read_metrics(run_dir / "metrics.csv")
    half = any(run_dir.glob("checkpoints/.*.partial"))
    return [
        str(rows[-1]["step"] if rows else 0),
        "yes" if half else "",
        str(newest_step(run_dir)),
    ]


def samples(notes: Path) -> dict[int, set[str]]:
    """Return each step's hashes from all processes that trained it."""
    hashes: dict[int, set[str]] = {}
    for line in notes.read_text().splitlines():
        step, digest = line.split()
        hashes.setdefault(int(step), set()).add(digest)
    return hashes


def main() -> None:
    """Kill, compare, and print the table; exit 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trainer").setLevel(logging.ERROR)
    chance, console = random.Random(options.seed), Console(width=100)
    table = Table("kill", "at step", "while saving", "resumes from", width=60)
    with tempfile.TemporaryDirectory(prefix="unrope-kills-") as name:
        directory = Path(name)
        whole = small_run(options.steps, directory / "whole")
        broken = replace(whole, run_dir=str(directory / "broken"))
        corpus = prepare_corpus(whole.data, whole.tokenizer)
        start(whole, corpus, directory / "whole.txt").join()
        done = 0
        while done < options.kills:
            process = start(broken, corpus, directory / "broken.txt")
            # Few enough steps that the run is not over before the last kill.
            far = chance.randint(1, max(min(11, 2 * options.steps // options.kills - 2), 1))
            saving = done % 3 == 2
            wait = chance.random() * (0.01 if saving else 0.1)
            cells = kill(process, broken, newest_step(directory / "broken") + far, wait, saving)
            if cells is None:
                break
            done += 1
            table.add_row(str(done), *cells)
            print(f"kill {done} of {options.kills} at step {cells[0]}", file=sys.stderr)
        start(broken, corpus, directory / "broken.txt").join()
        console.print(table)
        difference = first_difference(whole, broken, exactly=True)
        if samples(directory / "whole.txt") != samples(directory / "broken.txt"):
            difference = difference or "samples were lost, repeated or out of order"
    console.print(
        f"{done} kills in a run of {options.steps} steps: "
        + (difference or "every sample once and in order, metrics and weights bitwise equal")
    )
    if difference or done < options.kills:
        sys.exit(1)


if __name__ == "__main__":
    main()
