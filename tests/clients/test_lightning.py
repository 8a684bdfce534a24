"""The drop in Lightning modules of somebody's own, beside Lightning's own callbacks.

The reference uses nothing of this package: from an update on, the model file's
``apply_rotary_pos_emb`` returns queries and keys as they are.
"""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from trainer.lightning import DropPositions
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import rope
from trainer.positional.layout import drop, uniform

TOKENS = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
EPOCH = 8  # batches
AT = 12  # updates, within the second epoch


class Module(L.LightningModule):
    """Holds a Llama; ``losses`` are those of training and of validation, in their order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
        self.model = LlamaForCausalLM(config)
        self.losses = []

    def loss(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.loss(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]


class TwoOptimizers(Module):
    """Steps matrices in each batch, and vectors in each second one."""

    automatic_optimization = False

    def training_step(self, batch, index):
        matrices, vectors = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        matrices.step()
        matrices.zero_grad()
        if index % 2:
            vectors.step()
            vectors.zero_grad()

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(vectors, lr=0.01)


class Reference(L.Callback):
    """Drops the rotation after ``at`` batches, and the optimizer's state with it."""

    def __init__(self, monkeypatch, at):
        self.monkeypatch, self.at = monkeypatch, at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.at:
            self.monkeypatch.setattr(
                modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k)
            )
            for optimizer in trainer.optimizers:
                optimizer.state.clear()


