"""Speed of training steps on this machine, measured on random tokens before a run is planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Literal, NamedTuple

import torch

from trainer.lightning.optimizers import make_optimizer
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout


class Times(NamedTuple):
    """Seconds of forward and backward of one micro-batch, and of an update of the optimizer."""

    micro_batch: float
    update: float


def measure_step(
    config: ModelConfig,
    layout: Layout,
    shape: tuple[int, int],
    device: Literal["cpu", "cuda"],
    precision: str,
    seconds: float = 5.0,
) -> Times:
    """Measure training steps with AdamW of a model with random weights on micro-batches ``[B, T]``.

    ``config`` has a vocabulary. ``precision``: as ``trainer.precision``. ``seconds``: how long to
    measure after a first step, at least one micro-batch.

    Raises:
        torch.OutOfMemoryError: a step does not fit the GPU.
    """
    assert config.vocab_size is not None
    with torch.device("meta"):
        model = Decoder(config, layout)
    model.to_empty(device=device)
    model.compute_dtype = torch.bfloat16 if precision == "bf16" else None
    half = model.compute_dtype is not None
    model.use_backend(config.attention_backend, device, half=half, length=shape[1])
    with torch.no_grad(), torch.random.fork_rng():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        ids = torch.randint(config.vocab_size, shape, device=device)
    optimizer = make_optimizer(model)

    def micro_batch() -> None:
        model.loss(ids, ids).backward()

    micro_batch()
    timed(optimizer.step, device)  # makes the state
    optimizer.zero_grad()
    times: list[float] = []
    while sum(times) < seconds or not times:
        times.append(timed(micro_batch, device))
    return Times(median(times), timed(optimizer.step, device))


def timed(work: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, including the GPU work that it starts."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
