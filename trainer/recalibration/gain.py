"""Gains for query and key norms that come on in a trained model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.model.attention import RMSNorm
from trainer.model.decoder import Decoder


@torch.no_grad()
def input_sizes(model: Decoder, batches: Sequence[Tensor]) -> dict[RMSNorm, float]:
    """The RMS that the input of every query and key norm has on ``batches``, each ``[B, T]`` token
    ids, of one size."""
    squares: dict[RMSNorm, Tensor | float] = defaultdict(float)
    hooks = []

    def measure(norm: RMSNorm) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            squares[norm] = squares[norm] + output.float().square().mean()

        return hook

    for block in model.layers:
        attention = block.self_attn
        for projection, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            if norm is not None:
                hooks.append(projection.register_forward_hook(measure(norm)))
    try:
        for ids in batches:
            model.token_losses(ids, ids)
    finally:
        for hook in hooks:
            hook.remove()
    # All in one transfer from the device.
    means = torch.stack([torch.as_tensor(x) for x in squares.values()]) / len(batches)
    return dict(zip(squares, means.sqrt().tolist(), strict=True))


@torch.no_grad()
def set_gains(sizes: dict[RMSNorm, float]) -> None:
    """Set gains to :func:`input_sizes`: a norm then rescales each vector to the average size that
    its layer worked with, instead of 1.

    Not within a forward pass of a sharded model, nor before what it gathered is given back: until
    then the gains are passing copies.
    """
    for norm, size in sizes.items():
        norm.weight.fill_(size)
