"""Any decoder of transformers from a local directory (``hf:DIRECTORY``), computed by transformers.

Nearly all models of transformers 5 call attention by a name registered with its
``AttentionInterface``. A name of ours shows queries and keys as they enter the scores. Layers get
tables of cosines and sines, which differ in form and in the channels of a pair: halves of a head
(Llama), of its first channels only (Phi), neighbours (Llama 4), or neighbours among the last
channels (DeepSeek-V2). Each layer is run once with its tables and once with tables of no rotation;
its arrangement is the one that transforms the second result into the first. To observe a model or
to change its encoding, layers get tables of no rotation, and the layout rotates in their place.

No code of a model is run and no pickle is read: the architecture must be transformers' own, and the
weights safetensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from trainer.common.errors import UserError
from trainer.interchange.hf_config import trained_and_reach
from trainer.interchange.pretrained import read_config
from trainer.model.backends import Choice, Mask, allowed
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.model.language_model import LanguageModel, OnLayer
from trainer.model.loss import chunk_size
from trainer.positional.intervention import intervene
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rotation import (
    encode_keys,
    encode_queries,
    head_groups,
    rotary_table,
    rotate,
)
from trainer.positional.spectrum import Spectrum

IMPLEMENTATIONS = (None, "eager", "sdpa", "grouped_mm", "batched_mm")
"""Implementations of attention and experts that a configuration may ask for. For any other name,
transformers may download a kernel from the hub and run it."""
TRIED = 16
"""Tokens that are read to see what the layers do."""
CLOSE = 1e-4
"""Of the largest entry: how far a rotation in float32 may be from the model's own."""
CAUSAL = 1e-5
"""Of the largest state: how far a later token may move those of earlier tokens."""
APART = 0.05
"""Between tables of cosines and those of the spectrum: the float32 phases of a model are off by so
much at position 10^6."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""What families call the number that their norms add."""

Tables = Tensor | tuple[Tensor, Tensor]
"""What a layer is given as ``position_embeddings``: complex numbers, or cosines and sines."""


def read_adapted(directory: Path) -> AdaptedModel:
    """Load a model in float32 and determine the behaviour of its layers.

    Raises:
        UserError: transformers cannot compute it by itself, or its attention cannot be observed.
    """
    values = read_config(directory)
    if (kind := values.get("model_type")) not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"{directory}: model_type: {kind!r} needs code, and code of a model is never run"
        )
    elsewhere = (directory / "adapter_config.json").exists()
    if elsewhere or values.get("transformers_weights") is not None:
        raise UserError(
            f"{directory}: adapter_config.json and transformers_weights are not supported"
        )
    for key, value in _implementations(values):
        if value not in IMPLEMENTATIONS:
            raise UserError(
                f"{directory}: {key}: expected one of {IMPLEMENTATIONS[1:]}, got {value!r}"
            )
    ropes = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if "dynamic" in (ropes.get("rope_type"), ropes.get("type")):
        raise UserError(f"{directory}: rope_type: 'dynamic' depends on the texts read before")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{directory}: tensors are missing: {', '.join(missing[:5])}")
    return AdaptedModel(model)


