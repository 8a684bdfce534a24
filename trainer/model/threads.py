"""Independent forward passes at the same time, each on a CPU core of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

P = TypeVar("P")
R = TypeVar("R")


def side_by_side(read: Callable[[P], R], parts: Sequence[P], workers: int) -> list[R]:
    """Return ``read(part)`` of all parts without gradients, with more than one worker in threads.

    Each computes with one thread. Threads that share a forward pass wait for each other after every
    operation, which takes longer than small operations and far longer beside other programs.
    """
    read = torch.no_grad()(read)
    # Threads have modes of their own.
    if workers == 1 or torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu"):
        return [read(part) for part in parts]
    threads = torch.get_num_threads()
    alone = torch.set_num_threads, (1,)
    try:
        with ThreadPoolExecutor(workers, "forward", *alone) as pool:
            return list(pool.map(read, parts))
    finally:
        # The threads of the pool have changed the number of all threads that start later.
        torch.set_num_threads(threads)
