"""Causal attention: masks, backends, each a function that registers itself, and the choice of one.

All backends take queries ``[B, Hq, Tq, D]``, keys and values ``[B, Hkv, Tk, D]`` with Tk >= Tq and
a :class:`Mask` from :func:`prepared`, and return ``[B, Hq, Tq, D]``. The last query sees the last
key. None allocates a [Tq, Tk] tensor: where a kernel needs a mask, ``sdpa`` processes the queries
in blocks. Single queries, as in generation, are those of ``sdpa`` in all backends.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.common.errors import UserError
from trainer.common.registry import Registry

QUERY_BLOCK = {"cpu": 128, "cuda": 512}
"""Queries per block of ``sdpa`` with a mask: small ones skip hidden scores, large suit GPUs."""
MOST_BIASES = 2**28
"""Limit on the biases of a block of queries with ALiBi."""
MOST_VARIANTS = 64
"""Limit on the variants of FlexAttention that one process compiles."""
CUDNN_GPUS = (9, 0), (10, 0)
CUDNN_VERSION = 91501
"""GPUs on which torch's SDPA prefers cuDNN's kernel, from this version on, see
``check_prefer_cudnn_attention`` in torch's sdp_utils.cpp."""
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Allow or forbid cuDNN's kernel in SDPA within this context."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@dataclass(frozen=True)
class Mask:
    """Restrictions beyond causality.

    ``window``: number of keys a query sees, itself included. ``documents``: ``[B, Tk]`` integers; a
    query sees keys of its own document. ``slopes``: ``[Hq]`` float32, of ALiBi. ``begins``: ``[B]``
    integers, the first key of each row. ``bounds``, ``longest`` (bound of their lengths; None: that
    of a row), ``blocks``: documents and windows in the form of the kernels, see :func:`prepared`.
    """

    window: int | None = None
    documents: Tensor | None = None
    slopes: Tensor | None = None
    begins: Tensor | None = None
    bounds: Tensor | None = None
    longest: int | None = None
    blocks: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether there is only causality."""
        return all(x is None for x in (self.window, self.documents, self.slopes, self.begins))


CAUSAL = Mask()
"""No restriction but causality."""
Attend = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
Prepare = Callable[[Mask, tuple[int, int], int, torch.device], Mask]


@dataclass(frozen=True)
class Use:
    """What a model asks of its backend.

    ``device``: "cpu" or "cuda". ``masked``: whether there are document masks, windows or ALiBi.
    ``half``: whether queries and keys have 16 bits. ``length``: tokens of each sequence in
    training; None: sequences have many lengths, as in an evaluation. ``head_size``: channels.
    """

    device: str
    masked: bool
    half: bool
    length: int | None
    head_size: int


@dataclass(frozen=True)
class Backend:
    """Row of :data:`BACKENDS`.

    ``needs``: what it needs, for a message. ``supports``: whether it can serve a use. ``suits``:
    whether ``auto`` prefers it there to the backends after it. ``prepare``: see :func:`prepared`.
    """

    attend: Attend
    needs: str = ""
    supports: Callable[[Use], bool] = lambda use: True
    suits: Callable[[Use], bool] = lambda use: False
    prepare: Prepare | None = None


BACKENDS = Registry[Backend]("attention backend")
"""Backends by the names of their functions, in the order in which ``auto`` considers them."""


def backend(**row: Any) -> Callable[[Attend], Attend]:
    """Register a function as a backend; see :class:`Backend`. A file of ``plugins`` may do so.

    ``sdpa`` takes its place for single queries and for rows with ``begins``.
    """

    def register(attend: Attend) -> Attend:
        @wraps(attend)
        def attend_or_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
            knows = q.shape[2] > 1 and mask.begins is None
            return attend(q, k, v, mask) if knows else sdpa(q, k, v, mask)

        BACKENDS.add(attend.__name__, Backend(attend_or_sdpa, **row), attend)
        return attend_or_sdpa

    return register


def allowed(mask: Mask, queries: range, keys: range, device: torch.device) -> Tensor:
    """Return visibility, ``[Tq, Tk]`` or ``[B, 1, Tq, Tk]`` booleans, for absolute positions."""
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    seen = j <= i
    if mask.window is not None:
        seen &= j > i - mask.window
    if mask.documents is not None:
        of_queries = mask.documents[:, None, queries.start : queries.stop, None]
        seen = seen & (of_queries == mask.documents[:, None, None, keys.start : keys.stop])
    if mask.begins is not None:
        seen = seen & (j >= mask.begins[:, None, None, None])
    return seen


def bias(mask: Mask, queries: range, keys: range, q: Tensor) -> Tensor:
    """Return SDPA's ``attn_mask``: booleans, or with ALiBi a bias ``[.., Hq, Tq, Tk]``.

    The bias is at least float32 on the CPU, and in the queries' dtype elsewhere.
    """
    seen = allowed(mask, queries, keys, q.device)
    if mask.slopes is None:
        return seen
    i = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=q.device)
    slope = mask.slopes[:, None, None] * (j - i)
    # CUDA kernels take only a bias of the queries' dtype. In 16 bits it is off by up to 0.4%, which
    # matters little: where the bias is large, the key is far and has almost no weight.
    dtype = q.dtype
    if q.device.type == "cpu":
        dtype = torch.promote_types(dtype, torch.float32)
    return slope.masked_fill(~seen, -math.inf).to(dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Call torch's scaled_dot_product_attention, but never cuDNN's kernel.

    torch prefers that kernel on Hopper. It is wrong with some masks and makes a plan for every new
    length.
    """
    compiling = torch.compiler.is_compiling()
    if q.device.type == "cpu" and not compiling:  # its threads would share cuDNN's switch
        return _sdpa(q, k, v, mask)
    # Graphs support torch's context alone. Outside them it takes as long as a small kernel.
    without_cudnn = sdpa_kernel(WITHOUT_CUDNN) if compiling else cudnn_attention(False)
    with without_cudnn:
        return _sdpa(q, k, v, mask)


