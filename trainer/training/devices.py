"""Devices of a run, and the settings of torch, NCCL and OpenMP for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.common.errors import Problem
from trainer.common.words import counted
from trainer.cores import usual_threads
from trainer.model.backend_choice import backend_problem
from trainer.runs.config import RunConfig
from trainer.runs.phases import tokens_at
from trainer.runs.ranks import Ranks, device_type, share_of_cores

log = logging.getLogger(__name__)

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
RECORD_FILE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Variables that torch reads, by its present and its older names."""


OPERATIONS = 1e11
"""Of a core a second, where matrix products of float32 are quick."""

LONGEST_ON_CPU = 30 * 86400
"""Seconds of training that nobody means to start."""


def device_problems(config: RunConfig) -> list[Problem]:
    """What this machine cannot do of what the configuration asks for, one sentence each."""
    device, found = device_type(config), []
    if config.trainer.accelerator == "gpu" and device == "cpu":
        found.append(
            Problem("trainer.accelerator", "'gpu', but torch sees no GPU; choose 'auto' or 'cpu'.")
        )
    by_itself = device == "cpu" and config.trainer.accelerator == "auto"
    if by_itself and (seconds := cpu_seconds(config)) > LONGEST_ON_CPU:
        found.append(
            Problem(
                "trainer.accelerator",
                "torch sees no GPU, and on this machine's CPU the run would take about "
                f"{in_words(seconds)}; trainer.accelerator=cpu starts it all the same. "
                "+experiment=drope_demo and drope_smollm2_135m_local show a drop on a CPU.",
            )
        )
    half = config.trainer.precision == "bf16"
    if device == "cuda" and half and not torch.cuda.is_bf16_supported(False):
        found.append(
            Problem(
                "trainer.precision",
                f"'bf16' is not supported by this GPU ({torch.cuda.get_device_name()}); use "
                "'fp32'.",
            )
        )
    if problem := backend_problem(config.model.attention_backend, device):
        found.append(problem)
    return found


def cpu_seconds(config: RunConfig) -> float:
    """Estimate the seconds of training on this machine's cores: 6 operations per parameter and
    token (Kaplan et al. 2020)."""
    model = config.model
    vocabulary = model.vocab_size or config.tokenizer.vocab_size
    parameters = model.block_weights + vocabulary * model.hidden_size
    tokens = tokens_at(config, config.trainer.max_steps)
    return 6 * parameters * tokens / (OPERATIONS * (config.trainer.threads or usual_threads()))


def in_words(seconds: float) -> str:
    """Format a duration as ``9 hours``, ``41 days`` or ``11 years``."""
    units = {"year": 365 * 86400, "day": 86400, "hour": 3600, "minute": 60, "second": 1}
    unit, size = next((u, n) for u, n in units.items() if seconds >= 2 * n or n == 1)
    return counted(round(seconds / size), unit)


def set_threads(config: RunConfig, ranks: Ranks) -> None:
    """Set the number of CPU threads to ``trainer.threads`` or the default.

    With several ranks, and when compiling, the default is one per core of this process's share of
    the machine. All ranks call this together.
    """
    given, share = config.trainer.threads, share_of_cores()
    # torchrun sets OMP_NUM_THREADS=1 on all ranks unless it is set.
    torch.set_num_threads(given or (share if ranks.world_size > 1 else usual_threads()))
    if config.trainer.compile and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config as inductor  # after the environment is set

        # The default is one worker per core of the node, up to 32, on every rank.
        inductor.compile_threads = min(given or share, 32)


def set_environment(config: RunConfig) -> None:
    """Set the environment that torch, cuBLAS and NCCL read when first used; the user's settings
    stay."""
    if device_type(config) == "cpu":
        return
    _set("expandable_segments:True", *ALLOCATOR)
    if config.trainer.deterministic:
        _set(":4096:8", "CUBLAS_WORKSPACE_CONFIG")
    if config.strategy.name != "single":
        _set("2000", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
        _set("1", "TORCH_NCCL_DUMP_ON_TIMEOUT")
        _set(f"{Path(config.run_dir).absolute()}/flight_recorder/rank_", *RECORD_FILE)


def _set(value: str, *names: str) -> None:
    """Set the first of an environment variable's names, unless one of them is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value


def _value(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if name in os.environ), None)


def open_gpus(config: RunConfig, ranks: Ranks) -> None:
    """Log the GPU settings and create the directory of NCCL's flight recorder.

    Without GPUs, log the estimated duration of a long training.
    """
    if device_type(config) == "cpu":
        if (seconds := cpu_seconds(config)) > 3600:
            log.info("On this machine's CPU about %s", in_words(seconds))
        return
    said = [
        f"{ranks.world_size} x {torch.cuda.get_device_name()}",
        f"TF32 {'on' if config.trainer.tf32 else 'off'}",
        f"{ALLOCATOR[0]}={_value(ALLOCATOR)}",
    ]
    if config.strategy.name != "single" and (files := _value(RECORD_FILE)):
        Path(files).parent.mkdir(parents=True, exist_ok=True)
        said.append(f"NCCL's flight recorder writes to {files}*")
    log.info("%s", ", ".join(said))


@contextmanager
def numerics(config: RunConfig) -> Iterator[None]:
    """Apply ``trainer.tf32`` and ``trainer.deterministic`` within the block."""
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic  # attributes are created at run time
    filled = memory.fill_uninitialized_memory
    try:
        # torch recommends torch.backends.cuda.matmul.fp32_precision. Lightning reads the older
        # setting,
        # and torch raises if both are used.
        if device_type(config) == "cuda":
            torch.set_float32_matmul_precision("high" if config.trainer.tf32 else "highest")
        if config.trainer.deterministic:
            torch.use_deterministic_algorithms(True)
            # Filling new memory first costs an eighth of a step; nothing reads it unwritten.
            memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if config.trainer.deterministic:
            torch.use_deterministic_algorithms(deterministic)
            memory.fill_uninitialized_memory = filled
