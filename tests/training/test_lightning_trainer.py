"""Lightning's trainer does what a run is, and nothing by itself."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from trainer.runs.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training.lightning_trainer import make_trainer
from trainer.training.metrics_logger import MetricsFile


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
    own = (Checkpoint, ModelSummary, ProgressBar)
    assert not [callback for callback in trainer.callbacks if isinstance(callback, own)]
    environment = trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, LightningEnvironment)
    assert {logging.getLogger(name).level for name in quiet} == {logging.WARNING}
    assert any(
        kind == "ignore" and "lightning" in str(of) for kind, _, _, of, _ in warnings.filters
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
