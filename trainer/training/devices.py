"""What a run computes on."""

from __future__ import annotations

import torch

from trainer.runs.config import RunConfig
from trainer.runs.ranks import share_of_cores


def device_problems(config: RunConfig) -> list[str]:
    """What this machine cannot do of what the configuration asks for, one sentence each."""
    from trainer.model.backend_choice import backend_problem

    gpu = torch.cuda.is_available()
    found = []
    if config.trainer.accelerator == "gpu" and not gpu:
        found.append("trainer.accelerator: 'gpu', but torch sees no GPU; choose 'auto' or 'cpu'.")
    uses_gpu = gpu and config.trainer.accelerator != "cpu"
    if uses_gpu and config.trainer.precision == "bf16" and not torch.cuda.is_bf16_supported(False):
        found.append(
            "trainer.precision: 'bf16' is not supported by this GPU "
            f"({torch.cuda.get_device_name()}); use 'fp32'."
        )
    if problem := backend_problem(config.model.attention_backend, "cuda" if uses_gpu else "cpu"):
        found.append(problem)
    return found


def set_threads(config: RunConfig) -> None:
    """Use ``trainer.threads`` CPU threads, or one for every core of this process's share of the
    machine; all ranks call it together."""
    torch.set_num_threads(config.trainer.threads or share_of_cores())
