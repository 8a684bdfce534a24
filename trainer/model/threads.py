"""Independent forward passes at the same time, each on a CPU core of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

P = TypeVar("P")
R = TypeVar("R")


def side_by_side(read: Callable[[P], R], parts: Sequence[P], workers: int) -> list[R]:
    """Return ``read(part)`` of all parts, with more than one worker in threads without gradients.

    Each computes with one thread. Threads that share a forward pass wait for each other after every
    operation, which takes longer than small operations and far longer beside other programs.
    """
    if workers == 1:
        return [read(part) for part in parts]
    threads = torch.get_num_threads()
    alone = torch.set_num_threads, (1,)
    with ThreadPoolExecutor(workers, "forward", *alone) as pool:
        try:
            return list(pool.map(torch.no_grad()(read), parts))
        finally:
            torch.set_num_threads(threads)  # the number of threads that start later
