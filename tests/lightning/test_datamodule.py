"""Batches of prepared text in a Lightning script: resumed within a step, and in several epochs."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from tests.lightning.test_drop import Llama, RandomSamples, ours
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.dataset import TrainingSamples
from trainer.lightning import TokenData, datamodule
from trainer.lightning.datamodule import Batches, StepLoader

HOOKS = ["on_train_batch_start", "on_before_backward", "on_train_batch_end"]


class StoppedError(Exception):
    pass


class Save(L.Callback):
    """Saves and stops at micro-batch ``at`` of all epochs, in the hook ``when``; notes what a step
    reads."""

    def __init__(self, at=None, when="on_train_batch_end", path=None):
        self.at, self.when, self.path = at, when, path
        self.read = {}

    def stop(self, trainer, when):
        if (when, trainer.fit_loop.total_batch_idx) == (self.when, self.at):
            trainer.save_checkpoint(self.path)
            raise StoppedError

    def on_train_batch_start(self, trainer, module, batch, index):
        self.stop(trainer, "on_train_batch_start")
        self.read.setdefault(trainer.global_step, []).append(int(batch["labels"].sum()))

    def on_before_backward(self, trainer, module, loss):
        self.stop(trainer, "on_before_backward")

    def on_train_batch_end(self, trainer, *_):
        self.stop(trainer, "on_train_batch_end")


def fit(module, callback, begin=None, **options):
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        **{"max_steps": 6, "accumulate_grad_batches": 4, **options},
        accelerator="cpu",
        devices=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(module, TokenData("", 32, 8, workers=0, samples=RandomSamples()), ckpt_path=begin)


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", ["on_train_batch_start", "on_before_backward", "on_train_batch_end"]
)
@pytest.mark.parametrize("at", [8, 9, 10, 11])
@pytest.mark.parametrize("make", [ours, Llama])
def test_a_run_that_was_stopped_within_a_step_repeats_it(tmp_path, make, at, when):
    """Whatever micro-batch of the third step it was in, and where."""
    whole, note = make(), Save()
    fit(whole, note)
    with pytest.raises(StoppedError):
        fit(make(), Save(at, when, tmp_path / "a.ckpt"))
    resumed, again = make(), Save()
    fit(resumed, again, begin=tmp_path / "a.ckpt")
    assert min(again.read) == (3 if (at, when) == (11, "on_train_batch_end") else 2)
    assert {step: note.read[step] for step in again.read} == again.read
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_epochs_read_on_also_after_a_resume_within_the_second(tmp_path):
    whole, parts, again = Save(), Save(), Save()
    fit(ours(), whole)
    fit(ours(), parts, limit_train_batches=8)
    assert parts.read == whole.read
    with pytest.raises(StoppedError):
        fit(ours(), Save(9, path=tmp_path / "a.ckpt"), limit_train_batches=8)
    fit(ours(), again, begin=tmp_path / "a.ckpt", limit_train_batches=8)
    assert again.read == {step: whole.read[step] for step in range(2, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("at", [8, 9, 10, 11, 12, 13])
def test_an_epoch_that_ends_with_fewer_micro_batches_ends_its_step(tmp_path, at):
    """Epochs of six micro-batches are two steps, of four and two: stopped in and behind each."""
    options = {"limit_train_batches": 6, "max_steps": 6}
    whole, note = ours(), Save()
    fit(whole, note, **options)
    with pytest.raises(StoppedError):
        fit(ours(), Save(at, path=tmp_path / "a.ckpt"), **options)
    resumed, again = ours(), Save()
    fit(resumed, again, begin=tmp_path / "a.ckpt", **options)
    assert {step: note.read[step] for step in again.read} == again.read
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def corpus(base):
    return prepare_corpus(DataConfig(**base["data"]), TokenizerConfig(**base["tokenizer"]))


def test_a_rank_reads_its_parts_of_the_steps_in_the_order_of_the_seed(corpus):
    """Of step 5, whose 8 samples are two micro-batches on two ranks; callbacks alone draw from
    torch's generator."""
    data = TokenData(corpus, 32, 8, seed=3, workers=0)
    not_begun = SimpleNamespace(current=SimpleNamespace(ready=0, processed=0))
    data.trainer = SimpleNamespace(
        lightning_module=torch.nn.Linear(1, 1),
        fit_loop=SimpleNamespace(epoch_progress=not_begun),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        accumulate_grad_batches=2,
        global_rank=1,
        world_size=2,
        global_step=10,
        optimizers=[None, None],  # Lightning counts the steps of both
    )
    data.setup("fit")
    before = torch.get_rng_state()
    batches = islice(data.train_dataloader(), 2)
    samples = TrainingSamples(corpus, DataConfig(sequence_length=32), 3)
    for batch, numbers in zip(batches, ([42, 43], [46, 47]), strict=True):
        assert batch["labels"].equal(samples.__getitems__(numbers)["labels"])
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_leave_signals_to_the_trainer(monkeypatch):
    """SLURM sends them to every process of a job."""
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")), global_step=0, optimizers=[]
    )
    loader = StepLoader(Batches(RandomSamples(), 4), 3, trainer)
    assert loader.num_workers == 3
    ignored = {}
    monkeypatch.setattr(datamodule.signal, "signal", ignored.__setitem__)
    loader.worker_init_fn(0)
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    assert ignored == dict.fromkeys(numbers, signal.SIG_IGN)


def test_a_probe_needs_no_more_text_than_a_training_sequence(corpus):
    """Its sequences begin with the token that begins those of the training text."""
    part = replace(corpus.parts[0], validation=corpus.parts[0].validation[:16])
    data = TokenData(Corpus((part,)), 16, 8)
    assert data.probe(1).tolist() == [[corpus.first_token, *part.validation.tolist()]]
    assert data.samples.__getitems__([0])["input_ids"][0, 0] == corpus.first_token


def test_samples_of_ones_own_have_a_probe_of_the_text_in_a_directory(corpus):
    data = TokenData(corpus.parts[0].directory, 16, 8, samples=RandomSamples())
    data.setup("fit")
    assert isinstance(data.samples, RandomSamples)
    assert data.probe(2).shape == (2, 17)
