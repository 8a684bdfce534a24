"""The loader of a run: from its step on, of its rank, in workers that no signal stops."""

from __future__ import annotations

import signal

import pytest
import torch

from trainer.data.config import DataConfig
from trainer.runs.config import RunConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training import data_module
from trainer.training.data_module import TrainingData


class Samples:
    """Their numbers alone."""

    def __getitems__(self, numbers):
        return {"input_ids": torch.tensor(numbers)}


def loader(workers=0, rank=1):
    run = TrainerConfig(max_steps=3, batch_size=8, micro_batch_size=2)
    config = RunConfig(trainer=run, data=DataConfig(num_workers=workers))
    return TrainingData(
        Samples(), config, Ranks(rank, 2, rank, 2), 1, lambda step: 100 * step
    ).train_dataloader()


def test_a_rank_reads_its_part_of_every_step_that_is_left():
    found, other = (
        torch.stack([batch["input_ids"] for batch in made]) for made in (loader(), loader(rank=0))
    )
    assert found.shape == other.shape == (2 * 2, 2)  # micro-batches of two, two a step
    steps = torch.cat([found.view(2, 4), other.view(2, 4)], dim=1).sort(dim=1).values
    assert steps.tolist() == [[*range(100, 108)], [*range(200, 208)]]


def test_a_loader_draws_nothing_of_the_run():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_stay_and_pin_memory_for_a_gpu(monkeypatch, workers):
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(data_module, "device_type", lambda _, device=device: device)
        made = loader(workers)
        assert (made.num_workers, made.persistent_workers) == (workers, workers > 0)
        assert made.pin_memory == (device == "cuda")


def test_a_worker_hears_no_signal(monkeypatch):
    said = {}
    monkeypatch.setattr(data_module.signal, "signal", said.__setitem__)
    loader().worker_init_fn(0)
    ignored = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    assert said == dict.fromkeys(ignored, signal.SIG_IGN)
