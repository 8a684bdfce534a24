"""Lightning's trainer does what a run is, and nothing by itself."""

from __future__ import annotations

import inspect
import logging
import signal
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from trainer.config import DataConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.ranks import Ranks, current_ranks
from trainer.training import lightning_trainer
from trainer.training.lightning_trainer import (
    TrainingData,
    disable_sigterm_broadcast,
    make_trainer,
    set_steps_done,
)
from trainer.training.loggers import MetricsFile


@pytest.fixture
def quiet():
    """Levels of Lightning's logs and filters of warnings, put back."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO)
    with warnings.catch_warnings():
        yield names
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_run_of_one_process(quiet, tmp_path, monkeypatch):
    """In a SLURM job, too, of which Lightning would make more of it."""
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "a")
    run = TrainerConfig(max_steps=7, batch_size=12, micro_batch_size=4)
    logger = MetricsFile(tmp_path / "metrics.csv")
    trainer = make_trainer(RunConfig(trainer=run, run_dir=str(tmp_path)), Ranks(), [logger], [])
    assert trainer.max_steps == 7
    assert trainer.accumulate_grad_batches == 3
    assert trainer.loggers == [logger]
    assert trainer.default_root_dir == str(tmp_path)
    assert (trainer.num_devices, trainer.num_nodes, trainer.world_size) == (1, 1, 1)
    assert trainer.precision == "32-true"
    assert trainer.num_sanity_val_steps == 0
    assert trainer.log_every_n_steps == 0
    assert not trainer._accelerator_connector.use_distributed_sampler
    replaced = (Checkpoint, ModelSummary, ProgressBar)
    assert not [callback for callback in trainer.callbacks if isinstance(callback, replaced)]
    environment = trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, LightningEnvironment)
    assert {logging.getLogger(name).level for name in quiet} == {logging.WARNING}
    assert any(
        kind == "ignore" and "lightning" in str(module)
        for kind, _, _, module, _ in warnings.filters
    )


def test_a_rank_of_many_finds_its_own_device(quiet, monkeypatch):
    """The third of four in the second of two machines."""
    environment = {"RANK": 6, "LOCAL_RANK": 2, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4,
                   "GROUP_RANK": 1, "MASTER_ADDR": "here", "MASTER_PORT": 1}  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    run = TrainerConfig(batch_size=32, micro_batch_size=2, accelerator="cpu")
    config = RunConfig(trainer=run, strategy=StrategyConfig(name="ddp"))
    trainer = make_trainer(config, Ranks(6, 8, 2, 4), [], [])
    assert (trainer.num_nodes, trainer.world_size) == (2, 8)
    assert trainer.accumulate_grad_batches == 2
    assert trainer.strategy.parallel_devices == [torch.device("cpu")] * 4
    kind = trainer._accelerator_connector.cluster_environment
    assert isinstance(kind, TorchElasticEnvironment)
    options = trainer.strategy._ddp_kwargs
    assert options == {"gradient_as_bucket_view": True, "broadcast_buffers": False}


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
    mine, other = (
        torch.stack([batch["input_ids"] for batch in made]) for made in (loader(), loader(rank=0))
    )
    assert mine.shape == other.shape == (2 * 2, 2)  # micro-batches of two, two a step
    steps = torch.cat([mine.view(2, 4), other.view(2, 4)], dim=1).sort(dim=1).values
    assert steps.tolist() == [[*range(100, 108)], [*range(200, 208)]]


def test_a_loader_draws_nothing_of_the_run():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_stay_and_pin_memory_for_a_gpu(monkeypatch, workers):
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(lightning_trainer, "device_type", lambda _, device=device: device)
        made = loader(workers)
        assert (made.num_workers, made.persistent_workers) == (workers, workers > 0)
        assert made.pin_memory == (device == "cuda")


def test_a_worker_hears_no_signal(monkeypatch):
    handlers = {}
    monkeypatch.setattr(lightning_trainer.signal, "signal", handlers.__setitem__)
    loader().worker_init_fn(0)
    ignored = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    assert handlers == dict.fromkeys(ignored, signal.SIG_IGN)


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
