#!/usr/bin/env python
"""Measure how much writing a checkpoint slows down a thread that launches kernels.

    python scripts/benchmark_launches.py

A GPU waits for the Python thread that launches its kernels, and the thread that writes a
checkpoint has the same interpreter: whatever holds the interpreter's lock there keeps the launches
waiting. Here tiny operations on the CPU stand for launches, each of which gives the lock away and
takes it back, as a launch does. Beside them nothing happens, or tensors of the given size are
written as a run writes them (torch's format, synchronised, hashed, published): by a thread, and by
a process, which shares cores and disk but no interpreter. The ways take turns in one run.
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
from rich.console import Console
from rich.table import Table

from trainer.runs.checkpoint_files import digests, publish
from trainer.runs.state import Tensors, save

WAYS = ("nothing", "a thread", "a process")


def tensors_of(gigabytes: float) -> Tensors:
    """Make a large matrix and many smaller ones, like the weights and moments of a model."""
    shapes = [(49152, 576), *[(576, 1536), (576, 576)] * 90]
    found: Tensors = {}
    while sum(t.nbytes for t in found.values()) < gigabytes * 1e9:
        shape = shapes[len(found) % len(shapes)]
        found[f"model.{len(found)}"] = torch.randn(shape)
    return found


def write(tensors: Tensors, directory: Path) -> None:
    """Write a checkpoint as a run's thread does."""
    partial = directory / ".step-000001.partial"
    save(tensors, partial, None)
    publish(partial, directory / "step-000001", digests(partial) | digests(partial, ".metadata"))


def launch_while(busy: Callable[[], bool], least: float) -> tuple[float, float, float]:
    """Launches until nothing is ``busy`` any more, and for ``least`` seconds.

    Returns:
        Launches a second; the share of the time in which this thread was blocked, neither computing
        nor waiting for a core that others have; the longest pause in seconds.
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
    """Seconds in which this thread has run, or would have if it had been given a core (Linux)."""
    ran, waited, _ = (
        Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    )
    return (int(ran) + int(waited)) / 1e9


def measure(way: str, tensors: Tensors, seconds: float) -> tuple[float, float, float, float]:
    """Return what :func:`launch_while` returns, and the seconds of writing."""
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
        found = launch_while(worker.is_alive, 0.0)
        return *found, time.perf_counter() - began


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors = tensors_of(options.gigabytes)
    found: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            found[way].append(measure(way, tensors, 3.0))
    table = Table(title=f"{options.gigabytes} GB, medians of {options.repeats}", width=100)
    columns = (
        "beside it",
        "launches a second",
        "x nothing",
        "blocked",
        "a checkpoint",
        "longest pause",
        "written in",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    usual = median(rate for rate, *_ in found["nothing"])
    for way in WAYS:
        rate, blocked, longest, took = (median(values) for values in zip(*found[way], strict=True))
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
