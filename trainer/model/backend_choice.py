"""Choose the backend that computes attention: the configured one, or by device, masks and dtype.

Package metadata is not enough to tell whether a kernel works. A kernel counts as available if it
loads here, and a new one if its results here also agree with the definition of attention.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch.nn import attention as torch_attention

from trainer.common.errors import Problem, UserError, first_line
from trainer.model.backends import BACKENDS, prepared
from trainer.model.config import SoftmaxConfig, problem_on_cpu
from trainer.model.masks import Mask
from trainer.model.softmax import Softmax, eager

log = logging.getLogger(__name__)

OTHER_FLASH = ("flash-attn-3", "flash_attn_3", "flash-attn-4")
"""Packages of later generations, whose functions have other names and arguments."""

LARGEST_HEAD = 256
"""Largest head that flash-attention's kernels support, in channels."""

NEWER_FLASH = {
    "FA3": ("flash_attn_interface", (9,)),
    "FA4": ("flash_attn.cute.interface", (9, 10)),
}
"""Generations of flash-attention by torch's names: the module torch imports for each, and the GPUs
it runs on, by the first number of their compute capability."""

CUDNN_GPUS, CUDNN = ((9, 0), (10, 0)), 91500
"""GPUs on which torch's SDPA prefers cuDNN's kernel, and the version above which it does
(``check_prefer_cudnn_attention`` in torch's sdp_utils.cpp)."""

TRIAL_DEVICE = "cuda"
"""Device on which kernels are tried."""


class Choice(NamedTuple):
    """The ``name`` of a backend, why it was chosen, and whether SDPA may take cuDNN's kernel."""

    name: str
    why: str
    cudnn: bool = False


class Needs(NamedTuple):
    """Requirements on a model's attention.

    ``documents``: batches carry document masks. ``windows``: a layer has a window. ``biased``: a
    layer has ALiBi. ``half``: queries and keys have 16 bits. ``length``: the length of every
    sequence in training; None: sequences have many lengths, as in an evaluation. ``head_size``: D.
    ``softmax``: extensions of the softmax.
    """

    documents: bool = False
    windows: bool = False
    biased: bool = False
    half: bool = True
    length: int | None = None
    head_size: int = 64
    softmax: SoftmaxConfig = SoftmaxConfig()

    @property
    def are_plain(self) -> bool:
        """Whether attention is causal and nothing else, with fused softmax."""
        masked = self.documents or self.windows or self.biased
        return not masked and self.softmax.is_fused


def backend_problem(name: str, accelerator: str) -> Problem | None:
    """Return why a backend cannot run on ``accelerator`` ("cpu", "cuda"), or None.

    A backend that is configured but missing is an error; no other one replaces it silently.
    """
    if accelerator != "cuda" and (problem := problem_on_cpu(name)) is not None:
        return problem
    if name == "flash" and (reason := flash_problem()) is not None:
        return Problem(
            "model.attention_backend",
            f"'flash' needs the package flash-attn, which {reason}; pip install "
            "'unrope[flash]', or choose 'auto' or 'sdpa'.",
        )
    if name == "varlen" and not has_varlen():
        return Problem(
            "model.attention_backend",
            "'varlen' needs torch 2.12 or later, whose varlen_attn takes windows and shared keys; "
            "choose 'auto' or 'flex'.",
        )
    return None


def flash_problem() -> str | None:
    """Return why the package flash-attn, generation 2, cannot be used, or None."""
    installed = _version_of("flash-attn")
    if installed is None:
        other = next(filter(_version_of, OTHER_FLASH), None)
        return "is not installed" + (f" ({other} is, with another interface)" if other else "")
    if not installed.startswith("2."):
        return f"is of version {installed} instead of 2"
    error = _import_error("flash_attn")
    return None if error is None else f"cannot be loaded ({_brief(error)})"


def _version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _import_error(module: str) -> Exception | None:
    """Import a module and return what that raises, or None.

    A wheel built for another torch has package metadata, but fails with an undefined symbol.
    """
    try:
        import_module(module)
    except Exception as error:  # a shared library may fail in any way
        return error
    return None


def _is_missing(module: str, error: Exception) -> bool:
    """Whether ``error`` says that ``module`` or a package that contains it is not installed."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return f"{module}.".startswith(f"{error.name}.")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:200]


def has_varlen() -> bool:
    """Whether torch's variable-length attention takes the arguments that ``varlen`` passes."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def choose_backend(name: str, accelerator: str, needs: Needs) -> Choice:
    """Return the configured backend, or the one that ``auto`` selects on "cpu" or "cuda".

    Raises:
        UserError: the configured backend cannot run here, or does not meet the requirements.
    """
    if name != "auto":
        if problem := backend_problem(name, accelerator):
            raise UserError(problem)
        if name in ("flash", "varlen") and (why := next(_kernel_problems(name, needs), None)):
            raise UserError.at(
                "model.attention_backend", f"{name!r} {why}; choose 'auto' or 'flex'."
            )
        cudnn = name == "sdpa" and accelerator == "cuda" and _suits_cudnn(needs)
        return Choice(name, "as configured" + (", cuDNN's kernel" if cudnn else ""), cudnn)
    return _suitable(needs) if accelerator == "cuda" else Choice("sdpa", "on the CPU")


