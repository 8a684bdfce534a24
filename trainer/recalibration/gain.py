"""Gains for query and key norms that are enabled in a trained model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.model.attention import RMSNorm
from trainer.model.decoder import Decoder


@torch.no_grad()
def input_sizes(model: Decoder, batches: Sequence[Tensor]) -> dict[RMSNorm, float]:
    """Return the RMS of the inputs of each query and key norm on ``batches`` of ``[B, T]`` token
    ids.

    All batches have the same size.
    """
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
    # one transfer from the device for all norms
    means = torch.stack([torch.as_tensor(x) for x in squares.values()]) / len(batches)
    return dict(zip(squares, means.sqrt().tolist(), strict=True))


@torch.no_grad()
def set_gains(sizes: dict[RMSNorm, float]) -> None:
    """Set the gains to :func:`input_sizes`.

    A norm then rescales each vector to the average size that its layer was trained with, instead of
    1. Do not call this within a forward pass of a sharded model, nor before its parameters are
    resharded: until then the gains are temporary copies.
    """
    for norm, size in sizes.items():
        norm.weight.fill_(size)
