"""Attention layers and caches of a transformers model, observed and modified in place.

Nearly all models of transformers 5 call attention by a name registered with its
``AttentionInterface``. A name of ours routes the call through this module, with queries and keys as
they enter the scores, and then to the function that the model would have called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.common.errors import UserError
from trainer.interchange.adapted.rotation import Tables, no_rotation
from trainer.model.cache import KVCache, LayerCache

Result = tuple[Tensor, Tensor | None]
_ATTEND: ContextVar[Callable[..., Result]] = ContextVar("attend")
_MASKS: dict[str, Callable[..., Any]] = {"sdpa": sdpa_mask, "eager": eager_mask}


def _attend(*args: Any, **options: Any) -> Result:
    return _ATTEND.get()(*args, **options)


for _usual, _mask in _MASKS.items():
    AttentionInterface.register(f"unrope_{_usual}", _attend)
    AttentionMaskInterface.register(f"unrope_{_usual}", _mask)


@dataclass(frozen=True)
class Call:
    """Attention call of one layer, with queries ``[B, Hq, T, D]`` and keys ``[B, Hkv, Tk, D]``.

    ``tables``: tables given to the layer (None: none). ``plain``: queries and keys without rotation
    (None: not requested). ``mask``: ``[B, 1, T, Tk]``, booleans or a bias on the scores (None:
    causal). ``scaling``, ``softcap``, ``window``: of the scores; ``sinks``: ``[Hq]``, learned
    logits beside them (None: none).
    """

    index: int
    q: Tensor
    k: Tensor
    tables: Tables | None
    plain: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    scaling: float | None
    softcap: float | None
    window: int | None
    sinks: Tensor | None


class Seam:
    """Interception of the attention of every layer of ``model``.

    ``modules``: its attention layers, in order. ``usual``: the implementation that the model uses
    by itself.

    Raises:
        UserError: some layer's attention does not use the interface.
    """

    def __init__(self, model: PreTrainedModel, depth: int) -> None:
        self.model = model
        self.usual = model.config._attn_implementation
        # transformers 5.5 to 5.12 compute Gemma 2 with SDPA, which omits the soft-cap.
        capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        if self.usual not in _MASKS or capped:
            self.usual = "eager"
        self.modules: list[nn.Module] = []

        def note(module: nn.Module, *args: Any, **options: Any) -> Result:
            self.modules.append(module)
            return self._usually(module)(module, *args, **options)

        with self._through(note), torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
        if len(self.modules) != depth:
            raise UserError.at(
                "",
                f"{len(self.modules)} of its {depth} layers call attention through transformers' "
                "AttentionInterface, where it is observed; expected all.",
            )

    @contextmanager
    def watching(
        self,
        see: Callable[[Call], tuple[Tensor, Tensor]],
        *,
        plain: bool = False,
        tables: Callable[[int, Tables], Tables] | None = None,
    ) -> Iterator[None]:
        """Route every forward pass within the block through ``see``.

        Args:
            see: receives a layer's attention call; returns the queries and keys to continue with.
            plain: whether to compute them without rotation, too: each layer then projects twice.
            tables: receives a layer's index and tables; returns replacements.
        """
        used: Tables | None = None
        seen: tuple[Tensor, Tensor] | None = None

        def without_rotation(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Result:
            nonlocal seen
            seen = q, k
            # The rest of this pass is discarded.
            return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), None

        def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
            nonlocal used, seen
            used, seen = options.get("position_embeddings"), None
            if plain and used is not None:
                changed = {"position_embeddings": no_rotation(used), cache_name(module): None}
                token = _ATTEND.set(lambda *a, **_: without_rotation(*a))
                try:
                    module.forward(*args, **options | changed)
                finally:
                    _ATTEND.reset(token)
            if tables is not None and used is not None:
                used = tables(index, used)
                options = options | {"position_embeddings": used}
            return args, options

        def attend(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
        ) -> Result:
            call = Call(
                self.modules.index(module),
                q,
                k,
                used,
                None if not plain else (q, k) if used is None else seen,
                mask,
                *(options.get(n) for n in ("scaling", "softcap", "sliding_window", "s_aux")),
            )
            q, k = see(call)
            return self._usually(module)(module, q, k, v, mask, **options)

        with self._hooked(before), self._through(attend):
            yield

    @contextmanager
    def feeding(self, on_input: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Call ``on_input`` with each attention's input within the block."""

        def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> None:
            on_input(index, args[0] if args else options["hidden_states"])

        with self._hooked(before):
            yield

    @contextmanager
    def _hooked(self, before: Callable[..., Any]) -> Iterator[None]:
        """Call ``before`` with each attention layer's index, module and arguments."""
        hooks = [
            module.register_forward_pre_hook(partial(before, index), with_kwargs=True)
            for index, module in enumerate(self.modules)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _usually(self, module: nn.Module) -> Callable[..., Result]:
        if self.usual == "eager":
            return sys.modules[type(module).__module__].eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS[self.usual]

    @contextmanager
    def _through(self, attend: Callable[..., Result]) -> Iterator[None]:
        token = _ATTEND.set(attend)
        self.model.set_attn_implementation(f"unrope_{self.usual}")
        try:
            yield
        finally:
            self.model.set_attn_implementation(self.usual)
            _ATTEND.reset(token)


def ordered(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Return a call with queries and keys changed alike."""
    plain = call.plain
    if plain is not None:
        plain = change(plain[0]), change(plain[1])
    return replace(call, q=change(call.q), k=change(call.k), plain=plain)


class _Layer(CacheLayerMixin):
    """All tokens of a layer, even with a sliding window: masks hide what the window excludes."""

    is_sliding = False

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self.cache = cache
        self.keys, self.values, self.is_initialized = cache.keys, cache.values, True

    def lazy_initialization(self, *states: Tensor) -> None:
        """Do nothing: memory is allocated already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; return all keys and values so far."""
        return self.cache.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.cache.length

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        """Return the number of keys after appending ``queries`` tokens, and the index of the first
        key."""
        new = queries.shape[0] if isinstance(queries, Tensor) else queries
        return self.cache.length + new, 0

    def get_max_length(self) -> int:
        """Return None: transformers need not know the capacity."""
        return -1

    get_max_cache_shape = get_max_length


def cache_name(module: nn.Module) -> str:
    """Return the name of a model's or layer's cache argument.

    It is ``cache`` from transformers 5.24 on, ``past_key_values`` before.
    """
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def as_transformers_cache(cache: KVCache) -> Cache:
    """Return a view: what transformers appends goes to ``cache``."""
    return Cache(layers=[_Layer(layer) for layer in cache.layers])
