"""Two ranks that save: ``torchrun --nproc-per-node=2 checkpoint_ranks.py``."""

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from tests.training.test_saving import steps_saved
from trainer.common.errors import UserError
from trainer.runs.config import RunConfig, StrategyConfig
from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.training.callbacks import saving

config = RunConfig(run_dir=str(Path.cwd()), strategy=StrategyConfig("ddp"))
ranks = init_distributed(config)
print("timed:", steps_saved(5, 12, ranks, clock=1.0 if ranks.is_rank_zero else 9.0))


def write_manifest_and_rename(partial, *_):
    time.sleep(0.5)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))


def stale(*_):
    if not ranks.is_rank_zero:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return {}


def written():
    """Save, and return the error, or "yes"."""
    callback = saving.Saving(config, ranks, lambda _: {})
    try:
        callback.save_now(trainer)
    except UserError as error:
        return error
    finally:
        callback.teardown(trainer, model, "fit")
    return "yes"


names = {"tensors_of": lambda *_: {}, "save": lambda *_: None, "digests": lambda *_: {}}
names |= {"write_durably": lambda *_: None, "write_manifest_and_rename": write_manifest_and_rename}
model = SimpleNamespace(timer=SimpleNamespace(enter=lambda _: None), model=None)
trainer = SimpleNamespace(
    global_step=7,
    lightning_module=model,
    optimizers=[None],
    strategy=SimpleNamespace(root_device=torch.device("cpu")),
)
with mock.patch.multiple(saving, **names):
    print("written:", written())
    with mock.patch.object(saving, "digests", stale):
        print("hashed:", written())
shutdown_distributed()
