"""Several runs in one process group: ``torchrun ... distributed_runs.py FILE``.

FILE holds a JSON list of [values of a configuration, checkpoint to begin at or null, null or the
update during which rank 1 alone is told to stop, and after which the run goes on].
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist

from trainer.common.errors import PreemptedError
from trainer.common.ranks import process_group
from trainer.data.corpus import prepare_corpus
from trainer.runs.parsing import parse
from trainer.runs.phases import Run
from trainer.training.fit import train, user_callbacks
from trainer.training.setup import set_environment


class TellRank1(L.Callback):
    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, *_):
        if self.rank == 1 and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def train_as_told(run: Run, begin: str | None, stop: int | None) -> None:
    set_environment(run.config.trainer.accelerator)
    rank = dist.get_rank()
    if not rank:
        directory = run.directory / "checkpoints"
        directory.mkdir(parents=True)
        if begin:
            shutil.copytree(begin, directory / Path(begin).name)
            shutil.copy(Path(begin).parent.parent / "metrics.csv", directory.parent)
    config = run.config
    corpus = prepare_corpus(config.data, config.tokenizer)
    if stop is not None:
        try:
            tell = {"_target_": "__main__.TellRank1", "rank": rank, "step": stop}
            told = replace(config, callbacks={"tell": tell})
            train(replace(run, config=told), corpus, callbacks=user_callbacks(told))
        except PreemptedError as error:
            Path(run.directory, f"stopped-{rank}").write_text(str(error))
    train(run, corpus, callbacks=user_callbacks(config))


torch.set_num_threads(1)
with process_group("ddp"):
    for values, begin, stop in json.loads(Path(sys.argv[1]).read_text()):
        train_as_told(parse(values), begin, stop)