BACKENDS.add("sdpa", Backend(sdpa), sdpa)


def _supports_cudnn(use: Use) -> bool:
    """Whether torch prefers cuDNN's kernel, which is right there.

    It makes a plan for every new shape, which costs half a second, and has had wrong results and
    gradients with masks and at lengths that are no multiple of 128. SDPA passes it over where
    computation is deterministic.
    """
    is_plain = use.half and not use.masked and not torch.are_deterministic_algorithms_enabled()
    if use.device != "cuda" or not is_plain or use.length is None or use.length % 128:
        return False
    is_new = (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION
    fits = use.head_size <= 128 and use.head_size % 8 == 0
    return is_new and fits and torch.cuda.get_device_capability() in CUDNN_GPUS


@backend(
    needs="a GPU for which torch prefers cuDNN, 16 bits, no masks, lengths of a multiple of 128",
    supports=_supports_cudnn,
    suits=lambda use: True,
)
def cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Call torch's scaled_dot_product_attention: cuDNN's kernel, where torch allows it."""
    return _sdpa(q, k, v, mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Call torch's scaled_dot_product_attention, in blocks of queries if it needs a mask.

    With a window, each block reads only its window of the keys, so that time and memory are linear
    in the length.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    if Tq == 1:
        return _single_query(q, k, v, mask)
    if mask.is_plain and Tq == Tk:
        return _fused(q, k, v, is_causal=True)
    if mask.is_plain and q.device.type != "cpu":
        from torch.nn.attention.bias import causal_lower_right  # slow import: the compiler

        return _fused(q, k, v, attn_mask=causal_lower_right(Tq, Tk))  # CUDA kernels know it
    past = Tk - Tq
    outputs = []
    block = QUERY_BLOCK.get(q.device.type, 512)
    if mask.slopes is not None:
        # Rows of a batch share biases, unless each has its own mask.
        share = mask.documents is None and mask.begins is None
        rows = 1 if share else q.shape[0]
        block = max(16, min(block, MOST_BIASES // (rows * q.shape[1] * Tk)))
    for start in range(0, Tq, block):
        queries = range(past + start, past + min(start + block, Tq))
        first = 0 if mask.window is None else max(0, queries.start - mask.window + 1)
        keys = range(first, queries.stop)
        part = (
            q[:, :, start : start + block],
            k[:, :, first : keys.stop],
            v[:, :, first : keys.stop],
        )
        outputs.append(_fused(*part, attn_mask=bias(mask, queries, keys, q)))
    return torch.cat(outputs, dim=2)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call SDPA such that one of its fused kernels can be used."""
    shared = q.shape[1] // k.shape[1]
    # Flash is the only CUDA kernel that supports grouped keys (16 bits, no mask). Otherwise torch
    # silently takes the kernel that materializes all scores.
    needs_more = q.element_size() > 2 or "attn_mask" in options
    if shared > 1 and q.device.type != "cpu" and needs_more:
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=_share_keys(q, k), **options)


