"""Fails where a new version of Lightning has changed what this program touches inside it."""

from __future__ import annotations

import inspect

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from trainer.runs.config import RunConfig, StrategyConfig
from trainer.runs.ranks import current_ranks
from trainer.training.lightning_internals import disable_sigterm_broadcast, set_steps_done
from trainer.training.lightning_trainer import make_trainer


class Line(L.LightningModule):
    """One weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, index):
        return (self.weight * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def small_trainer(tmp_path):
    def make(steps):
        return L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )

    return make


def fit(trainer):
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(4)))


def test_the_question_about_signals_is_asked_by_a_method_without_arguments():
    method = _TrainingEpochLoop._broadcast_sigterm_tensor
    assert list(inspect.signature(method).parameters) == ["self"]
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


@pytest.mark.parametrize("silent", [False, True])
def test_nobody_is_asked_about_signals(small_trainer, monkeypatch, silent):
    asked = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: asked.append(tensor))
    trainer = small_trainer(3)
    if silent:
        disable_sigterm_broadcast(trainer)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert len(asked) == (not silent)


def test_steps_are_counted_from_those_that_were_done(small_trainer):
    trainer = small_trainer(7)
    set_steps_done(trainer, 5)
    assert trainer.global_step == 5
    before = []
    trainer.callbacks.append(Counts(before))
    fit(trainer)
    assert before == [5, 6]
    assert trainer.global_step == 7


class Counts(L.Callback):
    def __init__(self, seen):
        self.seen = seen

    def on_train_batch_start(self, trainer, *_):
        self.seen.append(trainer.global_step)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("visible", "index"), [(2, 1), (1, 0)])
def test_lightning_takes_the_gpu_of_the_process(monkeypatch, name, visible, index):
    """The second of two on a machine, started by torchrun or by srun --gpus-per-task=1."""
    group = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1}
    for key, value in group.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    config = RunConfig(strategy=StrategyConfig(name))
    trainer = make_trainer(config, current_ranks(), [], [])
    assert trainer.strategy.root_device == torch.device("cuda", index)
    assert (trainer.world_size, trainer.local_rank, trainer.num_devices) == (4, 1, 2)
    trainer.strategy.cluster_environment.validate_settings(trainer.num_devices, trainer.num_nodes)
