"""Looking at a model in training without a trace in what is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from trainer.model.backends import BACKENDS
from trainer.model.decoder import Decoder
from trainer.training.callbacks.steps import begins_step, ends_step
from trainer.training.config import RunConfig
from trainer.training.module import LanguageModule
from trainer.training.strategy import reshard

if TYPE_CHECKING:
    from trainer.training.callbacks.drop import Drop


@contextmanager
def evaluating(module: LanguageModule) -> Iterator[Decoder]:
    """The decoder in training, for forward passes in the run's precision without gradient.

    Afterwards modes, random states, backends and shards are as before. All of it runs uncompiled:
    other shapes would have blocks compiled anew, and training go on with other kernels. The time
    counts as ``monitor``. Ranks that share parameters must do the same forward passes.
    """
    model, device = module.model, module.device
    modes = {part: part.training for part in model.modules()}
    backends = [block.self_attn.attend for block in model.layers]
    module.timer.enter("monitor")
    try:
        model.eval()
        for block in model.layers:
            if block.self_attn.attend is BACKENDS["flex"]:  # uncompiled it holds all scores
                block.self_attn.attend = BACKENDS["sdpa"]
        with (
            torch.no_grad(),
            isolate_rng(include_cuda=False),  # with it: a context on every GPU from every rank
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
            module.trainer.precision_plugin.forward_context(),
        ):
            yield model
    finally:
        for part, mode in modes.items():
            part.training = mode
        for block, backend in zip(model.layers, backends, strict=True):
            block.self_attn.attend = backend
        reshard(model)
        module.timer.enter("data")


class Monitor(L.Callback, ABC):
    """Measures every ``every`` steps, just before and just after the drop, and after the last step.

    It stands behind the drop among the callbacks, and before those that log and save.
    """

    def __init__(self, config: RunConfig, every: int, drop: Drop) -> None:
        self.config, self.every, self.drop = config, every, drop

    @abstractmethod
    def measure(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Look at the model as it is."""

    def on_train_batch_start(
        self, trainer: L.Trainer, module: LanguageModule, batch: Any, index: int
    ) -> None:
        """Measure what the drop has just made."""
        crossed = self.drop.effect.get("step") == trainer.global_step
        if crossed and begins_step(trainer, index):
            self.measure(trainer, module)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: LanguageModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Measure after a step that is due."""
        step, fixed = trainer.global_step, (self.config.drop_step, self.config.trainer.max_steps)
        if ends_step(trainer, index) and (step % self.every == 0 or step in fixed):
            self.measure(trainer, module)
