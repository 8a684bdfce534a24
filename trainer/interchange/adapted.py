"""Any decoder of transformers from a local directory (``hf:DIRECTORY``), computed by transformers.

An attention function that is registered with transformers' ``AttentionInterface`` sees queries and
keys as they enter the scores. Each layer is run once with its tables of cosines and sines and once
with tables of no rotation; the channels of its pairs are those that transform the second result
into the first. To observe a model or to change its encoding, layers get tables of no rotation, and
the layout rotates in their place.

No code of a model is run and no pickle is read: the architecture must be transformers' own, and the
weights safetensors.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from trainer.common.errors import UserError
from trainer.hf.rotation import without_rotation
from trainer.interchange.hf_config import trained_and_reach
from trainer.interchange.published import load_quietly, read_config
from trainer.model.backends import Mask, allowed, cudnn_attention
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.model.language_model import LanguageModel, OnLayer
from trainer.model.plan import Columns, columns_of, interventions_of, tables_of
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rotation import encode, rotary_table, rotate
from trainer.positional.spectrum import Spectrum

PROBE_TOKENS = 16
"""Tokens that are read to see what the layers do."""
TOLERANCE = 1e-4
"""Of the largest entry: how far a rotation in float32 may be from the model's own."""

OF_TRANSFORMERS = None, "eager", "sdpa", "grouped_mm", "batched_mm"
"""Implementations that transformers has itself."""

Tables = Tensor | tuple[Tensor, Tensor]
"""What a layer is given as ``position_embeddings``: complex numbers, or cosines and sines."""


def read_adapted(directory: Path, dtype: torch.dtype = torch.float32) -> "AdaptedModel":
    """Load a model, determine the behaviour of its layers in float32, and convert its weights.

    Raises:
        UserError: transformers cannot compute it by itself, or its attention cannot be observed.
    """
    values = read_config(directory)
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise UserError(f"{directory}: model_type: {kind!r}: code of a model is never run")
    # For an implementation of another name, transformers may download a kernel and run it.
    unknown = [name for name in _implementations(values) if name not in OF_TRANSFORMERS]
    if unknown:
        raise UserError(f"{directory}: attn_implementation: {unknown} needs code of others")
    hf, info = load_quietly(directory, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"{directory}: tensors are missing: {', '.join(missing[:5])}")
    try:
        model = AdaptedModel(hf)
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    for parameter in model.parameters():  # rounded buffers would be wrong frequencies
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def _implementations(values: Any) -> list[Any]:
    """Return the values of keys that end in ``_implementation``, at any depth."""
    if isinstance(values, list):
        return [*chain.from_iterable(map(_implementations, values))]
    if not isinstance(values, dict):
        return []
    names = [value for key, value in values.items() if key.endswith("_implementation")]
    return names + _implementations([*values.values()])


Encoded = tuple[Tensor, Tensor]
"""Queries ``[B, Hq, T, D]`` and keys ``[B, Hkv, Tk, D]`` as they enter the scores."""
_WATCH: ContextVar[Callable[..., Encoded] | None] = ContextVar("watch", default=None)
"""Gets the arguments of every attention call and returns its queries and keys."""