def _implementations(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every ``*_implementation`` key at any depth, with its value."""
    for key, value in values.items():
        if str(key).endswith("_implementation"):
            yield key, value
        elif isinstance(value, dict):
            yield from _implementations(value)


# ---------------------------------------------------------------- rotations of layers


Order = tuple[int, ...]
"""A head's channels in spectrum order: pair m at m and m + pairs, then those that do not rotate."""


def no_rotation(tables: Tables) -> Tables:
    """Return tables of the same form that leave queries and keys unchanged."""
    if isinstance(tables, Tensor):
        return torch.ones_like(tables)
    return torch.ones_like(tables[0]), torch.zeros_like(tables[1])


def complex_table(tables: Tables) -> Tensor:
    """Return the values ``[B, T, pairs]`` of tables as complex128.

    Tables of cosines and sines have every number once, or twice: in both halves or side by side.
    """
    if isinstance(tables, Tensor):
        return tables.to(torch.complex128)
    both = torch.complex(*(table.double() for table in tables))
    pairs = both.shape[-1] // 2
    if torch.equal(both[..., :pairs], both[..., pairs:]):
        return both[..., :pairs]
    return both[..., ::2] if torch.equal(both[..., ::2], both[..., 1::2]) else both


def found_rotation(plain: Call, call: Call) -> tuple[Spectrum, Order | None]:
    """Determine the spectrum of one layer, and the order of its channels (None: any).

    Args:
        plain: its call with the tables of no rotation, at positions 0, 1, ..., T - 1.
        call: its call with its own tables.

    Raises:
        UserError: no known arrangement fits.
    """
    if torch.equal(plain.q, call.q) and torch.equal(plain.k, call.k):
        return Spectrum(), None
    size, T = call.q.shape[-1], call.q.shape[2]
    if call.tables is not None:
        once = complex_table(call.tables)[0, 1]
        scale = once.abs().mean().item()
        scale = 1.0 if abs(scale - 1) < 1e-6 else scale
        spectrum = Spectrum(tuple(once.angle().tolist()), rotary_scale=scale)
        cos, sin = rotary_table(spectrum, torch.arange(T, device=once.device))
        rotated = spectrum.rotary_dim
        # The pairs are halves or neighbours of the first or the last channels.
        for start in (0, size - rotated) if rotated <= size else ():
            rotating = range(start, start + rotated)
            still = [*range(start), *range(start + rotated, size)]
            for pairs in (rotating, chain(rotating[::2], rotating[1::2])):
                order = (*pairs, *still)
                if all(
                    (rotate(x[..., order], cos, sin) - y[..., order]).abs().amax()
                    <= CLOSE * y.abs().amax()
                    for x, y in ((plain.q, call.q), (plain.k, call.k))
                ):
                    return spectrum, order
    raise UserError(f"layer {call.index} rotates queries and keys in an unknown way")


# ---------------------------------------------------------------- attention and cache


@dataclass(frozen=True)
class Call:
    """Attention call of one layer, with queries ``[B, Hq, T, D]`` and keys ``[B, Hkv, Tk, D]``.

    ``tables``: tables that the model meant for the layer (None: none). ``mask``: ``[B, 1, T, Tk]``,
    booleans or a bias on the scores (None: causal). ``options``: of the scores: ``scaling``,
    ``softcap``, ``sliding_window``, and ``s_aux``, ``[Hq]``, logits of learned sinks.
    """

    index: int
    q: Tensor
    k: Tensor
    tables: Tables | None
    mask: Tensor | None
    options: dict[str, Any]


Watch = Callable[..., tuple[Tensor, Tensor]]
_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)
"""Gets the arguments of every attention call and returns its queries and keys."""


def _attend(usual: str, module: nn.Module, q: Tensor, k: Tensor, *args: Any, **options: Any) -> Any:
    """Compute attention as the model does by itself, of the queries and keys that a watch gives."""
    if (watch := _WATCH.get()) is not None:
        q, k = watch(module, q, k, *args, **options)
    if usual == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[usual]
    return attend(module, q, k, *args, **options)


_MASKS: dict[str, Callable[..., Any]] = {"sdpa": sdpa_mask, "eager": eager_mask}
for _usual, _mask in _MASKS.items():
    AttentionInterface.register(f"unrope_{_usual}", partial(_attend, _usual))
    AttentionMaskInterface.register(f"unrope_{_usual}", _mask)


class _Layer(DynamicLayer):
    """All tokens of a layer, even with a sliding window: masks hide what the window excludes."""

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self.cache = cache
        self.keys, self.values, self.is_initialized = cache.keys, cache.values, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; return all keys and values so far."""
        return self.cache.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.cache.length


def cache_name(module: nn.Module) -> str:
    """Return the name of a model's cache argument: ``cache`` from transformers 5.24 on,
    ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


# ---------------------------------------------------------------- the model


