"""Any decoder of transformers from a local directory (``hf:DIRECTORY``), computed by transformers.

Nearly all models of transformers 5 call attention by a name registered with its
``AttentionInterface``. A name of ours routes the call through :class:`Seam`, with queries and keys
as they enter the scores, and then to the function that the model would have called. Layers get
tables of cosines and sines, which differ in form and in the channels of a pair: halves of a head
(Llama), of its first channels only (Phi), neighbours (Llama 4), or neighbours among the last
channels (DeepSeek-V2). Each layer is run once with its tables and once with tables of no rotation;
its arrangement is the one that transforms the second result into the first.

No code of a model is run and no pickle is read: the architecture must be transformers' own, and the
weights safetensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from trainer.common.errors import UserError
from trainer.interchange.hf_config import named_bos, trained_and_reach
from trainer.interchange.pretrained import read_config, read_tokenizer
from trainer.interchange.token_files import eos_ids, read_token_files, stop_ids
from trainer.model.backends import Choice, Mask, allowed
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.model.language_model import LanguageModel, OnLayer
from trainer.model.loss import chunk_size
from trainer.positional.intervention import Intervene
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rotation import Groups, head_groups, rotary_table, rotate
from trainer.positional.spectrum import Spectrum

Tables = Tensor | tuple[Tensor, Tensor]
"""What a layer is given as ``position_embeddings``: complex numbers, or cosines and sines."""

CLOSE = 1e-4
"""Of the largest entry: how far a rotation in float32 may be from the model's own."""


@dataclass(frozen=True)
class Rotation:
    """Rotation of one layer.

    ``spectrum``: of every head. ``order``: the layer's channels in spectrum order: pair m at m and
    m + pairs, then the channels that do not rotate (None: unchanged). ``form``: form of its tables,
    see :func:`complex_table` (None: it has none).
    """

    spectrum: Spectrum
    order: tuple[int, ...] | None = None
    form: str | None = None

    def ordered(self, x: Tensor) -> Tensor:
        """Reorder the channels of ``[..., D]``."""
        return x if self.order is None else x[..., list(self.order)]


def no_rotation(tables: Tables) -> Tables:
    """Return tables of the same form that leave queries and keys unchanged."""
    if isinstance(tables, Tensor):
        return torch.ones_like(tables)
    return torch.ones_like(tables[0]), torch.zeros_like(tables[1])


def complex_table(tables: Tables) -> tuple[str, Tensor]:
    """Return the form of tables, and their values ``[B, T, pairs]`` as complex128.

    ``complex``: one number per pair; ``halves``, ``neighbours``: every cosine twice, in both halves
    or side by side; ``single``: once.
    """
    if isinstance(tables, Tensor):
        return "complex", tables.to(torch.complex128)
    cos, sin = (table.double() for table in tables)
    pairs = cos.shape[-1] // 2
    both = torch.complex(cos, sin)
    if torch.equal(both[..., :pairs], both[..., pairs:]):
        return "halves", both[..., :pairs]
    if torch.equal(both[..., ::2], both[..., 1::2]):
        return "neighbours", both[..., ::2]
    return "single", both


def tables_like(original: Tables, form: str | None, cos: Tensor, sin: Tensor) -> Tables:
    """Convert ``[T, pairs]`` or ``[B, 1, T, pairs]`` to a form, with the dtypes of ``original``."""
    if isinstance(original, Tensor):
        return torch.complex(*_rows(cos, sin)).to(original.dtype).expand_as(original)
    if form == "halves":
        cos, sin = (x.repeat(*[1] * (x.dim() - 1), 2) for x in (cos, sin))
    elif form == "neighbours":
        cos, sin = (x.repeat_interleave(2, dim=-1) for x in (cos, sin))
    cos, sin = _rows(cos, sin)
    first, second = original
    return cos.to(first.dtype).expand_as(first), sin.to(second.dtype).expand_as(second)