@contextmanager
def _watching(watch: Callable[..., Encoded]) -> Iterator[None]:
    """Let ``watch`` see, and change, the queries and keys of every attention call in the block."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


class _Call(NamedTuple):
    """A call of attention: its module, queries and keys, and options."""

    module: nn.Module
    states: Encoded
    options: dict[str, Any]


def _calls(run: Callable[[], Any]) -> tuple[list[_Call], Any]:
    """Return all calls of attention in ``run()``, and its result."""
    calls: list[_Call] = []

    def note(module: nn.Module, q: Tensor, k: Tensor, *_: Any, **options: Any) -> Encoded:
        calls.append(_Call(module, (q, k), options))
        return q, k

    with _watching(note):
        return calls, run()


def _attend(
    implementation: str, module: nn.Module, q: Tensor, k: Tensor, *args: Any, **options: Any
) -> Any:
    """Compute attention as the model does by itself, of the queries and keys that a watch gives."""
    watch = _WATCH.get()
    if watch is not None:
        q, k = watch(module, q, k, *args, **options)
    if implementation == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
    with cudnn_attention(False):  # wrong with some masks, and plans for each new length
        return attend(module, q, k, *args, **options)


for _name, _mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
    AttentionInterface.register(f"unrope_{_name}", partial(_attend, _name))
    AttentionMaskInterface.register(f"unrope_{_name}", _mask)


class _Layer(DynamicLayer):
    """All tokens of a layer, even with a sliding window: masks hide what the window excludes."""

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self.cache = cache
        self.keys = cache.keys
        self.values = cache.values
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; return all keys and values so far."""
        return self.cache.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.cache.length


Order = tuple[int, ...]
"""A head's channels in spectrum order: pair m at m and m + pairs, then those that do not rotate."""


