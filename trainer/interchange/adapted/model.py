"""A transformers model as a :class:`LanguageModel`: read, observed, and rotated differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from trainer.common.errors import UserError
from trainer.interchange.adapted.rotation import (
    Rotation,
    Tables,
    complex_table,
    forget_lengths,
    found_rotation,
    grows_with_length,
    in_one_order,
    no_rotation,
    tables_like,
)
from trainer.interchange.adapted.seam import (
    Call,
    Seam,
    as_transformers_cache,
    cache_name,
    ordered,
)
from trainer.model.backends import Choice, Mask, allowed
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.model.language_model import LanguageModel, OnLayer
from trainer.model.loss import chunk_size
from trainer.positional.intervention import Intervene
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.rotation import Groups, head_groups, rotary_table

TRIED = 16
"""Tokens that are read to see what the layers do."""
CAUSAL = 1e-5
"""Of the largest state: how far a later token may move those of earlier tokens."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""What families call the number that their norms add."""
APART = 0.05
"""Between tables of cosines and those of the spectrum: the float32 phases of a model are off by so
much at position 10^6."""
LENGTHS = "analysis.length, or evaluation.choice.length and evaluation.lengths"
"""Keys of the texts that are watched."""


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
        if getattr(text, "max_position_embeddings", None) is None:
            raise UserError.at(
                "config.json", "max_position_embeddings: missing; expected the training length."
            )
        self._base = next(m for m in hf.children() if isinstance(m, PreTrainedModel))
        self._seam = Seam(hf, text.num_hidden_layers)
        calls = self._tried()
        q, k = calls[0].q, calls[0].k
        if any(c.q.shape != q.shape or c.k.shape != k.shape for c in calls):
            raise UserError.at(
                "", "its layers have heads of different shapes; expected one for all."
            )
        self.rotations = in_one_order([self._rotation(call) for call in calls])
        layers = (
            LayerEncoding(((rotation.spectrum, k.shape[1]),), call.window)
            for rotation, call in zip(self.rotations, calls, strict=True)
        )
        self.own_layout = Layout(text.max_position_embeddings, tuple(layers))
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
        self._grows = grows_with_length(hf)
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
            raise UserError.at("", "its tokens see later ones; expected a causal model.")
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
            raise UserError.at(
                "",
                f"layer {call.index} rotates queries and keys in an unknown way, so that the "
                "unrotated ones cannot be computed.",
            )
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
                raise UserError.at(
                    "checkpoint",
                    "a model that transformers computes (hf:) cannot be given heads that differ, "
                    "other windows, other pairs or a bias; that needs the decoder of this "
                    "program.",
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
        if cache is not None and cache.begins and self._grows:
            return self._rows(ids, cache, length, last)
        past = cache.length if cache else 0
        if not past or self._grows:
            forget_lengths(self.hf)
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
            raise UserError.at(
                "checkpoint",
                "a model that transformers computes (hf:) keeps rotated keys; frequencies that "
                "follow the length need the decoder of this program.",
            )
        with self._passing(positions, keys, lengths):
            outputs = self._base(ids, use_cache=cache is not None, **options)
        states = outputs.last_hidden_state
        return states if last is None else states[:, -last:]

    def _rows(self, ids: Tensor, cache: KVCache, length: int | None, last: int | None) -> Tensor:
        """Compute states of rows of several lengths, each with the frequencies of its own."""
        past, states = cache.length, []
        end = past + ids.shape[1]
        for row, begin in enumerate(cache.begins):
            alone = cache.part(row, 1, begin)
            alone.fill((), past - begin)
            of_row = (length or end) - begin
            states.append(
                self.hidden_states(ids[row : row + 1], cache=alone, length=of_row, last=last)
            )
        cache.fill(cache.begins, end)
        return torch.cat(states)

    def follows_length(self, length: int) -> bool:
        """Whether keys depend on the number of tokens of the text; see :class:`LanguageModel`."""
        return self._grows or super().follows_length(length)

    def _is_long(self, ids: Tensor) -> bool:
        """Whether to read in chunks: a chunk would get the frequencies of a shorter text."""
        return not self._grows and super()._is_long(ids)

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
        raise UserError.at(
            "checkpoint",
            f"layer {call.index} hides other keys than a window would (attention in chunks), of "
            f"{T:,} tokens; give shorter texts ({LENGTHS}).",
        )


def check_tables(index: int, tables: Tables, rotation: Rotation, position: int) -> None:
    """Check that one layer's tables are those of its spectrum at the last position."""
    if not rotation.spectrum.rotates:
        return
    table = complex_table(tables)[1][0, -1]
    positions = torch.tensor([position], device=table.device)
    cos, sin = (x[0] for x in rotary_table(rotation.spectrum, positions))
    if (table - torch.complex(cos, sin)).abs().amax() > APART:
        raise UserError.at(
            "checkpoint",
            f"the rotation of layer {index} follows the length of the text; give texts within the "
            f"length it was trained at ({LENGTHS}).",
        )