class AdaptedModel(LanguageModel):
    """A causal model of transformers, without gradients.

    Its layout is determined from the behaviour of its layers. Channels of queries and keys are
    reordered to the order of spectra, which leaves dot products unchanged. ``hf`` is in float32.

    Raises:
        UserError: its attention cannot be observed, or rotates in an unknown way.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf.eval()
        text = hf.config.get_text_config()
        self._base = next(m for m in hf.children() if isinstance(m, PreTrainedModel))
        self._observe: OnLayer | None = None
        self._route(text.num_hidden_layers)
        plain, calls = self._tried()
        q, k = calls[0].q, calls[0].k
        if any(c.q.shape != q.shape or c.k.shape != k.shape for c in calls):
            raise UserError("expected layers with heads of one shape")
        found = [found_rotation(*pair) for pair in zip(plain, calls, strict=True)]
        orders = {order for _, order in found if order is not None}
        inside = any("inv_freq" in n for n, _ in hf.named_buffers())  # past the tables
        if len(orders) > 1 or (inside and any(call.tables is None for call in calls)):
            raise UserError("its layers rotate queries and keys in an unknown way")
        order = list(next(iter(orders), range(q.shape[-1])))
        self._order = order if order != sorted(order) else None
        layers = (
            LayerEncoding(((spectrum, k.shape[1]),), call.options.get("sliding_window"))
            for (spectrum, _), call in zip(found, calls, strict=True)
        )
        ropes = getattr(text, "rope_parameters", None) or {}
        by_type = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
        lengths = [trained_and_reach(rope, text.max_position_embeddings) for rope in by_type]
        self.own_layout = Layout(text.max_position_embeddings, tuple(layers))
        if self.own_layout.rotates:  # a drop is written with lengths that mean nothing
            reach = max(reach for _, reach in lengths)
            self.own_layout = Layout(min(lengths)[0], self.own_layout.layers, reach)
        self._layout = self.own_layout
        self.config = ModelConfig(
            hidden_size=text.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            num_hidden_layers=len(calls),
            num_attention_heads=q.shape[1],
            num_key_value_heads=k.shape[1],
            head_dim=q.shape[-1],
            vocab_size=text.vocab_size,
            tie_word_embeddings=bool(text.tie_word_embeddings),
            rms_norm_eps=next((e for n in EPSILONS if (e := getattr(text, n, None))), 1e-5),
        )

    @torch.no_grad()
    def _route(self, depth: int) -> None:
        """Show all attention calls to ``_WATCH`` from now on, and list the attention layers."""
        self._usual = self.hf.config._attn_implementation
        # transformers 5.5 to 5.12 compute Gemma 2 with SDPA, which omits the soft-cap.
        capped = getattr(self.hf.config, "attn_logit_softcapping", None) is not None
        if self._usual not in _MASKS or capped:
            self._usual = "eager"
        self.hf.set_attn_implementation(f"unrope_{self._usual}")
        self._attentions: list[nn.Module] = []

        def note(module: nn.Module, q: Tensor, k: Tensor, *_: Any, **__: Any) -> Any:
            self._attentions.append(module)
            return q, k

        with _watching(note):
            self.hf(torch.zeros(1, 2, dtype=torch.long, device=self.device), use_cache=False)
        if len(self._attentions) != depth:
            raise UserError(
                f"{len(self._attentions)} of its {depth} layers call attention through "
                "transformers' AttentionInterface; expected all"
            )

    @torch.no_grad()
    def _tried(self) -> tuple[list[Call], list[Call]]:
        """Run a few tokens; return the attention call of every layer without and with rotation, and
        record the shapes in the cache.

        Raises:
            UserError: tokens see later ones.
        """
        plain: list[Call] = []
        calls: list[Call] = []

        def see(call: Call) -> tuple[Tensor, Tensor]:
            (calls if len(calls) < len(plain) else plain).append(call)
            return call.q, call.k

        def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> None:
            """Call the layer twice, the first time with tables of no rotation."""
            tables = options.get("position_embeddings")
            changed = {} if tables is None else {"position_embeddings": no_rotation(tables)}
            module.forward(*args, **options | changed)

        size = self.hf.config.get_text_config().vocab_size
        ids = torch.arange(TRIED, device=self.device)[None] % size
        with self._calls(see), self._before(before):
            self.hf(ids, use_cache=False)
        outputs = self._base(ids, use_cache=True)
        ids[:, -1] = ids[:, 0]
        states, after = outputs.last_hidden_state, self._base(ids).last_hidden_state
        if (after - states)[:, :-1].abs().amax() > CAUSAL * states.abs().amax():
            raise UserError("expected a causal model, but its tokens see later ones")
        self._outputs = type(outputs)
        # Heads and channels of keys and of values, which differ where compressed ones are cached.
        self._cached = [
            (layer.keys.shape[1::2], layer.values.shape[1::2])
            for layer in outputs[cache_name(self._base)].layers
        ]
        return plain, calls

    @contextmanager
    def _calls(self, see: Callable[[Call], tuple[Tensor, Tensor]], *, plain: bool = False) -> Any:
        """Show all attention calls within the block to ``see``, which returns the queries and keys
        to use.

        ``plain``: whether layers get tables of no rotation.
        """
        tables: Tables | None = None

        def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
            nonlocal tables
            tables = options.get("position_embeddings")
            if plain and tables is not None:
                options = options | {"position_embeddings": no_rotation(tables)}
            return args, options

        def watch(
            module: nn.Module, q: Tensor, k: Tensor, _: Any, mask: Any, **options: Any
        ) -> Any:
            return see(Call(self._attentions.index(module), q, k, tables, mask, options))

        with self._before(before), _watching(watch):
            yield

    @contextmanager
    def _before(self, hook: Callable[..., Any]) -> Iterator[None]:
        """Call ``hook`` with each attention layer's index, module and arguments."""
        hooks = [
            module.register_forward_pre_hook(partial(hook, index), with_kwargs=True)
            for index, module in enumerate(self._attentions)
        ]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def _apply(self, *args: Any, **options: Any) -> AdaptedModel:
        """Apply ``function`` to all tensors, as torch does to change device or dtype.

        Buffers keep their dtype: frequencies rounded to 16 bits would be wrong.
        """
        before = dict(self.named_buffers(remove_duplicate=False))
        super()._apply(*args, **options)
        for name, buffer in before.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, buffer.to(self.device))
        return self

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.hf.device

    @property
    def layout(self) -> Layout:
        """Present positional encoding.

        Raises:
            UserError: on assignment of a layout that this model cannot have.
        """
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        for new, trained in zip(layout.layers, self.own_layout.layers, strict=True):
            if (
                len(new.spectra) != len(trained.spectra)
                or (new.window, new.qk_norm) != (trained.window, trained.qk_norm)
                or any(spectrum.alibi for spectrum in new.spectra)
            ):
                raise UserError(
                    "hf: a model that transformers computes cannot have an encoding for each query "
                    "head, other windows, norms or a bias"
                )
        self._layout = layout

    def use_backend(
        self,
        name: str,
        device: str,
        *,
        documents: bool = False,
        half: bool = True,
        length: int | None = None,
    ) -> Choice:
        """Report transformers' own backend, which is always used."""
        return Choice(self._usual, "chosen by transformers")

    @torch.no_grad()
    def hidden_states(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Compute states ``[B, T, hidden_size]`` before the head; see :class:`LanguageModel`."""
        past = cache.length if cache else 0
        end = past + ids.shape[1]
        keys = torch.arange(end, device=ids.device)
        lengths: int | list[int] = length or end
        options: dict[str, Any] = {}
        if cache is not None:
            layers: list[Any] = [_Layer(layer) for layer in cache.layers]
            options[cache_name(self._base)] = Cache(layers=layers)
        if cache is not None and cache.begins:
            begins = torch.tensor(cache.begins, device=ids.device)[:, None]
            lengths = [(length or end) - begin for begin in cache.begins]
            options["attention_mask"] = (keys >= begins).long()
            keys = keys - begins
            options["position_ids"] = keys[:, past:]
        with self._encoding(keys[..., past:], keys, lengths):
            outputs = self._base(ids, use_cache=cache is not None, **options)
        states = outputs.last_hidden_state
        return states if last is None else states[:, -last:]

    @contextmanager
    def _encoding(
        self, positions: Tensor, keys: Tensor, lengths: int | list[int]
    ) -> Iterator[None]:
        """Encode queries and keys by the layout and show them, if it was changed or somebody
        observes.

        ``positions``, ``keys``: ``[T]`` and ``[Tk]``, or with a first dimension for rows.
        """
        if self._observe is None and self.layout.layers == self.own_layout.layers:
            yield
            return
        queries = of_keys = head_groups(self.layout, positions, lengths, self.hf.dtype)
        if keys is not positions:
            of_keys = head_groups(self.layout, keys, lengths, self.hf.dtype)
        last = int(positions.reshape(-1, positions.shape[-1])[0, -1])
        checked: list[Tables] = []

        def see(call: Call) -> tuple[Tensor, Tensor]:
            layer = self.layout.layers[call.index]
            if call.tables is not None and not any(call.tables is tables for tables in checked):
                self._check_tables(call.index, call.tables, last)
                checked.append(call.tables)
            plain_q, plain_k = call.q, call.k
            if self._order is not None:  # which leaves dot products unchanged
                plain_q, plain_k = plain_q[..., self._order], plain_k[..., self._order]
            q = encode_queries(plain_q, queries[call.index])
            k = encode_keys(plain_k, of_keys[call.index])
            if layer.intervention is not None:
                q, k = intervene(layer.intervention, q, k, positions, keys)
            if self._observe is not None:
                check_mask(call, layer.window)
                scores = {name: call.options.get(name) for name in ("scaling", "softcap")}
                sinks = call.options.get("s_aux")
                self._observe(call.index, plain_q, plain_k, q, k, sinks=sinks, **scores)
            return q, k

        with self._calls(see, plain=True):
            yield

    def _check_tables(self, index: int, tables: Tables, position: int) -> None:
        """Check that a layer's tables are those of its spectrum at the last position."""
        spectrum = self.own_layout.layers[index].spectra[0]
        if not spectrum.rotates:
            return
        table = complex_table(tables)[0, -1]
        cos, sin = rotary_table(spectrum, torch.tensor([position], device=table.device))
        if (table - torch.complex(cos[0], sin[0])).abs().amax() > APART:
            raise UserError(
                f"hf: the rotation of layer {index} follows the length of the text; expected texts "
                "within the length it was trained at"
            )

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Compute ``[..., vocab]`` with the model's own forward pass after its layers.

        It may cap, scale or shift the logits.
        """
        rows = states.reshape(1, -1, states.shape[-1])
        self._base.forward = lambda *_, **__: self._outputs(last_hidden_state=rows)
        try:
            logits = self.hf(torch.zeros(1, 1, dtype=torch.long, device=self.device)).logits
        finally:
            del self._base.forward
        return logits.view(*states.shape[:-1], -1)

    @torch.no_grad()
    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """Return each target's cross-entropy ``[...]``, float32 nats; logits in chunks."""
        size = chunk_size(self.vocab_size, states.device)
        rows, of_rows = states.flatten(0, -2).split(size), targets.flatten().split(size)
        losses = [
            F.cross_entropy(self.logits(x).float(), y, reduction="none")
            for x, y in zip(rows, of_rows, strict=True)
        ]
        return torch.cat(losses).view(targets.shape)

    def empty_cache(self, rows: int, capacity: int) -> KVCache:
        """Allocate a cache for ``capacity`` tokens in each of ``rows``."""
        like = torch.empty(0, dtype=self.hf.dtype, device=self.device)
        layers = (
            [like.new_zeros(rows, heads, capacity, size) for heads, size in shapes]
            for shapes in self._cached
        )
        return KVCache([LayerCache(keys, values) for keys, values in layers])

    @contextmanager
    def observed(self, on_layer: OnLayer) -> Iterator[None]:
        """Call ``on_layer`` for each layer, before its attention, in every forward pass within the
        block."""
        self._observe = on_layer
        try:
            yield
        finally:
            self._observe = None

    @contextmanager
    def feeding(self, on_input: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Call ``on_input`` with each attention's input within the block."""

        def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> None:
            on_input(index, args[0] if args else options["hidden_states"])

        with self._before(before):
            yield


@contextmanager
def _watching(watch: Watch) -> Iterator[None]:
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def check_mask(call: Call, window: int | None) -> None:
    """Check that the mask is causal, within the layer's window."""
    if call.mask is None:
        return
    T, mask = call.q.shape[2], call.mask
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if not torch.equal(
        *torch.broadcast_tensors(seen, allowed(Mask(window), range(T), range(T), mask.device))
    ):
        raise UserError(
            f"hf: layer {call.index} hides other keys than a window would, of {T:,} tokens: it "
            "attends in chunks, which shorter texts do not fill"
        )
