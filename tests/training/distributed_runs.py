"""Several runs in one process group: ``torchrun ... distributed_runs.py FILE``.

FILE holds a JSON list of [values of a configuration, checkpoint to begin at or null, null or the
update during which rank 1 alone is told to stop, and after which the run goes on].
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.common.errors import PreemptedError
from trainer.config import RunConfig
from trainer.data.corpus import prepare_corpus
from trainer.runs.parsing import parse
from trainer.runs.ranks import init_distributed, shutdown_distributed
from trainer.training.optimizers import MuonWithAdamW, newton_schulz
from trainer.training.run import train


class TellRank1(L.Callback):
    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, *_):
        if self.rank == 1 and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def orthogonal_alike(sharded):
    """Whether the ranks, each with a part of the work, get what one alone does, bitwise: without
    momentum, decay and size, a step takes the orthogonalized gradient from the weights."""
    gradients = [torch.randn(4 + 2 * (i // 3), 4 + 3 * (i // 3)) for i in range(9)]
    local = gradients
    if sharded:
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        local = [distribute_tensor(x, mesh, [Shard(0)]) for x in gradients]
    weights = [nn.Parameter(torch.zeros_like(x)) for x in local]
    for weight, gradient in zip(weights, local, strict=True):
        weight.grad = gradient
    group = {"params": weights, "lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    MuonWithAdamW(group, adamw).step()
    whole = [w.full_tensor() if sharded else w for w in weights]
    expected = [-newton_schulz(x[None])[0].float() for x in gradients]
    return all(map(torch.equal, whole, expected))


torch.set_num_threads(1)
for values, begin, stop in json.loads(Path(sys.argv[1]).read_text()):
    config = parse(RunConfig, values)
    ranks = init_distributed(config)
    if ranks.is_rank_zero:
        directory = Path(config.run_dir) / "checkpoints"
        directory.mkdir(parents=True)
        if begin:
            shutil.copytree(begin, directory / Path(begin).name)
            shutil.copy(Path(begin).parent.parent / "metrics.csv", directory.parent)
    corpus = prepare_corpus(config.data, config.tokenizer)
    if stop is not None:
        try:
            train(config, corpus, callbacks=[TellRank1(ranks.rank, stop)])
        except PreemptedError as error:
            Path(config.run_dir, f"stopped-{ranks.rank}").write_text(str(error))
    train(config, corpus)
torch.manual_seed(0)
alike = [orthogonal_alike(sharded) for sharded in (True, False)]
Path(f"orthogonal-{ranks.rank}").write_text(str(alike))
shutdown_distributed()