def _rows(*tables: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of tables, ``[B or 1, T, n]``."""
    return tuple(x.squeeze(1) if x.dim() == 4 else x[None] for x in tables)


def found_rotation(
    tables: Tables | None, plain: tuple[Tensor, Tensor] | None, encoded: tuple[Tensor, Tensor]
) -> Rotation | None:
    """Determine the rotation from ``plain`` to ``encoded`` queries and keys, ``[B, H, T, D]``
    float32.

    Args:
        tables: tables for positions 0, 1, ..., T - 1, with T at least 2.
        plain: result with the tables of no rotation (None: unknown).
        encoded: result with ``tables``.

    Returns:
        None if no known arrangement fits.
    """
    if plain is None:
        return None
    form, table = (None, None) if tables is None else complex_table(tables)
    if all(torch.equal(x, y) for x, y in zip(plain, encoded, strict=True)):
        return Rotation(Spectrum(), None, form)
    if table is None:
        return None
    once = table[0, 1]
    scale = once.abs().mean().item()
    spectrum = Spectrum(
        tuple(once.angle().tolist()), rotary_scale=1.0 if abs(scale - 1) < 1e-6 else scale
    )
    size = encoded[0].shape[-1]
    for order in _orders(size, spectrum.rotary_dim):
        rotation = Rotation(spectrum, order, form)
        if all(_leads(rotation, x, y) for x, y in zip(plain, encoded, strict=True)):
            return rotation
    return None


def _leads(rotation: Rotation, plain: Tensor, encoded: Tensor) -> bool:
    positions = torch.arange(plain.shape[2], device=plain.device)
    turned = rotate(rotation.ordered(plain), *rotary_table(rotation.spectrum, positions))
    far = (turned - rotation.ordered(encoded)).abs().amax()
    return bool(far <= CLOSE * encoded.abs().amax())


def _orders(size: int, rotated: int) -> list[tuple[int, ...] | None]:
    """List arrangements of the ``rotated`` channels of a head: halves and neighbours, first or
    last."""
    if rotated > size:
        return []
    orders: list[tuple[int, ...] | None] = []
    for start in dict.fromkeys((0, size - rotated)):
        rotating = range(start, start + rotated)
        still = [*range(start), *range(start + rotated, size)]
        orders.append(None if start == 0 else (*rotating, *still))
        orders.append(tuple(chain(rotating[::2], rotating[1::2], still)))
    return orders


def in_one_order(rotations: list[Rotation]) -> list[Rotation]:
    """Give layers without rotation the channel order of the rotating ones."""
    order = next((r.order for r in rotations if r.spectrum.rotates), None)
    return [r if r.spectrum.rotates else replace(r, order=order) for r in rotations]


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
            raise UserError(
                f"{len(self.modules)} of its {depth} layers call attention through transformers' "
                "AttentionInterface; expected all"
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


TRIED = 16
"""Tokens that are read to see what the layers do."""
CAUSAL = 1e-5
"""Of the largest state: how far a later token may move those of earlier tokens."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""What families call the number that their norms add."""
APART = 0.05
"""Between tables of cosines and those of the spectrum: the float32 phases of a model are off by so
much at position 10^6."""


class AdaptedModel(LanguageModel):
    """A causal model of transformers, without gradients.

    Its layout is determined from the behaviour of its layers. Channels of queries and keys are
    reordered to the order of spectra, which leaves dot products unchanged. A layout assigned later
    must rotate the same pairs, at any frequency or not at all, and equally in all heads of a layer.
    ``hf`` is in float32.

    Raises:
        UserError: its attention cannot be observed, or rotates in an unknown way.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf.eval()
        text = hf.config.get_text_config()
        self._base = next(m for m in hf.children() if isinstance(m, PreTrainedModel))
        self._seam = Seam(hf, text.num_hidden_layers)
        calls = self._tried()
        q, k = calls[0].q, calls[0].k
        if any(c.q.shape != q.shape or c.k.shape != k.shape for c in calls):
            raise UserError("expected layers with heads of one shape")
        self.rotations = in_one_order([self._rotation(call) for call in calls])
        layers = (
            LayerEncoding(((rotation.spectrum, k.shape[1]),), call.window)
            for rotation, call in zip(self.rotations, calls, strict=True)
        )
        ropes = getattr(text, "rope_parameters", None) or {}
        by_type = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
        lengths = [trained_and_reach(rope, text.max_position_embeddings) for rope in by_type]
        self.own_layout = Layout(min(lengths)[0], tuple(layers), max(r for _, r in lengths))
        self._layout = self.own_layout
        eps = next((e for name in EPSILONS if (e := getattr(text, name, None)) is not None), None)
        self.config = ModelConfig(
            hidden_size=text.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            num_hidden_layers=len(calls),
            num_attention_heads=q.shape[1],
            num_key_value_heads=k.shape[1],
            head_dim=q.shape[-1],
            vocab_size=text.vocab_size,
            tie_word_embeddings=bool(text.tie_word_embeddings),
            **({} if eps is None else {"rms_norm_eps": eps}),
        )
        self._observe: OnLayer | None = None
        self._checked: set[tuple[int, int, int]] = set()

    @torch.no_grad()
    def _tried(self) -> list[Call]:
        """Run a few tokens; return the attention call of every layer, and record the shapes in the
        cache.

        Raises:
            UserError: tokens see later ones.
        """
        calls: list[Call] = []

        def see(call: Call) -> tuple[Tensor, Tensor]:
            calls.append(call)
            return call.q, call.k

        vocab_size = self.hf.config.get_text_config().vocab_size
        ids = torch.arange(TRIED, device=self.device)[None] % vocab_size
        with self._seam.watching(see, plain=True):
            self.hf(ids, use_cache=False)
        outputs = self._base(ids, use_cache=True)
        ids[:, -1] = ids[:, 0]
        before, after = outputs.last_hidden_state, self._base(ids).last_hidden_state
        if (after - before)[:, :-1].abs().amax() > CAUSAL * before.abs().amax():
            raise UserError("expected a causal model, but its tokens see later ones")
        self._outputs = type(outputs)
        # Heads and channels of keys and of values, which differ where compressed ones are cached.
        self._cached = [
            (layer.keys.shape[1::2], layer.values.shape[1::2])
            for layer in outputs[cache_name(self._base)].layers
        ]
        return calls

    def _rotation(self, call: Call) -> Rotation:
        """Determine the rotation of one layer from its behaviour."""
        inside = call.tables is None and any("inv_freq" in n for n, _ in self.hf.named_buffers())
        rotation = None if inside else found_rotation(call.tables, call.plain, (call.q, call.k))
        if rotation is None:
            raise UserError(f"layer {call.index} rotates queries and keys in an unknown way")
        return rotation

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
        for new, trained, rotation in zip(
            layout.layers, self.own_layout.layers, self.rotations, strict=True
        ):
            pairs = len(new.groups[0][0].inv_freq)
            if (
                len(new.groups) > 1
                or len(new.spectra) != len(trained.spectra)
                or (new.window, new.qk_norm) != (trained.window, trained.qk_norm)
                or any(s.alibi for s in new.spectra)
                or (pairs and pairs != len(rotation.spectrum.inv_freq))
            ):
                raise UserError(
                    "hf: a model that transformers computes cannot have heads that differ, other "
                    "windows, other pairs or a bias"
                )
        self._layout = layout

    def use_backend(self, name: str, device: str, **needs: Any) -> Choice:
        """Report transformers' own backend, which is always used."""
        return Choice(self._seam.usual, "chosen by transformers")

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
        columns = torch.arange(end, device=ids.device)
        positions, keys = columns[past:], columns
        lengths: int | list[int] = length or end
        options: dict[str, Any] = {}
        if cache is not None:
            options[cache_name(self._base)] = as_transformers_cache(cache)
        if cache is not None and cache.begins:
            begins = torch.tensor(cache.begins, device=ids.device)[:, None]
            lengths = [(length or end) - begin for begin in cache.begins]
            options["attention_mask"] = (columns >= begins).long()
            positions, keys = positions - begins, keys - begins
            options["position_ids"] = positions
        if cache is not None and self.layout.frequencies_follow_length:
            raise UserError(
                "hf: transformers keeps rotated keys, so frequencies cannot follow the length"
            )
        with self._passing(positions, keys, lengths):
            outputs = self._base(ids, use_cache=cache is not None, **options)
        states = outputs.last_hidden_state
        return states if last is None else states[:, -last:]

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
        with self._seam.feeding(on_input):
            yield

    def _passing(self, positions: Tensor, keys: Tensor, lengths: int | list[int]) -> Any:
        """Return the context of a forward pass, which observes or modifies it if necessary."""
        changed = self.layout.layers != self.own_layout.layers
        if not changed and self._observe is None:
            return nullcontext()
        groups = head_groups(self.layout, positions, lengths) if changed else []
        last, longest = 0, 0
        if changed:  # the last position of the first row, and the last of all
            rows = positions.reshape(-1, positions.shape[-1])
            last, longest = int(rows[0, -1]), int(rows[:, -1].max())

        def see(call: Call) -> tuple[Tensor, Tensor]:
            call = ordered(call, self.rotations[call.index].ordered)
            if groups:
                call = self._turned(call, groups[call.index], positions, keys)
            if self._observe is not None:
                self._show(self._observe, call, by_itself=not groups)
            return call.q, call.k

        def tables(index: int, original: Tables) -> Tables:
            group, form = groups[index][0], self.rotations[index].form
            # Otherwise the spectrum's frequencies would be taken for length-dependent ones.
            if (index, last, longest) not in self._checked:
                check_tables(index, original, self.rotations[index], last)
                self._checked.add((index, last, longest))
            if group.cos is None or group.sin is None:
                return no_rotation(original)
            return tables_like(original, form, group.cos, group.sin)

        return self._seam.watching(
            see,
            plain=self._observe is not None,
            tables=tables if groups else None,
        )

    def _turned(self, call: Call, groups: Groups, positions: Tensor, keys: Tensor) -> Call:
        """Apply the layout's temperature and intervention; the tables have rotated queries and
        keys."""
        q, k, temperature = call.q, call.k, groups[0].temperature
        if temperature is not None:
            q = (q * temperature).to(q.dtype)
        if (wanted := self.layout.layers[call.index].intervention) is not None:
            q, k = Intervene(wanted)(q, k, positions, keys)
        return replace(call, q=q, k=k)

    def _show(self, observe: OnLayer, call: Call, *, by_itself: bool) -> None:
        """Inform the observer after checking that the layer behaves as the layout says."""
        check_scores(call, self.layout.layers[call.index].window)
        if by_itself and call.tables is not None:
            rotation, last = self.rotations[call.index], call.q.shape[2] - 1
            check_tables(call.index, call.tables, rotation, last)
        assert call.plain is not None  # requested whenever there is an observer
        softmax = {name: getattr(call, name) for name in ("scaling", "softcap", "sinks")}
        observe(call.index, *call.plain, call.q, call.k, **softmax)


def check_scores(call: Call, window: int | None) -> None:
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


def check_tables(index: int, tables: Tables, rotation: Rotation, position: int) -> None:
    """Check that one layer's tables are those of its spectrum at the last position."""
    if not rotation.spectrum.rotates:
        return
    table = complex_table(tables)[1][0, -1]
    positions = torch.tensor([position], device=table.device)
    cos, sin = (x[0] for x in rotary_table(rotation.spectrum, positions))
    if (table - torch.complex(cos, sin)).abs().amax() > APART:
        raise UserError(
            f"hf: the rotation of layer {index} follows the length of the text; expected texts "
            "within the length it was trained at"
        )


PREFIX = "hf:"
"""Before the directory of a model that transformers is to compute."""
IMPLEMENTATIONS = (None, "eager", "sdpa", "grouped_mm", "batched_mm")
"""Implementations of attention and experts that a configuration may ask for. For any other name,
transformers may download a kernel from the hub and run it."""


@dataclass(frozen=True)
class Adapted:
    """A model that was found and tried; ``load`` reads its weights again.

    ``bos_token``: see :func:`~trainer.interchange.hf_config.named_bos`. ``eos`` and ``stops``: see
    :func:`~trainer.interchange.token_files.eos_ids` and ``stop_ids`` there.
    """

    path: Path
    tokenizer: Tokenizer
    config: ModelConfig
    layout: Layout
    computed_by: str
    bos_token: int | None
    eos: tuple[int, ...]
    stops: frozenset[int]

    def load(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LanguageModel:
        """Load the model onto a device in ``dtype``; it is converted before it gets there."""
        return _read(self.path).to(dtype).to(device)


def read_adapted(name: str) -> Adapted:
    """Find the model that ``hf:DIRECTORY`` names, and determine the behaviour of its layers.

    Reads its weights without keeping them.

    Raises:
        UserError: transformers cannot compute it by itself, or its attention cannot be observed.
    """
    path = Path(name.removeprefix(PREFIX)).expanduser()
    values = read_config(path)
    _check_own(path, values)
    if (tokenizer := read_tokenizer(path)) is None:
        raise UserError(f"{name}: there is no tokenizer.json beside its weights")
    settings, model = read_token_files(path), _read(path)
    return Adapted(
        path,
        tokenizer,
        model.config,
        model.layout,
        f"transformers {version('transformers')}",
        named_bos(values),
        eos_ids(settings, tokenizer),
        stop_ids(settings, tokenizer),
    )


def _check_own(path: Path, values: dict[str, Any]) -> None:
    """Refuse models for which transformers would read or run something outside their directory."""
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"{path}: model_type: {kind!r} needs code, and code of a model is never run"
        )
    if (path / "adapter_config.json").exists() or values.get("transformers_weights") is not None:
        raise UserError(f"{path}: adapter_config.json and transformers_weights are not supported")
    for key, value in _implementations(values):
        if value not in IMPLEMENTATIONS:
            raise UserError(f"{path}: {key}: expected one of {IMPLEMENTATIONS[1:]}, got {value!r}")
    ropes = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if "dynamic" in (ropes.get("rope_type"), ropes.get("type")):
        raise UserError(f"{path}: rope_type: 'dynamic' depends on the texts read before")


def _implementations(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every ``*_implementation`` key at any depth, with its value."""
    for key, value in values.items():
        if str(key).endswith("_implementation"):
            yield key, value
        elif isinstance(value, dict):
            yield from _implementations(value)


def _read(path: Path) -> AdaptedModel:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{path}: tensors are missing: {', '.join(missing[:5])}")
    return AdaptedModel(model)
