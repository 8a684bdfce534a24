"""Greedy generation with a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.cache import KVCache
from trainer.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder, prompt: Tensor, max_new_tokens: int, *, end_token: int | None = None
) -> Tensor:
    """Continue ``prompt`` with the most likely tokens.

    Args:
        model: a decoder.
        prompt: ``[B, T]`` token ids, T >= 1.
        max_new_tokens: how many tokens to add at the most.
        end_token: a sequence that has produced it is padded with it; when all have, generation
            ends.

    Returns:
        ``[B, T + n]``, n <= ``max_new_tokens``.
    """
    cache = KVCache.empty(len(model.layers))
    tokens = [prompt]
    done = torch.zeros(prompt.shape[0], 1, dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        token = model(tokens[-1], cache=cache, last=1).argmax(dim=-1)
        if end_token is not None:
            token = token.masked_fill(done, end_token)
            done |= token == end_token
        tokens.append(token)
        if end_token is not None and bool(done.all()):
            break
    return torch.cat(tokens, dim=1)
