"""Micro-batches of several shapes, a module that trains on them, and the same updates as a plain
loop; ``updates.py STRATEGY`` does both with the micro-batches of two ranks."""

from __future__ import annotations

import copy
import sys

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from trainer.common.errors import UserError
from trainer.common.processes import current_ranks
from trainer.lightning import LanguageModule, strategy
from trainer.lightning import module as language_module
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import rope
from trainer.positional.layout import uniform


def decoder() -> Decoder:
    config = ModelConfig(32, 48, 2, 4, 2, None, 50, initializer="fan_in")
    return Decoder(config, uniform(rope(8), layers=2, heads=2, training_length=16))


def smooth(optimizer):
    """Let the size of gradients matter to Adam, and not their rounding."""
    for group in optimizer.param_groups:
        if "eps" in group:
            group["eps"] = 1e-3
    return optimizer


class Smooth(LanguageModule):
    """A module whose Adam is :func:`smooth`."""

    def configure_optimizers(self):
        return smooth(super().configure_optimizers())


class Unfused(LanguageModule):
    """A module with an optimizer that skips on the host."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)


def micro_batch(seed, rows, length, weighted=False):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (rows, length + 1), generator=draw)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if weighted:
        batch["weights"] = torch.rand(rows, length, generator=draw)
    return batch


def micro_batches(rank=0):
    """Five of different shapes: with two a step, the last step has one."""
    shapes = [(3, 16), (1, 8), (2, 12), (4, 16), (2, 16)]
    return [
        micro_batch(10 * rank + seed, rows + rank, length, weighted=seed % 2 == 0)
        for seed, (rows, length) in enumerate(shapes)
    ]


def steps_of(batches):
    """Two micro-batches a step."""
    return [batches[start : start + 2] for start in range(0, len(batches), 2)]


def fit(module, batches, **options):
    """Train for an epoch; two micro-batches a step."""
    options = {"accelerator": "cpu", "devices": 1, "accumulate_grad_batches": 2, **options}
    trainer = L.Trainer(
        **{"max_epochs": 1, "logger": False, "use_distributed_sampler": False, **options},
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer


def mean_loss(model, batches):
    """The mean over the tokens of some micro-batches, from logits."""
    total = weight = 0
    for batch in batches:
        logits = model.logits(model.hidden_states(batch["input_ids"]))
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        weights = batch.get("weights", torch.ones(batch["labels"].shape)).flatten()
        total = total + (losses * weights).sum()
        weight = weight + weights.sum()
    return total / weight


def train_plainly(model, optimizers, steps, clip):
    """One update for each list of micro-batches, unless its loss is not finite."""
    for batches in steps:
        model.zero_grad()
        loss = mean_loss(model, batches)
        if loss.isfinite():
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()


def main(name):
    torch.set_num_threads(1)
    if name == "fsdp2":
        fit_twice()
    if name == "hsdp":
        mesh_of_ranks = strategy.mesh_of_ranks
        language_module.mesh_of_ranks = lambda device: mesh_of_ranks(device, 1)
    for kind in (Smooth, Unfused):
        compare(kind, name)


def fit_twice():
    """Validate and train again. Lightning's own sizes, where ranks share data, are refused."""
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    module = LanguageModule(decoder(), 1e-2)
    trainer = fit(module, micro_batches(), strategy=ModelParallelStrategy(**sizes), devices=2)
    steps = trainer.global_step
    own = micro_batches(current_ranks().rank)
    trainer.validate(module, DataLoader(own, batch_size=None), verbose=False)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, DataLoader(micro_batches(), batch_size=None))
    assert trainer.global_step == 2 * steps
    trainer.validate(module, DataLoader(own, batch_size=None), verbose=False)
    with language_module.evaluating(module.model):
        pass  # shards the parameters again
    model = strategy.whole_model(module.model)
    with torch.no_grad():
        expected = mean_loss(model, micro_batches(0) + micro_batches(1))
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(UserError, match="tensor_parallel_size=1"):
        fit(module, micro_batches(), strategy=ModelParallelStrategy(), devices=2)


def compare(kind, name):
    """Train the micro-batches of two ranks with a kind of module and in a loop."""
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    options = {"strategy": name if name == "ddp" else ModelParallelStrategy(**sizes), "devices": 2}
    module = kind(decoder(), 1e-2, gradient_clip=0.5)
    plain = copy.deepcopy(module.model)
    fit(module, micro_batches(current_ranks().rank), **options)
    optimizer = kind(plain, 1e-2).configure_optimizers()
    of_ranks = [steps_of(micro_batches(rank)) for rank in range(2)]
    steps = [first + second for first, second in zip(*of_ranks, strict=True)]
    train_plainly(plain, [optimizer], steps, clip=0.5)
    for a, b in zip(module.model.parameters(), plain.parameters(), strict=True):
        whole = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(whole, b, rtol=0, atol=2e-6)
    assert module.tally.read()["skipped_steps"] == 0


if __name__ == "__main__":
    main(sys.argv[1])
