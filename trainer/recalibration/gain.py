"""Gains for query and key norms that come on in a trained model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.model.decoder import Decoder


@torch.no_grad()
def match_gains(model: Decoder, batches: Sequence[Tensor]) -> None:
    """Set every query and key norm's gain to the RMS that its input has on ``batches``, each
    ``[B, T]`` token ids, of one size.

    The norm then rescales each vector to the average size its layer worked with, instead of 1.
    """
    squares: dict[nn.Module, Tensor | float] = defaultdict(float)
    hooks = []

    def measure(norm: nn.Module) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
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
    # All in one transfer from the device, and only now: in the forward pass of a sharded model the
    # gains are passing copies.
    sizes = (torch.stack([torch.as_tensor(x) for x in squares.values()]) / len(batches)).sqrt()
    for norm, size in zip(squares, sizes.tolist(), strict=True):
        norm.weight.fill_(size)