def trainer_of(callbacks, **options):
    return L.Trainer(
        **{"max_epochs": 3, "val_check_interval": 0.5, "enable_checkpointing": False, **options},
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def fit(module, *callbacks, ckpt_path=None, **options):
    trainer = trainer_of([*callbacks], **options)
    loaders = DataLoader(TOKENS, batch_size=4), DataLoader(TOKENS[:8], batch_size=8)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return module


@pytest.fixture
def reference(monkeypatch):
    """A function that trains without this package, with the same arguments as :func:`fit`; the
    rotation is back afterwards."""

    def train(module, *callbacks, at=AT, **options):
        with monkeypatch.context() as context:
            return fit(module, Reference(context, at), *callbacks, **options)

    return train


def assert_same(module, expected, tolerance=0.0):
    """All losses of training and validation, and all weights: by default the difference is 0."""
    losses = expected.losses[-len(module.losses) :]
    assert module.losses == pytest.approx(losses, rel=0, abs=tolerance)
    for (name, a), b in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert (a - b).abs().max() <= tolerance, name


AVERAGES = {
    "mean": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("is_first", [False, True])
def test_averages_are_validated_and_end_without_rotation(reference, kind, is_first):
    """Whichever callback comes first."""
    average = AVERAGES[kind]
    expected = reference(Module(), average())
    callbacks = [DropPositions(AT), average()]
    if not is_first:
        callbacks.reverse()
    module = fit(Module(), *callbacks)
    assert_same(module, expected)

    rotating = Module().model
    rotating.load_state_dict(module.model.state_dict())
    with torch.no_grad():
        losses = [model(input_ids=TOKENS, labels=TOKENS).loss for model in (module.model, rotating)]
    assert abs(losses[0] - losses[1]) > 0.01


def saving(directory):
    """Save each epoch, after its validation."""
    return ModelCheckpoint(directory, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("is_reused", [False, True])
def test_averages_resume_on_either_side_of_the_drop(reference, tmp_path, kind, epoch, is_reused):
    """Also in a module that has been trained behind the drop: ``ckpt_path`` decides."""
    average = AVERAGES[kind]
    expected = reference(Module(), average())
    whole = fit(Module(), DropPositions(AT), average(), saving(tmp_path), enable_checkpointing=True)
    assert_same(whole, expected)

    module = whole if is_reused else Module()
    module.losses = []
    options = {"ckpt_path": tmp_path / f"epoch={epoch}.ckpt", "num_sanity_val_steps": 0}
    fit(module, DropPositions(AT), average(), **options)
    assert len(module.losses) == (2 - epoch) * (EPOCH + 2)
    # Lightning's moving average rounds inv_freq, a buffer that no checkpoint holds.
    tolerance = 1e-4 if is_reused and kind == "ema" else 0.0
    assert_same(module, expected, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluations_take_the_state_of_the_checkpoint(reference, tmp_path, stage):
    """In a new module, and in one that has been trained behind the drop."""
    trained = fit(Module(), DropPositions(AT), saving(tmp_path), enable_checkpointing=True)
    expected = reference(Module())
    assert_same(trained, expected)
    for module in (Module(), trained):
        for epoch in (2, 0, 1, 0):
            module.losses = []
            evaluate = getattr(trainer_of([DropPositions(AT)]), stage)
            evaluate(
                module,
                DataLoader(TOKENS[:8], batch_size=8),
                ckpt_path=tmp_path / f"epoch={epoch}.ckpt",
            )
            at_its_end = (epoch + 1) * (EPOCH + 2)
            assert module.losses == [expected.losses[at_its_end]]


@pytest.mark.slow
def test_a_sanity_check_has_the_state_of_the_checkpoint(reference, tmp_path):
    fit(Module(), DropPositions(AT), saving(tmp_path), enable_checkpointing=True)
    expected = reference(Module())
    for epoch in (0, 1):
        module = Module()
        fit(module, DropPositions(AT), ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        at_its_end = (epoch + 1) * (EPOCH + 2)
        assert module.losses == expected.losses[at_its_end:]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "batches"), [(6, 12), (0.5, 12), (0, 0)])
def test_accumulation_drops_before_the_first_micro_batch_of_an_update(reference, at, batches):
    """Two batches an update: 12 updates in all."""
    options = {"accumulate_grad_batches": 2}
    expected = reference(Module(), at=batches, **options)
    assert_same(fit(Module(), DropPositions(at), **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0.5, 9])
def test_two_optimizers_that_step_at_different_batches(reference, at):
    """18 passes in 24 batches."""
    expected = reference(TwoOptimizers())
    assert_same(fit(TwoOptimizers(), DropPositions(at)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 1])
def test_two_optimizers_resume_on_either_side_of_the_drop(reference, tmp_path, epoch):
    expected = reference(TwoOptimizers())
    callbacks = DropPositions(0.5), saving(tmp_path)
    module = fit(TwoOptimizers(), *callbacks, enable_checkpointing=True)
    assert_same(module, expected)
    module.losses = []
    options = {"ckpt_path": tmp_path / f"epoch={epoch}.ckpt", "num_sanity_val_steps": 0}
    assert_same(fit(module, DropPositions(0.5), **options), expected)


class OfDecoder(Module):
    """Holds a decoder of this package."""

    def __init__(self):
        super().__init__()
        config = ModelConfig(32, 48, 2, 4, 2, None, 64)
        layout = uniform(rope(8), layers=2, heads=2, training_length=16)
        self.model = Decoder(config, layout)

    def loss(self, batch):
        loss = self.model.loss(batch[:, :-1], batch[:, 1:])
        self.losses.append(loss.item())
        return loss


class Layouts(L.Callback):
    """Assigns a layout after a number of batches."""

    def __init__(self, layouts):
        self.layouts = layouts

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batches = trainer.fit_loop.total_batch_idx
        if batches in self.layouts:
            pl_module.model.layout = self.layouts[batches]
            trainer.optimizers[0].state.clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("is_reused", [False, True])
def test_a_decoder_that_is_averaged_drops_in_steps(tmp_path, kind, epoch, is_reused):
    """By two callbacks; a resume before, between and behind them."""
    average = AVERAGES[kind]
    start = OfDecoder().model.layout
    layouts = {4: drop(start, layers=[0]), 20: drop(start)}
    expected = fit(OfDecoder(), Layouts(layouts), average())

    def callbacks():
        return DropPositions(20, layers=[1]), average(), DropPositions(4, layers=[0])

    whole = fit(OfDecoder(), *callbacks(), saving(tmp_path), enable_checkpointing=True)
    assert_same(whole, expected)
    module = whole if is_reused else OfDecoder()
    module.losses = []
    options = {"ckpt_path": tmp_path / f"epoch={epoch}.ckpt", "num_sanity_val_steps": 0}
    assert_same(fit(module, *callbacks(), **options), expected)
