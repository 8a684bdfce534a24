"""Plan of a forward pass: what each layer reads besides its input, a function for each question.

Lists have an entry for each layer. Left padding copies numbers of each row to the device once a
pass; nothing else here causes a host sync.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trainer.model.attention import Change, LayerPass
from trainer.model.backends import Attend, Mask, prepared
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.positional.intervention import intervene
from trainer.positional.layout import Layout
from trainer.positional.rotation import Groups, bias_slopes, head_groups


@dataclass(frozen=True)
class Columns:
    """Tokens of a forward pass: those in the cache, then the new ones.

    ``positions``: of all of them, ``[Tk]``, or ``[B, Tk]`` if rows begin in different columns;
    negative before a row begins. ``new``: positions of the new tokens. ``queries``: positions that
    each layer computes. ``lengths``: tokens of the whole sequence, of all rows or of each row.
    ``begins``: ``[B]``, the column of each row's first token; None: 0. ``last``: as given.
    """

    positions: Tensor
    new: Tensor
    queries: list[Tensor]
    lengths: int | list[int]
    begins: Tensor | None = None
    cache: KVCache | None = None
    last: int | None = None


def columns_of(
    ids: Tensor, layers: int, cache: KVCache | None, length: int | None, last: int | None
) -> Columns:
    """Return the columns of new ids ``[B, T]``; ``length`` and ``last`` are those of
    :meth:`~trainer.model.language_model.LanguageModel.hidden_states`."""
    past = 0 if cache is None else cache.length
    positions = torch.arange(past + ids.shape[1], device=ids.device)
    whole = length or len(positions)
    lengths: int | list[int] = whole
    begins = None
    if cache is not None and cache.begins:
        begins = torch.tensor(cache.begins, device=ids.device)
        lengths = [whole - begin for begin in cache.begins]
        positions = positions - begins[:, None]
    new = positions[..., past:]
    queries = [new] * layers
    if last is not None:
        queries[-1] = new[..., -last:]
    return Columns(positions, new, queries, lengths, begins, cache, last)


def layer_passes(
    config: ModelConfig,
    layout: Layout,
    columns: Columns,
    mask: Mask,
    attends: Sequence[Attend],
    x: Tensor,
) -> list[LayerPass]:
    """Return what each layer reads besides its input.

    ``mask``: restrictions of all layers. ``attends``: their backends. ``x``: input of the first.
    """
    layers = len(layout.layers)
    plain = [False] * layers
    caches: Sequence[LayerCache | None] = [None] * layers
    if columns.cache is not None:
        plain = caches_plain_keys(layout, config.num_key_value_heads)
        caches = columns.cache.layers
    queries, keys = tables_of(layout, columns, plain, x.dtype)
    mask = replace(mask, begins=columns.begins)
    masks = masks_of(layout, columns, mask, attends, (len(x), config.num_attention_heads))
    changes = interventions_of(layout, columns, plain)
    passes = []
    for index, layer in enumerate(layout.layers):
        layer_pass = LayerPass(
            queries=queries[index],
            keys=keys[index],
            mask=masks[index],
            cache=caches[index],
            qk_norm=layer.qk_norm,
            caches_plain_keys=plain[index],
            intervene=changes[index],
        )
        passes.append(layer_pass)
    passes[-1] = replace(passes[-1], last=columns.last)
    return passes


def caches_plain_keys(layout: Layout, key_heads: int) -> list[bool]:
    """Return which layers encode cached keys again in each forward pass: their frequencies depend
    on the length, or each query head encodes its own copy of them."""
    plain = []
    for layer in layout.layers:
        follows_length = any(spectrum.long for spectrum, _ in layer.groups)
        plain.append(follows_length or len(layer.spectra) > key_heads)
    return plain


def tables_of(
    layout: Layout, columns: Columns, plain: Sequence[bool], dtype: torch.dtype
) -> tuple[list[Groups], list[Groups]]:
    """Return the tables of the queries, and those of the keys: of all keys in ``plain`` layers."""

    def at(positions: Tensor) -> list[Groups]:
        return head_groups(layout, positions, columns.lengths, dtype)

    keys = at(columns.new)
    queries = list(keys)
    if columns.last is not None:
        queries[-1] = at(columns.queries[-1])[-1]
    if any(plain) and columns.positions.shape != columns.new.shape:
        for index, all_keys in enumerate(at(columns.positions)):
            if plain[index]:
                keys[index] = all_keys
    return queries, keys


def masks_of(
    layout: Layout, columns: Columns, mask: Mask, attends: Sequence[Attend], shape: Sequence[int]
) -> list[Mask]:
    """Return the masks; equal ones share the backend's preparation.

    ``mask``: restrictions of all layers. ``attends``: their backends. ``shape``: rows, query heads.
    """
    rows, heads = shape
    keys = columns.positions.shape[-1]
    if mask.documents is not None and mask.documents.shape[1] > keys:
        mask = replace(mask, documents=mask.documents[:, :keys], bounds=None)
    device = columns.positions.device
    distinct: dict[tuple[Attend, int | None, tuple[bool, ...], int], Mask] = {}
    masks = []
    for layer, positions, attend in zip(layout.layers, columns.queries, attends, strict=True):
        window = layer.window if layer.window and layer.window < keys else None
        queries = positions.shape[-1]
        key = attend, window, layer.biased, queries
        if key not in distinct:
            slopes = bias_slopes(heads, layer.biased, device)
            of_layer = replace(mask, window=window, slopes=slopes)
            distinct[key] = prepared(attend, of_layer, (rows, queries), keys, device)
        masks.append(distinct[key])
    return masks


def interventions_of(
    layout: Layout, columns: Columns, plain: Sequence[bool]
) -> list[Change | None]:
    """Return the changes of encoded queries and keys; see :func:`tables_of` for ``plain``."""
    changes: list[Change | None] = []
    for layer, queries, is_plain in zip(layout.layers, columns.queries, plain, strict=True):
        keys = columns.positions if is_plain else columns.new
        change = None
        if layer.intervention is not None:
            change = partial(intervene, layer.intervention, q_positions=queries, k_positions=keys)
        changes.append(change)
    return changes
