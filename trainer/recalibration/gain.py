"""Gains for query and key norms that come on in a trained model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.model.decoder import Decoder


@torch.no_grad()
def match_gains(model: Decoder, ids: Tensor) -> None:
    """Set every query and key norm's gain to the RMS that its input has on ``ids`` ``[B, T]``.

    The norm then rescales each vector to the average size its layer worked with, instead of 1.
    """
    hooks = []
    for block in model.layers:
        attention = block.self_attn
        for projection, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            if norm is not None:
                hooks.append(projection.register_forward_hook(_set_gain(norm)))
    try:
        model.hidden_states(ids)
    finally:
        for hook in hooks:
            hook.remove()


def _set_gain(norm: nn.Module):  # noqa: ANN202 (a forward hook)
    def hook(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        norm.weight.fill_(output.float().square().mean().sqrt())

    return hook
