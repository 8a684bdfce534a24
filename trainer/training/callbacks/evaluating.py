"""Forward passes during training that do not affect it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from trainer.model.backends import cudnn_attention, flex, flex_flash, sdpa
from trainer.model.decoder import Decoder
from trainer.training.module import LanguageModule
from trainer.training.strategy import reshard


@contextmanager
def evaluating(module: LanguageModule) -> Iterator[Decoder]:
    """Provide the decoder in training for forward passes in the run's precision, without gradients.

    Afterwards modes, random states, backends and shards are restored. Everything runs uncompiled:
    new shapes would recompile the blocks, and training would continue with other kernels. The time
    counts as ``monitor``. Ranks that share parameters must do the same forward passes.
    """
    model, device = module.model, module.device
    modes = {part: part.training for part in model.modules()}
    backends = [block.self_attn.attend for block in model.layers]
    module.timer.enter("monitor")
    try:
        model.eval()
        for block in model.layers:
            # Uncompiled FlexAttention materializes all scores.
            if block.self_attn.attend in (flex, flex_flash):
                block.self_attn.attend = sdpa
        with (
            torch.no_grad(),
            cudnn_attention(False),  # it would make a plan for every new length
            isolate_rng(include_cuda=False),  # it creates a context on every GPU
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
        ):
            yield model
    finally:
        for part, mode in modes.items():
            part.training = mode
        for block, backend in zip(model.layers, backends, strict=True):
            block.self_attn.attend = backend
        reshard(model)
        module.timer.enter("data")
