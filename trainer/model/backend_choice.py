"""Which backend computes attention: what is asked for, or what suits device, masks and type."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from trainer.common.errors import Problem, UserError
from trainer.model.config import SoftmaxConfig

OTHER_FLASH = ("flash-attn-3", "flash_attn_3", "flash-attn-4")
"""Packages of later generations, whose functions have other names and other arguments."""

LARGEST_HEAD = 256
"""Channels of a head that flash-attention's kernels take."""


class Choice(NamedTuple):
    """The ``name`` of a backend, and why it was chosen."""

    name: str
    why: str


class Needs(NamedTuple):
    """What attention of a model has to do.

    ``documents``: batches carry document masks. ``windows``: a layer has a window. ``biased``: a
    layer has ALiBi. ``half``: queries and keys are of 16 bits. ``many_lengths``: sequences of many
    lengths, as an evaluation has. ``head_size``: D. ``softmax``: of a model.
    """

    documents: bool = False
    windows: bool = False
    biased: bool = False
    half: bool = True
    many_lengths: bool = False
    head_size: int = 64
    softmax: SoftmaxConfig = SoftmaxConfig()


def backend_problem(name: str, accelerator: str) -> Problem | None:
    """Why a backend cannot run on ``accelerator`` ("cpu", "cuda"), or None.

    A backend that is asked for and missing is an error, never replaced in silence.
    """
    if name == "flash" and (problem := flash_problem()) is not None:
        return Problem(
            "model.attention_backend",
            f"'flash' needs the package flash-attn, which {problem}; pip install "
            "'unrope[flash]', or choose 'auto' or 'sdpa'.",
        )
    if name == "varlen" and not has_varlen():
        return Problem(
            "model.attention_backend",
            "'varlen' needs a newer torch, whose varlen_attn knows windows and shared keys; "
            "choose 'auto' or 'flex'.",
        )
    if name in ("flash", "varlen", "flex") and accelerator != "cuda":
        return Problem(
            "model.attention_backend",
            f"{name!r} needs a GPU, but this run is on the CPU; choose 'auto' or 'sdpa'.",
        )
    return None


def flash_problem() -> str | None:
    """What is wrong with the package flash-attn, generation 2, or None."""
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        others = [name for name in OTHER_FLASH if _is_installed(name)]
        if others:
            return f"is not installed ({others[0]} is, with another interface)"
        return "is not installed"
    return None if found.startswith("2.") else f"is of version {found} instead of 2"


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def has_varlen() -> bool:
    """Whether torch's variable-length attention takes what ``varlen`` gives it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def choose_backend(name: str, accelerator: str, needs: Needs) -> Choice:
    """The backend that was asked for, or the one that ``auto`` stands for.

    Args:
        name: as configured.
        accelerator: "cpu" or "cuda".
        needs: what it has to do.

    Raises:
        UserError: the backend asked for cannot run here, or not what is needed.
    """
    if name != "auto":
        if problem := backend_problem(name, accelerator):
            raise UserError(problem)
        if name in ("flash", "varlen") and (why := _kernel_problem(name, needs)) is not None:
            raise UserError.at(
                "model.attention_backend", f"{name!r} {why}; choose 'auto' or 'flex'."
            )
        return Choice(name, "as configured")
    return _suitable(needs) if accelerator == "cuda" else Choice("sdpa", "on the CPU")


def _kernel_problem(name: str, needs: Needs) -> str | None:
    """What the kernels of ``flash`` and ``varlen`` cannot do of what is needed, or None."""
    if not needs.half:
        return "computes in 16 bits only"
    if _capability() < (8, 0):
        return "needs a GPU of the Ampere generation or later"
    if needs.head_size > LARGEST_HEAD:
        return f"takes heads of {LARGEST_HEAD} channels at most, and here they have more"
    if needs.softmax.sinks:
        return "has no gradient of attention sinks"
    return _varlen_problem(needs) if name == "varlen" else _softcap_problem(needs)


def _varlen_problem(needs: Needs) -> str | None:
    if needs.softmax.softcap is not None:
        return "knows no soft-caps"
    if needs.biased:
        return "knows no ALiBi"
    if needs.head_size % 8:
        return f"takes heads whose size is a multiple of 8, which {needs.head_size} is not"
    return None


def _softcap_problem(needs: Needs) -> str | None:
    if needs.softmax.softcap is None or int(version("flash-attn").split(".")[1]) >= 6:
        return None
    return "knows no soft-caps before version 2.6"


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _suitable(needs: Needs) -> Choice:
    """What a GPU does best."""
    problem = flash_problem() or _kernel_problem("flash", needs)
    if problem is None:
        return Choice("flash", "flash-attn is installed, in 16 bits")
    masked = needs.documents or needs.windows or needs.biased
    why = f"{'masks' if masked else 'no masks'}; flash-attn {problem}"
    if not masked and needs.softmax.is_fused:
        return Choice("sdpa", why)
    if needs.documents and has_varlen() and _kernel_problem("varlen", needs) is None:
        return Choice("varlen", why)
    if needs.many_lengths:
        return Choice("sdpa", f"{why}; FlexAttention would be compiled for many lengths")
    return Choice("flex", why)