def _without_rotation(options: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's arguments with tables that leave queries and keys unchanged, if any."""
    if options.get("position_embeddings") is None:
        return options
    return options | {"position_embeddings": without_rotation(options["position_embeddings"])}


def first_step(tables: Tables) -> Tensor:
    """Return the rotations ``[pairs]`` of position 1 as complex128.

    Cosines and sines have every number once, or twice: in both halves or side by side.
    """
    if isinstance(tables, Tensor):
        return tables[0, 1].to(torch.complex128)
    both = torch.complex(*(table[0, 1].double() for table in tables))
    pairs = len(both) // 2
    if torch.equal(both[:pairs], both[pairs:]):
        return both[:pairs]
    return both[::2] if torch.equal(both[::2], both[1::2]) else both


def _possible_orders(rotary_dim: int, size: int) -> Iterator[Order]:
    """Yield the known arrangements of pairs: halves or neighbours of the first or last channels."""
    if rotary_dim > size:
        return
    for start in (0, size - rotary_dim):
        channels = range(start, start + rotary_dim)
        still = (*range(start), *range(start + rotary_dim, size))
        yield (*channels, *still)
        yield (*channels[::2], *channels[1::2], *still)


def rotation_of(
    plain: Encoded, rotated: Encoded, tables: Tables | None
) -> tuple[Spectrum, Order | None]:
    """Determine a layer's spectrum, and the order of its channels (None: nothing rotates).

    ``plain``, ``rotated``: a few tokens' queries and keys at positions 0, 1, ..., with tables of no
    rotation and with the layer's own ``tables`` (None: it gets none). Raise a UserError if no known
    arrangement fits.
    """
    if all(map(torch.equal, plain, rotated)):
        return Spectrum(), None
    assert tables is not None  # without tables, both are the same
    once = first_step(tables)
    scale = once.abs().mean().item()
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    spectrum = Spectrum(tuple(once.angle().tolist()), rotary_scale=scale)
    T, size = rotated[0].shape[-2:]
    cos, sin = rotary_table(spectrum, torch.arange(T, device=once.device))
    for order in _possible_orders(spectrum.rotary_dim, size):
        turned = [rotate(x[..., order], cos, sin) for x in plain]
        pairs = zip(turned, rotated, strict=True)
        if all((x - y[..., order]).abs().amax() <= TOLERANCE * y.abs().amax() for x, y in pairs):
            return spectrum, order
    raise UserError("a layer rotates queries and keys in an unknown way")


class AdaptedModel(LanguageModel):
    """A causal model of transformers, without gradients.

    Its layout is determined from the behaviour of its layers. Channels of queries and keys are
    reordered to the order of spectra, which leaves dot products unchanged. ``hf`` is in float32.
    Its layout can change in the spectra of key-value heads and in interventions, nothing else.

    Raises:
        UserError: its attention cannot be observed, or rotates in an unknown way.
    """

    @torch.no_grad()
    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf.eval()
        models = [module for module in hf.children() if isinstance(module, PreTrainedModel)]
        if not models:
            raise UserError(f"expected a model below a head, got {type(hf).__name__} alone")
        self._base: Any = models[0].get_decoder()
        hf.set_attn_implementation(f"unrope_{hf.config._attn_implementation}")
        self._observe: OnLayer | None = None
        text = hf.config.get_text_config()
        ids = torch.arange(PROBE_TOKENS, 0, -1, device=self.device)[None]
        self._note_layers(ids, text.num_hidden_layers)
        layers, orders, shapes = self._try_layers(ids)
        if len(orders) > 1 or len(shapes) > 1:
            raise UserError("expected layers with heads of one kind")
        ((_, heads, _, size), (_, kv_heads, _, _)) = shapes.pop()
        order = [*next(iter(orders), range(size))]
        self._order = order if order != sorted(order) else None
        self.own_layout = self.layout = self._with_lengths(text, tuple(layers))
        self.config = ModelConfig(
            hidden_size=text.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            num_hidden_layers=len(layers),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=size,
            vocab_size=text.vocab_size,
            tie_word_embeddings=bool(getattr(hf.config, "tie_word_embeddings", False)),
        )
        first = hf(ids, use_cache=False).logits[:, :1]
        if (self(ids[:, :1]) - first).abs().max() > TOLERANCE * first.abs().max():
            raise UserError("the first logits depend on later tokens, or not on the last layer")

    def _note_layers(self, ids: Tensor, depth: int) -> None:
        """Note the attention layers, the type of the outputs and the shapes in the cache."""
        calls, outputs = _calls(lambda: self._base(ids, use_cache=True))
        self.attentions = [call.module for call in calls]
        if len(calls) != depth or len({*self.attentions}) != depth:
            raise UserError(
                f"{len(calls)} of its {depth} layers call attention through transformers' "
                "AttentionInterface; expected all, each once"
            )
        layers = getattr(outputs.cache, "layers", [])
        kinds = {type(layer) for layer in layers}
        if not kinds or kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise UserError("expected layers that keep nothing but keys and values of tokens")
        self._outputs = type(outputs)
        # Heads and channels of keys and of values, which differ where compressed ones are cached.
        self._cached = [(x.keys.shape[1::2], x.values.shape[1::2]) for x in layers]

    def _try_layers(
        self, ids: Tensor
    ) -> tuple[list[LayerEncoding], set[Order], set[tuple[torch.Size, ...]]]:
        """Run each layer with and without its rotation.

        Returns the encodings of the layers, the orders of channels of those that rotate, and the
        shapes of queries and keys.
        """
        layers: list[LayerEncoding] = []
        orders: set[Order] = set()
        shapes: set[tuple[torch.Size, ...]] = set()
        has_frequencies = any("inv_freq" in name for name, _ in self.hf.named_buffers())

        def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> None:
            still = _without_rotation(options)
            (plain,), _ = _calls(lambda: module.forward(*args, **still))
            (rotated,), _ = _calls(lambda: module.forward(*args, **options))
            tables = options.get("position_embeddings")
            if tables is None and has_frequencies:  # it rotates past the tables
                raise UserError("a layer rotates queries and keys in an unknown way")
            spectrum, order = rotation_of(plain.states, rotated.states, tables)
            if order is not None:
                orders.add(order)
            shapes.add(tuple(x.shape for x in plain.states))
            kv_heads = plain.states[1].shape[1]
            window = rotated.options.get("sliding_window")
            layers.append(LayerEncoding((spectrum,) * kv_heads, window))

        with self.before_attention(before):
            self._base(ids, use_cache=False)
        return layers, orders, shapes

    def _with_lengths(self, text: Any, layers: tuple[LayerEncoding, ...]) -> Layout:
        """Return the layout with the lengths of a configuration.

        ``_short``: tokens up to which frequencies are those of the layout (None: any number).
        """
        longest = text.max_position_embeddings
        ropes = getattr(text, "rope_parameters", None) or {}
        ropes = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
        kinds = {rope.get("rope_type") for rope in ropes}
        if "dynamic" in kinds:
            raise UserError("rope_type: 'dynamic' depends on the texts read before")
        lengths = [trained_and_reach(rope, longest) for rope in ropes]
        trained, _ = min(lengths)
        self._short = trained if "longrope" in kinds else None
        layout = Layout(longest, layers)
        if layout.rotates:  # a drop is written with lengths that mean nothing
            layout = Layout(trained, layers, max(reach for _, reach in lengths))
        return layout

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.hf.device

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
        columns = columns_of(ids, len(self.attentions), cache, length, last=None)
        options: dict[str, Any] = {}
        if cache is not None:
            layers: list[Any] = [_Layer(layer) for layer in cache.layers]
            options["cache"] = Cache(layers=layers)
        if columns.begins is not None:
            options["attention_mask"] = (columns.positions >= 0).long()
            options["position_ids"] = columns.new
        is_changed = self._observe is not None or self.layout.layers != self.own_layout.layers
        if self._short is not None and columns.positions.shape[-1] > self._short:
            shortest = 0 if cache is None else cache.length - max(cache.begins, default=0)
            if is_changed or 0 < shortest <= self._short:
                raise UserError(f"hf: its rotation follows lengths beyond {self._short} tokens")
        with self._encoding(columns) if is_changed else nullcontext():
            outputs = self._base(ids, use_cache=cache is not None, **options)
        states = outputs.last_hidden_state
        return states if last is None else states[:, -last:]

    @contextmanager
    def _encoding(self, columns: Columns) -> Iterator[None]:
        """Encode queries and keys by the layout within the block, and show them to an observer."""
        plain = [True] * len(self.attentions)  # the model caches keys without rotation
        queries, keys = tables_of(self.layout, columns, plain, self.hf.dtype)
        changes = interventions_of(self.layout, columns, plain)

        def encode_and_show(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any
        ) -> Encoded:
            index = self.attentions.index(module)
            if self._order is not None:  # which leaves dot products unchanged
                q, k = q[..., self._order], k[..., self._order]
            rotated_q = encode(q, queries[index], tempered=True)
            rotated_k = encode(k, keys[index])
            change = changes[index]
            if change is not None:
                rotated_q, rotated_k = change(rotated_q, rotated_k)
            if self._observe is not None:
                check_mask(attention_mask, q.shape[2], self.layout.layers[index].window)
                scores = {name: options.get(name) for name in ("scaling", "softcap")}
                sinks = options.get("s_aux")
                self._observe(index, q, k, rotated_q, rotated_k, sinks=sinks, **scores)
            return rotated_q, rotated_k

        def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
            return args, _without_rotation(options)

        with self.before_attention(before), _watching(encode_and_show):
            yield

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

    def empty_cache(self, rows: int, capacity: int) -> KVCache:
        """Allocate a cache for ``capacity`` tokens in each of ``rows``."""
        like = torch.empty(0, dtype=self.hf.dtype, device=self.device)
        layers = []
        for shapes in self._cached:
            keys, values = (like.new_zeros(rows, n, capacity, size) for n, size in shapes)
            layers.append(LayerCache(keys, values))
        return KVCache(layers)

    @contextmanager
    def observed(self, on_layer: OnLayer) -> Iterator[None]:
        """Call ``on_layer`` for each layer, before its attention, in every forward pass within the
        block."""
        self._observe = on_layer
        try:
            yield
        finally:
            self._observe = None


def check_mask(mask: Tensor | None, tokens: int, window: int | None) -> None:
    """Check that a mask, booleans or a bias, is causal and within the window."""
    if mask is None:
        return
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    expected = allowed(Mask(window), range(tokens), range(tokens), mask.device)
    if not torch.equal(*torch.broadcast_tensors(seen, expected)):
        raise UserError(
            f"hf: {tokens:,} tokens: a layer hides other keys than a window would; it attends in "
            "chunks, which shorter texts do not fill"
        )
