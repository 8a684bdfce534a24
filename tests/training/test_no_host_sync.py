"""From batch to update nothing reads a value from the device, whatever is switched on.

Torch's meta device stands for a GPU. Its tensors have no values: what reads one raises here, and
would wait for a GPU; what mixes them with tensors of the CPU raises, and would fail there.
"""

from __future__ import annotations

import sys

import lightning as L
import pytest
import torch

from trainer.data.corpus import prepare_corpus
from trainer.lightning import drop
from trainer.lightning.module import Tally
from trainer.runs.parsing import merged, parse
from trainer.training import fit
from trainer.training.fit import train, user_callbacks
from trainer.training.rows import Rows
from trainer.training.run import RunCallback
from trainer.training.strategies import SingleDevice

pytestmark = pytest.mark.slow


class OnMeta(SingleDevice):
    """One device, the meta device."""

    def setup_environment(self):
        """Lightning would check the device against its accelerator."""

    def reduce(self, tensor, *_, **__):
        """At the start, of the loader's length."""
        return torch.ones(())

    def teardown(self):
        """At the end Lightning would move the model to the CPU."""


@pytest.fixture(autouse=True)
def on_meta(monkeypatch):
    """Runs train on the meta device, for which torch's fused AdamW is the same operator."""
    monkeypatch.setattr(fit, "make_strategy", lambda *_: OnMeta("meta"))
    optimizer = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"])


class EnoughError(Exception):
    """Ends the run before its checkpoint and last row of metrics, which may sync."""


class StopAfter(L.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise EnoughError


VARIANTS = {
    "AdamW": {},
    "Muon": {"optimizer": {"name": "muon"}},
    "accumulation": {"trainer": {"micro_batch_size": 2}},
    "bf16": {"trainer": {"precision": "bf16"}},
    "documents": {"data": {"document_mask": True}},
    "no clipping": {"trainer": {"gradient_clip": 0.0}},
    "recomputed": {"strategy": {"activation_checkpointing": "selective"}},
    "windows": {"positional": {"windows": [8, None]}},
    "alibi": {"positional": {"layers": ["alibi"]}},
    "hybrid": {"positional": {"layers": ["rope", "nope"]}},
    "norms from the start": {"model": {"qk_norm": {"when": "always"}}},
    "optimizer kept": {"drop": {"optimizer_state": "keep"}},
}


def steps(base, tmp_path, monkeypatch, changes):
    """Eight updates of a run that drops after six."""
    monkeypatch.setattr(drop, "losses_of", lambda *_: [0.0])  # waits, twice a run
    # At the end of a phase a checkpoint is written and a row.
    monkeypatch.setattr(RunCallback, "save", lambda *_: None)
    monkeypatch.setattr(Rows, "write", lambda *_: None)
    monkeypatch.setattr(Tally, "lately_skipped_in_a_row", lambda _: 0)
    rare = {"run_dir": str(tmp_path), "trainer": {"log_every": 100, "checkpoint_every": 100}}
    stop = {"callbacks": {"stop": {"_target_": f"{__name__}.StopAfter", "step": 8}}}
    run = parse(merged(merged(merged(base, rare), stop), changes))
    corpus = prepare_corpus(run.config.data, run.config.tokenizer)
    with pytest.raises(EnoughError):
        train(run, corpus, callbacks=user_callbacks(run.config))


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_before_and_after_the_drop(base, tmp_path, monkeypatch, name):
    steps(base, tmp_path, monkeypatch, VARIANTS[name])


def test_reading_a_value_fails(base, tmp_path):
    """The check itself: a logged row reads the loss."""
    run = parse(
        merged(
            base,
            {
                "run_dir": str(tmp_path),
                "drop": {"at": None},
                "model": {"qk_norm": {"when": "never"}},
            },
        ),
    )
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        train(run, prepare_corpus(run.config.data, run.config.tokenizer))
