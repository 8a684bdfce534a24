#!/usr/bin/env python
"""Measure how much writing a checkpoint slows down a thread that launches kernels.

    python scripts/benchmark_launches.py

A GPU waits for the Python thread that launches its kernels. The thread that writes a checkpoint
shares the interpreter, so launches wait while it holds the interpreter's lock. Tiny operations on
the CPU stand for launches: each releases the lock and takes it again, as a launch does. They are
measured alone, next to a thread that writes tensors of ``--gigabytes`` as a run does (torch's
format, fsync, hashes, rename), and next to a process that writes them, which shares cores and disk
but no interpreter. The three take turns in one run.
"""

from __future__ import annotations

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from benchmarks import table_of
from rich.console import Console

from trainer.runs.checkpoints import digests, write_manifest_and_rename
from trainer.runs.state import Tensors, save

WAYS = ("nothing", "a thread", "a process")


def tensors_of(gigabytes: float) -> Tensors:
    """Make a large matrix and many smaller ones, like the weights and moments of a model."""
    shapes = [(49152, 576), *[(576, 1536), (576, 576)] * 90]
    tensors: Tensors = {}
    while sum(t.nbytes for t in tensors.values()) < gigabytes * 1e9:
        shape = shapes[len(tensors) % len(shapes)]
        tensors[f"model.{len(tensors)}"] = torch.randn(shape)
    return tensors


def write(tensors: Tensors, directory: Path) -> None:
    """Write a checkpoint as a run's thread does."""
    partial = directory / ".step-000001.partial"
    save(tensors, partial, None)
    write_manifest_and_rename(
        partial, directory / "step-000001", digests(partial) | digests(partial, ".metadata")
    )


def launch_while(busy: Callable[[], bool], least: float) -> tuple[float, float, float]:
    """Launch until ``busy`` returns false, for at least ``least`` seconds.

    Returns:
        Launches per second; the share of the time in which this thread was blocked, so neither
        computing nor waiting for a free core; the longest pause, in seconds.
    """
    x, count, longest = torch.zeros(1), 0, 0.0
    began = last = time.perf_counter()
    before = scheduled()
    while last - began < least or busy():
        for _ in range(20):
            x.add_(1)
        count += 20
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    took = last - began
    return count / took, max(1 - (scheduled() - before) / took, 0.0), longest


def scheduled() -> float:
    """Return the seconds in which this thread ran or waited for a free core (Linux)."""
    ran, waited, _ = (
        Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    )
    return (int(ran) + int(waited)) / 1e9


def measure(way: str, tensors: Tensors, seconds: float) -> tuple[float, float, float, float]:
    """Return the figures of :func:`launch_while`, and the seconds that writing took."""
    with tempfile.TemporaryDirectory(prefix="unrope-benchmark-") as directory:
        arguments = tensors, Path(directory)
        if way == "nothing":
            return *launch_while(lambda: False, seconds), 0.0
        kind = (
            multiprocessing.get_context("fork").Process if way == "a process" else threading.Thread
        )
        worker = kind(target=write, args=arguments)
        worker.start()
        began = time.perf_counter()
        figures = launch_while(worker.is_alive, 0.0)
        return *figures, time.perf_counter() - began


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors = tensors_of(options.gigabytes)
    measurements: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            measurements[way].append(measure(way, tensors, 3.0))
    table = table_of(
        f"{options.gigabytes} GB, medians of {options.repeats}",
        *("written by", "launches per second", "x nothing", "blocked", "a checkpoint"),
        *("longest pause", "written in"),
    )
    usual = median(rate for rate, *_ in measurements["nothing"])
    for way in WAYS:
        rate, blocked, longest, took = (
            median(values) for values in zip(*measurements[way], strict=True)
        )
        table.add_row(
            way,
            f"{rate:,.0f}",
            f"{rate / usual:.2f}",
            f"{blocked:.1%}",
            f"{blocked * took:.2f} s" if took else "",
            f"{longest * 1000:.0f} ms",
            f"{took:.1f} s" if took else "",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