def _share_keys(q: Tensor, k: Tensor) -> bool:
    """Whether heads share keys.

    A function, because the compiler would treat the comparison as a symbol if heads change.
    """
    if q.shape[1] != k.shape[1]:  # noqa: SIM103
        return True
    return False


def _single_query(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Compute attention for one query per head: heads that share keys become queries of one head.

    No kernel then copies keys for each head, which on a CPU costs more than the attention.
    """
    heads, Tk = k.shape[1:3]
    first = 0 if mask.window is None else max(0, Tk - mask.window)
    scores = None
    if not replace(mask, window=None).is_plain:
        scores = bias(mask, range(Tk - 1, Tk), range(first, Tk), q)
        if mask.slopes is not None:
            scores = scores.squeeze(-2).unflatten(-2, (heads, -1))
    out = F.scaled_dot_product_attention(
        q.reshape(q.shape[0], heads, -1, q.shape[3]), k[:, :, first:], v[:, :, first:], scores
    )
    return out.reshape(q.shape)


def _supports_flash(use: Use) -> bool:
    if use.device != "cuda" or not use.half or use.head_size > 256:
        return False
    return torch.cuda.get_device_capability() >= (8, 0) and _has_flash_attn()


def _with_bounds(mask: Mask, shape: tuple[int, int], keys: int, device: torch.device) -> Mask:
    """Add the starts of the documents within the batch's B T tokens, then B T, if there are any.

    A document starts where its number changes and at every row. Causes a host sync.
    """
    documents = mask.documents
    if documents is None or mask.bounds is not None:
        return mask
    begins = F.pad(documents.diff(dim=1).ne(0), (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    bounds = F.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)
    return replace(mask, bounds=bounds)


@backend(
    needs="a GPU from Ampere on, the package flash-attn, 16 bits, heads of at most 256 channels",
    supports=_supports_flash,
    suits=lambda use: use.masked or torch.cuda.get_device_capability() < (9, 0),
    prepare=_with_bounds,
)
def flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Call the flash-attn package (CUDA); documents use its variable-length kernel."""
    if mask.documents is not None and q.shape[2] < k.shape[2]:
        # The bounds are those of whole rows: queries after cached keys would need their own.
        return sdpa(q, k, v, mask)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options = {
        "causal": True,
        "window_size": (-1, -1) if mask.window is None else (mask.window - 1, 0),
        "alibi_slopes": mask.slopes,
        "deterministic": torch.are_deterministic_algorithms_enabled(),  # affects its backward
    }
    if mask.documents is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, **options).transpose(1, 2)
    B, T = q.shape[0], q.shape[2]
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    # The kernel allocates this length per document; reading the exact one would cause a host sync.
    longest = min(mask.longest or T, T)
    out = flash_attn_varlen_func(*flat, mask.bounds, mask.bounds, longest, longest, **options)
    return out.unflatten(0, (B, T)).transpose(1, 2)


