"""The drop: a pure function from one layout to another (DroPE, Sec. 5).

Dropping the encoding of every layer is the paper's method; other targets and chosen layers are the
same function.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum
from trainer.recalibration.config import DropConfig


def drop(
    layout: Layout,
    *,
    layers: Collection[int] | None = None,
    to: Spectrum | None = None,
    qk_norm: bool = False,
) -> Layout:
    """``layout`` with the encoding of some layers replaced.

    Args:
        layout: what the model has now.
        layers: indices, negative ones counting from the last; None for all.
        to: the new spectrum of every head; None for the empty one (NoPE).
        qk_norm: also turn the query and key norms of these layers on.

    Raises:
        ValueError: an index is out of range.
    """
    depth = len(layout.layers)
    chosen = set(range(depth)) if layers is None else {_index(i, depth) for i in layers}
    target = to or Spectrum()

    def changed(layer: LayerEncoding) -> LayerEncoding:
        return replace(layer.map(lambda _: target), qk_norm=layer.qk_norm or qk_norm)

    layers_now = (changed(x) if i in chosen else x for i, x in enumerate(layout.layers))
    return replace(layout, layers=tuple(layers_now))


def dropped_layout(
    layout: Layout,
    positional: PositionalConfig,
    settings: DropConfig,
    head_dim: int,
    qk_norm: bool = False,
) -> Layout:
    """The layout of a run after the drop that its configuration asks for.

    Args:
        layout: before it.
        positional: the parameters of encodings.
        settings: what replaces which layers' encoding.
        head_dim: channels a head.
        qk_norm: also turn the query and key norms of these layers on.

    Raises:
        UserError: the new encoding cannot be had.
    """
    target = build_layout(
        replace(positional, layers=[settings.to], windows=[None], heads={}),
        num_layers=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        training_length=layout.training_length,
    )
    (to,) = target.spectra
    return drop(layout, layers=settings.layers, to=to, qk_norm=qk_norm)


def _index(index: int, depth: int) -> int:
    if not -depth <= index < depth:
        raise ValueError(f"layer {index} does not exist in a model of {depth} layers")
    return index % depth
