#!/usr/bin/env python
"""Measure time and memory of the held-out loss of very long windows.

    python scripts/benchmark_perplexity.py --lengths 32768 65536

A model of the shape model=nano with random weights and a training length of 256 tokens reads one
window of every length: with RoPE, without any encoding, and with RoPE cropped to the training
length. Each measurement runs in a new process, one after the other. Memory is the growth of the
peak resident set while the window is read. glibc may retain freed blocks of less than 32 MiB, which
varies from run to run and can be several times the memory in use; set
MALLOC_MMAP_THRESHOLD_=1048576 to have them released.
"""

from __future__ import annotations

from trainer.common import spinning  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch
from benchmarks import random_decoder
from rich.console import Console
from rich.table import Table

from trainer.commands import compose_words, run_of
from trainer.evaluation.perplexity import token_losses

VOCABULARY = 4096
TRAINED = 256
CASES = {"RoPE": ("rope", None), "NoPE": ("nope", None), "RoPE, cropped": ("rope", TRAINED)}


def peak() -> float:
    """Return the largest resident set so far, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(case: str, length: int, threads: int) -> dict[str, float]:
    """Return the seconds and MiB that one window takes."""
    torch.set_num_threads(threads)
    encoding, reads = CASES[case]
    config = replace(run_of(compose_words(["model=nano"])).config.model, vocab_size=VOCABULARY)
    model = random_decoder(config, TRAINED, encoding).eval()
    windows = np.random.default_rng(0).integers(0, VOCABULARY, (1, length))
    token_losses(model, windows[:, :TRAINED], 0, 16384)  # warm-up
    before = peak()
    start = time.perf_counter()
    token_losses(model, windows, 0, 16384, reads=reads)
    return {"seconds": time.perf_counter() - start, "MiB": peak() - before}


def main() -> None:
    """Run every case in a new process and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", nargs=2, metavar=("CASE", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.alone[0], int(args.alone[1]), args.threads)))
        return
    table = Table("model", *(f"{length:,} tokens" for length in args.lengths))
    for case in args.models:
        cells = []
        for length in args.lengths:
            words = ["--alone", case, str(length), "--threads", str(args.threads)]
            completed = subprocess.run(
                [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE
            )
            result = json.loads(completed.stdout)
            cells.append(f"{result['seconds']:.1f} s, {result['MiB']:,.0f} MiB")
        table.add_row(case, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
