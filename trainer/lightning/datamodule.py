"""Training batches in an order that is a pure function of (seed, step)."""

import signal
import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer.lightning.updates import updates_done
from trainer.model.config import check_vocabulary
from trainer.model.decoder import Decoder

if TYPE_CHECKING:
    from trainer.data.corpus import Corpus


@dataclass(eq=False)
class Batches(IterableDataset[Any]):
    """Micro-batches of one rank, from step ``start`` to before step ``end``; None: without end.

    Step s reads ``batch_size`` samples from number ``offset + s * batch_size`` on, on any number of
    ranks: the batch is split into ``micro_batches`` equal parts, and each part is split among the
    ranks. Workers take turns, so their number does not matter either. ``samples.__getitems__``
    returns the samples of a list of numbers as one batch.
    """

    samples: Any
    batch_size: int
    start: int = 0
    end: int | None = None
    offset: int = 0
    micro_batches: int = 1
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        parts = self.micro_batches * self.ranks
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size: {self.batch_size} sequences of a step do not divide into "
                f"{self.micro_batches} micro-batches on {self.ranks} ranks"
            )

    def numbers(self) -> Iterator[list[int]]:
        """Yield the sample numbers of this worker's micro-batches."""
        size = self.batch_size // (self.micro_batches * self.ranks)
        end = None if self.end is None else (self.end - self.start) * self.micro_batches
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        for micro_batch in islice(count(), first, end, every):
            step, part = divmod(micro_batch, self.micro_batches)
            begin = self.offset + (self.start + step) * self.batch_size
            begin += (part * self.ranks + self.rank) * size
            yield list(range(begin, begin + size))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's micro-batches."""
        return map(self.samples.__getitems__, self.numbers())


@dataclass(eq=False, repr=False)
class TokenData(L.LightningDataModule):
    """Batches of prepared text for a :class:`~trainer.lightning.LanguageModule`.

    There is no state to save: a resumed run reads on from its step, whose first micro-batches it
    repeats if it was stopped within the step. Each epoch (``limit_train_batches``) reads on, too.

    Args:
        corpus: prepared text, or the directory that ``python -m trainer prepare`` wrote; ``""``:
            none, with ``samples`` and without validation.
        length: tokens of a sequence.
        batch_size: sequences of a step, over all micro-batches and ranks.
        seed: of the order.
        workers: processes that read.
        held_out: sequences of validation text; 0: none.
        samples: what is read in place of the corpus's training text, see :class:`Batches`.
    """

    corpus: "Corpus | str | Path"
    length: int
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    workers: int = 2
    held_out: int = 64
    samples: Any = None

    def __post_init__(self) -> None:
        super().__init__()

    def setup(self, stage: str) -> None:
        """Open the text, and check that a decoder has embeddings for its tokens."""
        from trainer.config import DataConfig
        from trainer.data.corpus import corpus_at
        from trainer.data.dataset import TrainingSamples
        from trainer.data.tokenizer import vocabulary_size

        config = DataConfig(sequence_length=self.length)
        if self.corpus == "" and self.samples is not None:
            return
        if isinstance(self.corpus, str | Path):
            self.corpus = corpus_at(config, [self.corpus])
        if self.trainer is not None:
            for part in self.trainer.lightning_module.modules():
                if isinstance(part, Decoder):
                    check_vocabulary(part.config, vocabulary_size(self.corpus.tokenizer))
        if self.samples is None:
            self.samples = TrainingSamples(self.corpus, config, self.seed)

    def probe(self, sequences: int) -> Tensor:
        """Return held-out token ids ``[sequences, length + 1]``, windows after the first token."""
        self.setup("fit")
        assert not isinstance(self.corpus, str | Path)
        return torch.from_numpy(self.corpus.probe(sequences, self.length))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's micro-batches from the trainer's step on."""
        assert self.trainer is not None
        repeat_interrupted_step(self.trainer)
        batches = Batches(
            self.samples,
            self.batch_size,
            micro_batches=self.trainer.accumulate_grad_batches,
            rank=self.trainer.global_rank,
            ranks=self.trainer.world_size,
        )
        return StepLoader(batches, self.workers, self.trainer)

    def val_dataloader(self) -> Any:
        """Return the held-out sequences, if any; Lightning shares them among the ranks."""
        assert self.trainer is not None
        if self.corpus == "" or not self.held_out:
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
            return []
        ids = self.probe(self.held_out)
        data: Any = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
        parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return DataLoader(data, batch_size=max(self.batch_size // parts, 1))


class StepLoader(DataLoader[Any]):
    """Loader of :class:`Batches` in ``workers`` processes; epochs begin at the trainer's step."""

    dataset: Batches

    def __init__(self, batches: Batches, workers: int, trainer: L.Trainer) -> None:
        super().__init__(
            batches,
            batch_size=None,
            num_workers=workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # the default one is left to callbacks
        )
        self.trainer = trainer

    def __iter__(self) -> Any:
        """Iterate over the micro-batches from the present step on."""
        self.dataset.start = updates_done(self.trainer)
        return super().__iter__()


def repeat_interrupted_step(trainer: L.Trainer) -> None:
    """Set a resumed trainer back to the first micro-batch of the step in which it was stopped.

    The gradients of the micro-batches before are in no checkpoint.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    if epoch.ready == epoch.processed:  # the next epoch has not begun
        return
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    unfinished = batches.current.processed % trainer.accumulate_grad_batches
    if unfinished == 0 or batches.is_last_batch:  # the last batch of an epoch ends its step
        return
    for progress in (batches.current, batches.total):
        done = progress.processed - unfinished
        progress.load_state_dict(dict.fromkeys(progress.state_dict(), done))


def _ignore_signals(_: int) -> None:
    """Ignore signals sent to every process of a job: only the trainer knows when to stop."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