def _with_blocks(mask: Mask, shape: tuple[int, int], keys: int, device: torch.device) -> Mask:
    """Add FlexAttention's block mask: which blocks contain visible scores, and which ones."""
    rows, queries = shape
    past = keys - queries
    documents = mask.documents
    window = mask.window or keys

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (j <= i + past) & (j > i + past - window)
        return near if documents is None else near & (documents[b, i + past] == documents[b, j])

    rows_apart = None if documents is None else rows
    create = _compiled("create_block_mask")
    blocks = create(seen, rows_apart, None, queries, keys, device=device)
    return replace(mask, blocks=blocks)


@backend(
    needs="a GPU, heads of at least 16 channels",
    supports=lambda use: use.device == "cuda" and use.head_size >= 16,
    # It would be compiled for each of an evaluation's many lengths.
    suits=lambda use: use.masked and use.length is not None,
    prepare=_with_blocks,
)
def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Call torch's FlexAttention (GPU): any mask and ALiBi in one kernel."""
    past = k.shape[2] - q.shape[2]
    slopes = mask.slopes

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        return score + slopes[h] * (j - i - past)

    return _compiled("flex_attention")(
        *(q, k, v),
        score_mod=None if slopes is None else biased,
        block_mask=mask.blocks,
        enable_gqa=_share_keys(q, k),
    )


def _compiled(name: str) -> Callable[..., Any]:
    """Compile a function of torch's FlexAttention, which uncompiled materializes all scores."""
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    return function if torch.compiler.is_compiling() else _compiled_once(function)


@cache
def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with a higher limit on its variants."""
    from torch._dynamo import config

    # One graph for attention, even after many shapes.
    compiled = torch.compile(function, fullgraph=function.__name__ == "flex_attention")

    def call(*args: Any, **kwargs: Any) -> Any:
        # Every mask, dtype and number of heads needs a compilation: more than the default of eight.
        with config.patch(recompile_limit=MOST_VARIANTS):
            return compiled(*args, **kwargs)

    return call


def prepared(
    attend: Attend, mask: Mask, shape: tuple[int, int], keys: int, device: torch.device
) -> Mask:
    """Add to a mask what its backend needs, computed once for all layers that share it.

    ``shape``: rows of the batch, and queries per row. ``keys``: keys per row.
    """
    if shape[1] == 1 or mask.begins is not None:
        return mask
    for row in BACKENDS.values():
        if row.attend is attend and row.prepare is not None:
            return row.prepare(mask, shape, keys, device)
    return mask


class UnsupportedError(UserError):
    """The configured attention backend cannot run here."""


def choose_backend(name: str, use: Use) -> str:
    """Return the key in :data:`BACKENDS` of the configured backend, or of the fastest that suits.

    ``name``: ``auto`` or a backend; ``sdpa`` also with cuDNN's kernel. Raise an UnsupportedError if
    the configured one does not exist, or cannot run here.
    """
    if name == "auto":
        suiting = (n for n, row in BACKENDS.items() if row.supports(use) and row.suits(use))
        return next(suiting, "sdpa")
    if name not in BACKENDS:
        expected = ", ".join(["auto", *BACKENDS])
        raise UnsupportedError(f"model.attention_backend: expected one of {expected}, got {name!r}")
    if not BACKENDS[name].supports(use):
        needs = BACKENDS[name].needs
        raise UnsupportedError(f"model.attention_backend: {name!r} needs {needs}")
    return "cudnn" if name == "sdpa" and _supports_cudnn(use) else name


@cache
def _has_flash_attn() -> bool:
    """Whether flash-attn loads: a wheel built for another torch fails with an undefined symbol."""
    try:
        import flash_attn  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
