"""How far the model reaches, again and again while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from trainer.data.corpus import Corpus
from trainer.data.dataset import as_batch
from trainer.data.needles import Trials
from trainer.data.order import Integers
from trainer.errors import UserError
from trainer.evaluation.loss import by_bucket
from trainer.evaluation.retrieval import successes
from trainer.evaluation.table import Material, prepare_material
from trainer.model.decoder import Decoder
from trainer.report.results import Reach
from trainer.runs.config import RunConfig
from trainer.runs.ranks import Ranks
from trainer.training.callbacks.drop import Drop
from trainer.training.callbacks.evaluating import evaluating
from trainer.training.callbacks.monitor import Monitor
from trainer.training.module import LanguageModule


class Lengths(Monitor):
    """Retrieval and held-out loss at several lengths, on the same validation text every time.

    ``history``, its state, holds all measurements; the next row of metrics has the last of them.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        ranks: Ranks,
        drop: Drop,
        add_metrics: Callable[[dict[str, float]], None],
    ) -> None:
        assert config.monitor.lengths_every is not None
        super().__init__(config, config.monitor.lengths_every, drop)
        self.add_metrics = add_metrics
        self.material = material_of(config, corpus, ranks)
        self.history: list[Reach] = []

    def state_dict(self) -> dict[str, Any]:
        """All measurements."""
        return {"history": [reach.to_dict() for reach in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.history = [Reach.from_dict(reach) for reach in state_dict["history"]]

    def measure(self, trainer: L.Trainer, module: LanguageModule) -> None:
        """Each rank reads its part; all have the same numbers afterwards."""
        C, tokens = self.config.data.sequence_length, self.config.evaluation.batch_tokens
        loss, retrieval = [], []
        with evaluating(module) as model:
            for length, windows in self.material.windows.items():
                losses = held_out_losses(model, windows, self.material.end_of_text, tokens)
                loss.append(losses[-C:].mean().item())
                if trials := self.material.trials.get(length):
                    hits = successes(model, trials, tokens)
                    retrieval.append(sum(hits) / len(hits))
        edges, buckets = by_bucket(losses, max(1, C // 2))  # of the longest
        mine = torch.tensor([*loss, *retrieval, *buckets], dtype=torch.float64)
        means = iter(trainer.strategy.reduce(mine.to(module.device)).tolist())
        loss, retrieval, buckets = (
            tuple(islice(means, len(part))) for part in (loss, retrieval, buckets)
        )
        lengths = tuple(self.material.windows)
        dropped = bool(self.drop.effect)
        self.history.append(
            Reach(trainer.global_step, dropped, C, lengths, loss, retrieval, edges, buckets)
        )
        for name, values in (("loss", loss), ("retrieval", retrieval)):
            self.add_metrics(
                {f"length/{name}_{n // C}x": v for n, v in zip(lengths, values, strict=False)}
            )


def held_out_losses(model: Decoder, windows: Integers, end_of_text: int, tokens: int) -> Tensor:
    """Mean loss at every position of windows ``[N, T]``, ``[T]`` float64; ``tokens`` at a time.

    Through a method of the model that gathers sharded weights, unlike the evaluation's own.
    """
    batch = as_batch(windows, end_of_text, np.ones(windows.shape, dtype=np.float32))
    size, device = max(1, tokens // windows.shape[1]), model.norm.weight.device
    losses = [
        model.token_losses(ids.to(device), labels.to(device)).double()
        for ids, labels in zip(
            batch["input_ids"].split(size), batch["labels"].split(size), strict=True
        )
    ]
    return torch.cat(losses).mean(dim=0).cpu()


def material_of(config: RunConfig, corpus: Corpus, ranks: Ranks) -> Material:
    """This rank's part of what is read: validation text, with needles where training has them.

    Raises:
        UserError: the text is shorter than the longest length.
    """
    monitor, C = config.monitor, config.data.sequence_length
    lengths = sorted(set(monitor.lengths))
    if len(corpus.validation) < C * lengths[-1]:
        raise UserError(
            f"monitor.lengths: the validation text has {len(corpus.validation)} tokens, fewer than "
            f"{lengths[-1]} times data.sequence_length; give more text, larger data.validation, or "
            "shorter lengths."
        )

    def whole(count: int) -> int:
        return -(-count // ranks.world_size) * ranks.world_size

    material = prepare_material(
        replace(corpus, test=corpus.validation),
        replace(
            config.evaluation,
            lengths=lengths,
            trials=whole(monitor.trials),
            loss_windows=whole(monitor.windows),
        ),
        C,
        needles=bool(config.data.needles.share),
    )
    part = slice(ranks.rank, None, ranks.world_size)
    return replace(
        material,
        trials={
            length: Trials(trials.prompts[part], trials.answers[part], trials.depths[part])
            for length, trials in material.trials.items()
        },
        windows={length: windows[part] for length, windows in material.windows.items()},
    )
