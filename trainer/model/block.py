"""A layer of the decoder: attention and a gated MLP in the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, overload

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.attention import Attention, Encoding, RMSNorm
from trainer.model.cache import LayerCache
from trainer.model.config import ModelConfig
from trainer.model.linear import Linear
from trainer.model.masks import Mask


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``[B, T, hidden_size]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        encoding: Encoding,
        mask: Mask,
        qk_norm: bool,
        cache: LayerCache | None = None,
        of_all_keys: Encoding | None = None,
        last: int | None = None,
    ) -> Tensor:
        """See :meth:`Attention.forward`."""
        mixed = self.self_attn(
            self.input_layernorm(x), encoding, mask, qk_norm, cache, of_all_keys, last
        )
        x = (x if last is None else x[:, -last:]) + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


if TYPE_CHECKING:

    class Blocks(nn.ModuleList):
        """Blocks of a decoder: a module list that declares its element type."""

        def __init__(self, modules: Iterable[Block]) -> None: ...
        def __iter__(self) -> Iterator[Block]: ...
        @overload
        def __getitem__(self, idx: slice) -> nn.ModuleList: ...
        @overload
        def __getitem__(self, idx: int) -> Block: ...
        def __getitem__(self, idx: int | slice) -> Block | nn.ModuleList: ...
else:
    Blocks = nn.ModuleList