def _kernel_problems(name: str, needs: Needs) -> Iterator[str]:
    """Yield the requirements that the kernels of ``flash`` and ``varlen`` do not meet."""
    softcaps = needs.softmax.softcap is not None
    if not needs.half:
        yield "computes in 16 bits only"
    if _capability() < (8, 0):
        yield "needs a GPU of the Ampere generation or later"
    if needs.head_size > LARGEST_HEAD:
        yield f"takes heads of {LARGEST_HEAD} channels at most, and here they have more"
    if needs.softmax.sinks:
        yield "has no gradient of attention sinks"
    if name == "flash" and softcaps and int(version("flash-attn").split(".")[1]) < 6:
        yield "knows no soft-caps before version 2.6"
    if name == "varlen" and softcaps:
        yield "knows no soft-caps"
    if name == "varlen" and needs.biased:
        yield "knows no ALiBi"
    if name == "varlen" and needs.head_size % 8:
        yield f"takes heads whose size is a multiple of 8, which {needs.head_size} is not"


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _suits_cudnn(needs: Needs) -> bool:
    """Whether SDPA takes cuDNN's attention here and it is right and fast.

    cuDNN makes a plan for every new shape, which costs half a second, and has had wrong results and
    gradients with masks and at lengths that are no multiple of 128.
    """
    fixed = needs.length is not None and needs.length % 128 == 0
    if not (needs.are_plain and needs.half and fixed):
        return False
    if torch.are_deterministic_algorithms_enabled():  # SDPA then passes it over
        return False
    fits = needs.head_size <= 128 and needs.head_size % 8 == 0
    return fits and _capability() in CUDNN_GPUS and (torch.backends.cudnn.version() or 0) > CUDNN


def _newer_flash(needs: Needs, name: str) -> str | None:
    """Have torch compute flash attention with a later generation that works here.

    Under SDPA and varlen_attn (``name``: "sdpa", "varlen") torch then calls it in place of its own
    kernels, in this process. Returns torch's name of the generation; None if none works here.
    """
    if not hasattr(torch_attention, "restore_flash_attention_impl"):  # torch 2.11 has it
        return None
    if not needs.half or needs.head_size > LARGEST_HEAD:
        return None
    for kind, (module, generations) in NEWER_FLASH.items():
        if _capability()[0] not in generations:
            continue
        try:
            if torch_attention.current_flash_attention_impl() != kind:
                torch_attention.activate_flash_attention_impl(kind)
            problem = trial_problem(name, needs)
        except Exception as error:  # whatever a prototype's registration raises
            if _is_missing(module, error):
                continue
            problem = _brief(error)
        if problem is None:
            return kind
        log.warning("%s is not used: %s", kind, problem)
        if torch_attention.current_flash_attention_impl() is not None:
            torch_attention.restore_flash_attention_impl()
    return None


def _flex_takes_flash(needs: Needs) -> bool:
    """Whether FlexAttention's FlashAttention-4 kernels work here; sinks need a gradient of the
    log-sum-exp, which they lack."""
    module, generations = NEWER_FLASH["FA4"]
    if not needs.half or needs.softmax.sinks or _capability()[0] not in generations:
        return False
    error = _import_error(module)
    if error is not None and _is_missing(module, error):
        return False
    problem = trial_problem("flex_flash", needs) if error is None else _brief(error)
    if problem is not None:
        log.warning("FlexAttention's kernels of FlashAttention-4 are not used: %s", problem)
    return problem is None


def trial_problem(name: str, needs: Needs) -> str | None:
    """Try a backend on a small attention and its gradients, with these requirements.

    Returns:
        What is wrong, or None.
    """
    length, generator = 256, torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, needs.head_size, generator=generator)
        .to(TRIAL_DEVICE, torch.bfloat16)
        .requires_grad_()
        for heads in (4, 2, 2)
    )
    documents = (torch.arange(length, device=q.device) // 100)[None]
    mask = Mask(
        window=64 if needs.windows else None,
        documents=documents if needs.documents else None,
        slopes=torch.linspace(0.1, 0.5, 4, device=q.device) if needs.biased else None,
    )
    softmax, results = Softmax(softcap=needs.softmax.softcap), []
    try:
        for attend in (BACKENDS[name], eager):
            ready = prepared(attend, mask, (1, length), length, q.device)
            with torch.enable_grad():
                out = attend(q, k, v, ready, softmax)
                grads = torch.autograd.grad(out.square().sum(), (q, k, v))
            results.append([out.detach(), *grads])
    except Exception as error:  # a kernel may raise anything
        return _brief(error)
    pairs = zip(*results, strict=True)
    worst = float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())
    return None if worst <= 0.03 else f"off by {worst:.1%} in a trial"  # NaN is off too


def _suitable(needs: Needs) -> Choice:
    """Choose the fastest backend on a GPU among those that work there."""
    if _suits_cudnn(needs):
        return Choice("sdpa", f"cuDNN's kernel: no masks, {needs.length:,} tokens", cudnn=True)
    documents = needs.documents and has_varlen() and not any(_kernel_problems("varlen", needs))
    name = "sdpa" if needs.are_plain else "varlen" if documents else None
    if name is not None and (kind := _newer_flash(needs, name)) is not None:
        return Choice(name, f"{'documents' if documents else 'no masks'}, with {kind}")
    if needs.are_plain and needs.half and _capability() >= (9, 0):
        return Choice("sdpa", "no masks; torch's own flash attention")
    problem = flash_problem() or next(_kernel_problems("flash", needs), None)
    if problem is None:
        return Choice("flash", "flash-attn is installed, in 16 bits")
    masked = needs.documents or needs.windows or needs.biased
    why = f"{'masks' if masked else 'no masks'}; flash-attn {problem}"
    return Choice(name, why) if name is not None else _flexible(needs, why)


def _flexible(needs: Needs, why: str) -> Choice:
    """Choose a backend for any mask and softmax; ``why``: the reason that others are unsuitable."""
    if needs.length is None:
        return Choice("sdpa", f"{why}; FlexAttention would be compiled for many lengths")
    if _flex_takes_flash(needs):
        return Choice("flex_flash", f"{why}; FlexAttention with FlashAttention-4")
    return Choice("flex", why)
