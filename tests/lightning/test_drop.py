"""The module, its data and the drop in a Lightning script of one's own."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

from tests.program import run_ranks
from trainer.common.errors import UserError
from trainer.config import DataConfig, DropConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.tokenizer import vocabulary_size
from trainer.hf import drop_rotation, is_dropped
from trainer.lightning import DropPositions, LanguageModule, TokenData, schedule
from trainer.lightning.datamodule import Batches
from trainer.lightning.drop import match_gains
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import rope
from trainer.positional.layout import drop, uniform


class RandomSamples:
    """Samples of 32 tokens, each drawn from its number."""

    def __getitems__(self, numbers):
        generators = [torch.Generator().manual_seed(number) for number in numbers]
        ids = torch.stack([torch.randint(64, (33,), generator=g) for g in generators])
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def decoder(seed=0):
    config = ModelConfig(32, 48, 2, 4, 2, None, 64, qk_norm=QKNormConfig(when="after_drop"))
    return Decoder(config, uniform(rope(8), layers=2, heads=2, training_length=32), seed)


class Llama(L.LightningModule):
    """A module with a model of transformers."""

    def __init__(self, vocab_size=64):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, _):
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def fit(module, *, steps=12, begin=None, save=None, callbacks=(), **options):
    """Train for ``steps`` updates with a drop after 6, from or to a checkpoint of Lightning."""
    L.seed_everything(0, verbose=False)
    probe = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(1))
    mine = isinstance(module, LanguageModule)
    more = {"gain": "matched", "probe": probe} if mine else {}
    dropping = DropPositions(6, rewarm=3, optimizer_state="reset", **more)
    options = {"limit_val_batches": 0, "logger": False, "devices": 1, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[dropping, *callbacks],
            **options,
        )
        data = TokenData("", 32, 8, workers=0, samples=RandomSamples())
        trainer.fit(module, data, ckpt_path=begin)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


def ours(seed=0):
    return LanguageModule(decoder(seed), 1e-3, schedule=schedule(12, warmup=2))


@pytest.mark.parametrize("at", [4, 6, 7, 9])  # before the drop, at it, in rewarming, behind it
@pytest.mark.parametrize("make", [ours, Llama])
def test_lightnings_checkpoints_resume_bitwise_on_either_side_of_the_drop(tmp_path, make, at):
    whole = fit(make())
    fit(make(), steps=at, save=tmp_path / "a.ckpt")
    resumed = fit(make(), begin=tmp_path / "a.ckpt")
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), b in zip(whole.named_buffers(), resumed.buffers(), strict=True):
        assert torch.equal(a, b), name
    if make is ours:
        assert whole.model.layout == resumed.model.layout
        assert not whole.model.layout.rotates
        assert all(layer.qk_norm for layer in whole.model.layout.layers)
    else:
        assert whole.model.config.rope_parameters["factor"] == 1e30


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_and_resume_on_either_side_of_the_drop(tmp_path, strategy):
    """With Lightning's own strategies; one step's samples are split among the ranks."""
    script = Path(__file__).with_name("own_script.py")
    for rank in run_ranks(2, script, strategy, cwd=tmp_path):
        assert rank.returncode == 0, rank.stderr[-4000:]
    for make, file in ((ours, "ours"), (Llama, "ShardedLlama")):
        whole, *resumed = torch.load(tmp_path / f"{file}.pt")
        for name, parameter in fit(make()).named_parameters():
            torch.testing.assert_close(whole[name], parameter.detach(), rtol=0, atol=1e-6)
            for other in resumed:
                assert torch.equal(other[name], whole[name]), name


def test_accumulation_trains_as_whole_batches():
    whole, parts = fit(ours()), fit(ours(), accumulate_grad_batches=4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def trainer_of(*callbacks, **options):
    options = {"limit_val_batches": 0, "logger": False, "devices": 1, **options}
    return L.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
        **options,
    )


def batches(count=16):
    """Batches of one sequence."""
    samples = RandomSamples()
    return DataLoader([samples.__getitems__([n]) for n in range(count)], batch_size=None)


class Watched(Llama):
    """Notes of each batch whether the model rotates."""

    def __init__(self):
        super().__init__()
        self.rotates = []

    def training_step(self, batch, index):
        self.rotates.append(not is_dropped(self.model))
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.rotates_in_validation = not is_dropped(self.model)


class SeveralOptimizers(Watched):
    """``steps``: given the batch's index, the indices of the optimizers that step."""

    automatic_optimization = False

    def __init__(self, steps, count=2):
        super().__init__()
        self.steps, self.count, self.rates = steps, count, []

    def configure_optimizers(self):
        parameters = [*self.parameters()]
        parts = [parameters[number :: self.count] for number in range(self.count)]
        return [torch.optim.SGD(part, lr=0.01) for part in parts]

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))
        optimizers = self.optimizers()
        if self.count == 1:
            optimizers = [optimizers]
        for number in self.steps(index):
            optimizers[number].step()
            optimizers[number].zero_grad()


@pytest.mark.parametrize("name", ["at", "rewarm"])
@pytest.mark.parametrize("number", [1.5, 1.0, "85%", -1, -0.5, float("nan"), True, None])
def test_other_numbers_than_updates_and_shares_are_refused(name, number):
    with pytest.raises(UserError, match=f"DropPositions.{name}: expected a number of updates"):
        DropPositions(**{"at": 3, name: number})


@pytest.mark.parametrize(("name", "value"), [("optimizer_state", "forget"), ("gain", "two")])
def test_unknown_policies_are_refused_with_those_there_are(name, value):
    with pytest.raises(UserError, match=f"DropPositions.{name}: expected one of (keep|one), "):
        DropPositions(3, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("to", "rppe"), ("layers", [9]), ("heads", [9])])
def test_what_a_decoder_does_not_have_is_refused_by_its_argument(name, value):
    with pytest.raises(UserError, match=f"^DropPositions.{name}: expected "):
        DropPositions(3, **{name: value})._layout_behind(decoder())


def test_defaults_are_those_of_the_program():
    assert DropPositions(3).optimizer_state == DropConfig().optimizer_state
    assert DropPositions(3).to == DropConfig().to


class Rates(Llama):
    """Notes the learning rate within each update; ``sets``: training_step sets it."""

    def __init__(self, lr=1.0, gamma=0.5, sets=False):
        super().__init__()
        self.lr, self.gamma, self.sets, self.rates = lr, gamma, sets, []

    def configure_optimizers(self):
        rates = self.rates

        class SGD(torch.optim.SGD):
            def step(self, closure=None):
                if closure is not None:
                    closure()
                rates.append(float(self.param_groups[0]["lr"]))

        optimizer = SGD(self.parameters(), lr=self.lr)
        if self.sets:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, index):
        if self.sets:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = 0.5**index
        return super().training_step(batch, index)


REWARMED = [1, 1 / 2, 1 / 4 * 1 / 4, 1 / 8 * 2 / 4, 1 / 16 * 3 / 4, 1 / 32, 1 / 64, 1 / 128]


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("rewarm", [4, 0.5])
def test_rewarming_lowers_rates_in_the_step_alone(sets, lr, rewarm):
    """Also rates that are tensors, that a schedule multiplies, and that the module sets."""
    module = Rates(lr.clone() if isinstance(lr, torch.Tensor) else lr, sets=sets)
    trainer_of(DropPositions(2, rewarm=rewarm), max_steps=8).fit(module, batches())
    assert module.rates == REWARMED
    group = module.trainer.optimizers[0].param_groups[0]
    assert group["lr"] == (1 / 128 if sets else 1 / 256)
    assert "scheduled_lr" not in group
    if isinstance(lr, torch.Tensor) and not sets:
        assert group["lr"] is module.lr


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("rewarm", [(4, 4), (8, 2), (3, 3), (0, 3), (4, 0)])
def test_of_drops_that_rewarm_together_the_lowest_rate_counts(rewarm, is_reversed):
    """In whatever order the callbacks stand."""

    class Constant(Rates, Own):
        def __init__(self):
            Own.__init__(self)
            self.lr, self.gamma, self.sets, self.rates = 1.0, 1.0, False, []

        training_step = Own.training_step

    def factor(update, at, over):
        return 1.0 if update < at else min(1.0, (update - at + 1) / max(over, 1))

    drops = [DropPositions(at, layers=[i], rewarm=rewarm[i]) for i, at in enumerate((1, 3))]
    module = Constant()
    trainer_of(*(drops[::-1] if is_reversed else drops), max_steps=9).fit(module, batches())
    expected = [min(factor(n, 1, rewarm[0]), factor(n, 3, rewarm[1])) for n in range(9)]
    assert module.rates == pytest.approx(expected)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 1.0


def test_rewarming_is_right_after_updates_that_a_gradient_scaler_skips():
    """The schedule goes on, and no lowered rate stays."""

    class Overflowing(Rates):
        def on_after_backward(self):
            if self.trainer.global_step == 3 and not self.skipped:
                self.skipped = True
                next(self.parameters()).grad.fill_(torch.inf)

    module = Overflowing()
    module.skipped = False
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    trainer_of(DropPositions(2, rewarm=4), max_steps=8, plugins=[precision]).fit(module, batches())
    assert module.skipped
    assert module.rates == REWARMED[:3] + REWARMED[4:]
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 1 / 256


def test_rewarming_that_a_training_does_not_finish_is_not_the_next_one_s():
    dropping, rates = DropPositions(1, rewarm=4), []
    for steps in (2, 3):
        module = Rates()
        trainer_of(dropping, max_steps=steps).fit(module, batches())
        rates.append(module.rates)
    assert rates[0][1] < rates[0][0]
    assert rates[1][0] == rates[0][0]


@pytest.mark.parametrize("dropped_at", [None, 3])
def test_a_model_takes_the_state_of_a_checkpoint_whatever_state_it_has(dropped_at):
    module, dropping = Watched(), DropPositions(3)
    dropping.setup(SimpleNamespace(global_step=5), module, "validate")
    for _ in range(2):
        dropping.load_state_dict({"dropped_at": dropped_at, "rewarm_updates": 0})
        assert is_dropped(module.model) == (dropped_at is not None)
        drop_rotation(module)


def test_an_error_within_a_step_leaves_the_rate_of_the_schedule():
    class Broken(Rates):
        def on_before_optimizer_step(self, optimizer):
            raise RuntimeError

    module = Broken()
    with pytest.raises(RuntimeError):
        trainer_of(DropPositions(0, rewarm=4), max_steps=8).fit(module, batches())
    optimizer = module.trainer.optimizers[0]
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert not optimizer._optimizer_step_post_hooks


def test_rewarming_is_refused_with_deepspeed():
    """Its engine steps by itself."""
    strategy = object.__new__(DeepSpeedStrategy)
    module = SimpleNamespace(automatic_optimization=True)
    trainer = SimpleNamespace(
        strategy=strategy, callbacks=[], lightning_module=module, estimated_stepping_batches=9
    )
    with pytest.raises(UserError, match=r"DropPositions\.rewarm: expected 0"):
        DropPositions(3, rewarm=2).on_train_start(trainer, Llama())
    DropPositions(3).on_train_start(trainer, Llama())


def test_rewarming_goes_on_as_it_began_after_a_resume_with_another(tmp_path):
    half = trainer_of(DropPositions(2, rewarm=4), max_steps=3)
    half.fit(Rates(), batches())
    half.save_checkpoint(tmp_path / "a.ckpt")
    module = Rates()
    trainer = trainer_of(DropPositions(2, rewarm=0), max_steps=8)
    trainer.fit(module, batches(), ckpt_path=tmp_path / "a.ckpt")
    assert module.rates == REWARMED[3:]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1 / 256


def test_a_share_counts_all_updates_of_the_epochs():
    dropping = DropPositions(0.5)
    trainer_of(dropping, max_epochs=2, accumulate_grad_batches=2).fit(Llama(), batches())
    assert dropping.dropped_at == 8


BOTH = {"steps": lambda _: (0, 1)}
TURNS = {"steps": lambda index: (index % 2,)}
FIVE_TO_ONE = {"steps": lambda index: (0, 1) if index % 5 == 4 else (0,)}
FOURTHS = {"steps": lambda index: (0,) if index % 4 == 3 else (), "count": 1}


@pytest.mark.parametrize(
    ("steps", "at", "options", "first"),
    [
        (BOTH, 0.75, {"max_epochs": 1}, 30),
        (BOTH, 0.75, {"max_steps": 80}, 30),
        (BOTH, 0.75, {"max_steps": 80, "max_epochs": 1}, 30),
        (BOTH, 30, {"max_epochs": 1}, 30),
        (TURNS, 0.75, {"max_epochs": 1}, 30),
        (TURNS, 15, {"max_epochs": 1}, 30),
        (TURNS, 0.75, {"max_steps": 40}, 30),
        (FIVE_TO_ONE, 0.75, {"max_epochs": 1}, 30),
        (FIVE_TO_ONE, 18, {"max_epochs": 1}, 30),
        (FOURTHS, 0.8, {"max_epochs": 1}, 32),
        (FOURTHS, 8, {"max_steps": 10}, 32),
    ],
)
def test_a_share_is_a_share_and_an_update_a_step_of_each_optimizer(steps, at, options, first):
    """With manual optimization, whichever optimizer steps when: 40 batches."""
    module = SeveralOptimizers(**steps)
    trainer_of(DropPositions(at), **options).fit(module, batches(40))
    assert module.rotates == [True] * first + [False] * (40 - first)


def test_all_optimizers_are_rewarmed_and_reset():
    class Adams(SeveralOptimizers):
        def configure_optimizers(self):
            parameters = [*self.parameters()]
            return [torch.optim.AdamW(parameters[part::2], lr=0.01) for part in (0, 1)]

        def on_before_optimizer_step(self, optimizer):
            self.rates.append(optimizer.param_groups[0]["lr"])

    module = Adams(lambda _: (0, 1))
    trainer_of(DropPositions(4, rewarm=2), max_steps=14).fit(module, batches())
    assert module.rates == [0.01] * 8 + [0.005] * 2 + [0.01] * 4
    for optimizer in module.trainer.optimizers:
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_one_callback_serves_two_trainings():
    dropping = DropPositions(2)
    for module in (Watched(), Watched()):
        trainer_of(dropping, max_steps=1).fit(module, batches())
        trainer_of(dropping, max_steps=3).fit(module, batches())
        assert module.rotates == [True, True, True, False]


def test_one_trainer_drops_in_another_module_too():
    dropping = DropPositions(2)
    trainer = trainer_of(dropping, max_epochs=1)
    trainer.fit(Watched(), batches(3))
    trainer.fit_loop.max_epochs = 2
    module = Watched()
    trainer.fit(module, batches(3))
    assert module.rotates == [False] * 3


def test_one_trainer_goes_on_behind_the_drop_in_the_same_module():
    module = Own()
    trainer = trainer_of(DropPositions(2), max_epochs=1)
    trainer.fit(module, batches(3))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(3))
    assert dropped_layers(module) == ["11"] * 2 + ["00"] * 4


class Own(L.LightningModule):
    """Somebody's module with a Decoder: nothing but the callback knows of its layout."""

    def __init__(self, when="after_drop"):
        super().__init__()
        config = ModelConfig(32, 48, 2, 4, 2, None, 64, qk_norm=QKNormConfig(when=when))
        self.model = Decoder(config, uniform(rope(8), layers=2, heads=2, training_length=32))
        self.layouts = []

    def training_step(self, batch, _):
        self.layouts.append(self.model.layout)
        return self.model.loss(batch["input_ids"], batch["labels"])

    def validation_step(self, batch, _):
        self.validated = self.model.layout

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_frozen_teacher_keeps_its_encoding():
    module = Own()
    teacher = decoder().requires_grad_(False)
    student = module._modules.pop("model")
    module.teacher, module.model = teacher, student
    student.embed_tokens.requires_grad_(False)  # a part that is trained is enough
    trainer_of(DropPositions(1), max_steps=2).fit(module, batches())
    assert teacher.layout.rotates
    assert not student.layout.rotates
    teacher.requires_grad_(True)
    with pytest.raises(UserError, match="expected one decoder that is trained, got 2"):
        trainer_of(DropPositions(1), max_steps=2).fit(module, batches())


def test_matched_gains_need_a_probe():
    with pytest.raises(UserError, match=r"DropPositions\.gain: expected a probe"):
        DropPositions(3, gain="matched")


def dropped_layers(module):
    return [
        "".join(str(int(layer.spectra[0].rotates)) for layer in layout.layers)
        for layout in module.layouts
    ]


@pytest.mark.parametrize(
    ("when", "asked", "norms"),
    [("never", None, False), ("after_drop", None, True), ("after_drop", False, False)],
)
def test_norms_come_on_if_the_decoder_has_some_that_wait(when, asked, norms):
    module = Own(when)
    trainer_of(DropPositions(1, qk_norm=asked), max_steps=2).fit(module, batches())
    assert [layout.layers[0].qk_norm for layout in module.layouts] == [False, norms]


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("is_reused", [False, True])
def test_two_callbacks_drop_in_steps_and_resume_between(tmp_path, at, is_reused):
    def trainer(steps):
        return trainer_of(
            DropPositions(2, layers=[0]), DropPositions(4, layers=[1]), max_steps=steps
        )

    whole = Own()
    trainer(6).fit(whole, batches())
    assert dropped_layers(whole) == ["11"] * 2 + ["01"] * 2 + ["00"] * 2

    first = Own()
    half = trainer(at)
    half.fit(first, batches())
    half.save_checkpoint(tmp_path / "a.ckpt")
    module = whole if is_reused else Own()
    module.layouts = []
    trainer(6).fit(module, batches(), ckpt_path=tmp_path / "a.ckpt")
    assert dropped_layers(first) + dropped_layers(module) == ["11"] * 2 + ["01"] * 2 + ["00"] * 2


def test_two_callbacks_drop_heads_in_steps():
    module = Own()
    trainer_of(DropPositions(1, heads=[0]), DropPositions(2, heads=[1]), max_steps=3).fit(
        module, batches()
    )
    heads = [[s.rotates for s in layout.layers[1].spectra] for layout in module.layouts]
    assert heads == [[True, True], [False, True], [False, False]]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_of_drops_of_the_same_layers_the_later_one_stays_after_a_resume(tmp_path, is_reversed):
    def trainer(steps):
        drops = [DropPositions(2, to="alibi"), DropPositions(4, to="nope")]
        return trainer_of(*(drops[::-1] if is_reversed else drops), max_steps=steps)

    first = Own()
    half = trainer(5)
    half.fit(first, batches())
    half.save_checkpoint(tmp_path / "a.ckpt")
    module = Own()
    trainer(6).fit(module, batches(), ckpt_path=tmp_path / "a.ckpt")
    assert module.layouts == [first.layouts[-1]]


class Late(SingleDeviceStrategy):
    """Restores a checkpoint after its setup, as ModelParallelStrategy does."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize("make", [Watched, Own])
def test_strategies_that_restore_late_resume_the_same_objects_behind_the_drop(tmp_path, make):
    module = make()
    dropping = DropPositions(1)
    for at in (2, 3):
        begin = tmp_path / "2.ckpt" if at == 3 else None
        trainer = trainer_of(dropping, max_steps=at, strategy=Late("cpu"))
        trainer.fit(module, batches(), ckpt_path=begin)
        trainer.save_checkpoint(tmp_path / f"{at}.ckpt")
    states = module.rotates if make is Watched else [x.rotates for x in module.layouts]
    assert states == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("make", [Watched, Own])
@pytest.mark.parametrize("is_reused", [False, True])
def test_validation_and_resumes_take_the_state_of_the_checkpoint(tmp_path, make, is_reused):
    """Whatever state the module has: it is dropped behind the drop alone."""

    def rotates(module):
        return module.rotates_in_validation if make is Watched else module.validated.rotates

    module, dropping = make(), DropPositions(3)
    for at in (2, 4):
        trainer = trainer_of(dropping, max_steps=at)
        trainer.fit(module if at == 4 else make(), batches())
        trainer.save_checkpoint(tmp_path / f"{at}.ckpt")
    for at in (4, 2, 4, 2):
        if not is_reused:
            module, dropping = make(), DropPositions(3)
        validating = trainer_of(dropping, limit_val_batches=1)
        validating.validate(module, batches(), ckpt_path=tmp_path / f"{at}.ckpt")
        assert rotates(module) == (at < 3)
        trainer_of(dropping, max_steps=at + 1, limit_val_batches=1, num_sanity_val_steps=1).fit(
            module, batches(), batches(), ckpt_path=tmp_path / f"{at}.ckpt"
        )
        states = module.rotates if make is Watched else [x.rotates for x in module.layouts]
        assert states[-1] == (at < 3)
    trainer_of(dropping, limit_val_batches=1).validate(module, batches())
    assert rotates(module)


@pytest.mark.parametrize(
    ("module", "callback", "options"),
    [
        (ours, DropPositions(0.5), {"max_steps": -1, "max_epochs": -1}),
        (ours, DropPositions(3, layers=[2]), {"max_steps": 4}),
        (lambda: Own("never"), DropPositions(3, to=rope(8)), {"max_steps": 4}),
        (Llama, DropPositions(3, layers=[0]), {"max_steps": 4}),
        (Llama, DropPositions(3, optimizer_state="reset_new"), {"max_steps": 4}),
        (Llama, DropPositions(3, qk_norm=True), {"max_steps": 4}),
        (lambda: Own("never"), DropPositions(3, qk_norm=True), {"max_steps": 4}),
    ],
    ids=["share of nothing", "no layer", "the same", "layers", "new", "norms", "no norms"],
)
def test_what_cannot_be_dropped_is_refused_before_the_first_update(module, callback, options):
    module = module()
    with pytest.raises((ValueError, IndexError), match=r"DropPositions|layout|layers"):
        trainer_of(callback, **options).fit(module, TokenData("", 32, 8, samples=RandomSamples()))
    assert module.global_step == 0


def test_a_model_that_was_dropped_before_may_be_rewarmed_from_the_start():
    module = Watched()
    drop_rotation(module)
    trainer_of(DropPositions(0, rewarm=2), max_steps=2).fit(module, batches())
    assert module.rotates == [False] * 2


def test_a_module_is_loaded_from_lightnings_checkpoint_with_its_encoding(tmp_path):
    trained = fit(ours(), save=tmp_path / "a.ckpt")
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "a.ckpt", model=decoder(1))
    assert loaded.model.layout == trained.model.layout
    for a, b in zip(trained.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_effect_is_logged_just_before_and_after(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    fit(ours(), logger=logger, log_every_n_steps=1)
    rows = pd.read_csv(next(tmp_path.rglob("metrics.csv"))).set_index("step")
    model = fit(ours(), steps=6).model
    probe = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(1))
    losses = []
    with torch.no_grad():
        for layout in (model.layout, drop(model.layout, qk_norm=True)):
            if layout.layers[0].qk_norm:
                match_gains(model, layout, [probe])
            model.layout = layout
            logits = model(probe[:, :-1]).flatten(0, 1)
            losses.append(F.cross_entropy(logits, probe[:, 1:].flatten()).item())
    assert abs(losses[0] - losses[1]) > 1e-5
    effect = rows[["drop/loss_before", "drop/loss_after"]].dropna()
    assert [*effect.index] == [6]
    assert effect.iloc[0].tolist() == pytest.approx(losses, abs=3e-6)
    assert "lr: 0.001" in next(tmp_path.rglob("hparams.yaml")).read_text()


@pytest.mark.parametrize("number", [0, 1])
def test_scripts_of_the_page_run_on_a_directory_of_prepared_text(number, base, tmp_path):
    """In small sizes; the model has lost its rotation."""
    corpus = prepare_corpus(DataConfig(**base["data"]), TokenizerConfig(**base["tokenizer"]))
    llama = Llama(vocab_size=vocabulary_size(corpus.tokenizer))
    llama.model.save_pretrained(tmp_path)
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    small = {
        "32_768": f"{vocabulary_size(corpus.tokenizer)}, **{shape}, num_key_value_heads=3",
        "layers=30": "layers=2",
        "corpus/": corpus.parts[0].directory,
        "HuggingFaceTB/SmolLM2-135M": tmp_path,
        **{"length=2048": "length=32", "batch_size=32": "batch_size=4, workers=0"},
        **{"10_000, warmup=500": "4, warmup=2", "10_000,\n": "4,\n", "8_500": "2", "2_000": "2"},
        "Recalibration(),": "module := Recalibration(),",
        "max_steps": f"logger=False, default_root_dir={str(tmp_path)!r}, max_steps",
    }
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    script = page.split("```python\n")[number + 1].split("```")[0]
    for old, new in small.items():
        script = script.replace(old, str(new))
    variables = {"__name__": "script"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(script, variables)
    if number == 0:
        assert not variables["model"].layout.rotates
    else:
        assert variables["module"].model.config.rope_parameters["factor"] == 1e30


@pytest.mark.parametrize("validated", [0, 1])
def test_a_text_of_more_tokens_than_the_decoder_has_embeddings_is_refused(base, validated):
    """Also where Lightning reads validation text first."""
    corpus = prepare_corpus(DataConfig(**base["data"]), TokenizerConfig(**base["tokenizer"]))
    data = TokenData(corpus, 32, 4, workers=0)
    with pytest.raises(UserError, match=r"vocab_size: expected at least \d+, got 64"):
        trainer_of(max_steps=1, limit_val_batches=validated).fit(ours(), data)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_any_ranks_and_parts_read_the_same_samples_in_the_same_order(ranks, parts):
    """Also of steps that begin at other samples than their numbers say."""
    for offset, expected in ((0, [*range(24, 40)]), (-20, [*range(4, 20)])):
        options = {"start": 3, "offset": offset, "micro_batches": parts, "ranks": ranks}
        of_ranks = [Batches(RandomSamples(), 8, rank=r, **options).numbers() for r in range(ranks)]
        micro_batches = [next(numbers) for _ in range(2 * parts) for numbers in of_ranks]
        assert [number for micro in micro_batches for number in micro] == expected


def test_workers_take_turns():
    batches = Batches(RandomSamples(), 4, micro_batches=2)
    loaders = (DataLoader(batches, batch_size=None, num_workers=n) for n in (0, 2))
    for alone, shared in islice(zip(*loaders, strict=True), 5):
        assert torch.equal(alone["input_ids"], shared["input_ids"])


def test_gains_of_several_batches_are_those_of_one():
    gains, probe = [], torch.arange(8).view(4, 2)
    for rows in (3, 4):
        model = decoder()
        match_gains(model, drop(model.layout, qk_norm=True), probe.split(rows))
        gains.append(model.layers[0].self_attn.q_norm.weight)
    torch.testing.assert_close(*gains)


@pytest.mark.parametrize(("is_last", "done"), [(False, 2), (True, 3)])
def test_of_three_micro_batches_the_last_ends_a_step_of_two_where_the_epoch_ends(is_last, done):
    """A resumed run reads the third again, unless its step was finished."""
    trainer = trainer_of(accumulate_grad_batches=2)
    trainer.fit_loop.epoch_progress.current.ready = 1
    progress = trainer.fit_loop.epoch_loop.batch_progress
    progress.is_last_batch = is_last
    for part in (progress.current, progress.total):
        part.load_state_dict(dict.fromkeys(part.state_dict(), 3))
    data = TokenData("", 32, 8, samples=RandomSamples())
    data.trainer = trainer
    data.train_dataloader()
    assert {*progress.current.state_dict().values(), *progress.total.state_dict().values()} == {
        done
    }


def test_a_gain_is_the_size_of_the_queries_whose_next_tokens_are_in_the_probe():
    """Computed from the weights of the first layer."""
    model, probe = decoder(), torch.arange(12).view(3, 4)
    match_gains(model, drop(model.layout, qk_norm=True), [probe])
    block = model.layers[0]
    with torch.no_grad():
        x = block.input_layernorm(model.embed_tokens(probe[:, :-1]))
        expected = block.self_attn.q_proj(x).square().mean().sqrt()
    gain = block.self_attn.q_norm.weight
    torch.testing.assert_close(gain, expected.expand_as(gain))


def test_samples_without_a_corpus_are_trained_on_and_not_validated():
    data = TokenData("", 32, 8, workers=0, samples=RandomSamples())
    trainer = trainer_of(max_steps=2, limit_val_batches=1.0)
    trainer.fit(ours(), data)
    assert trainer.global_step == 2
    assert trainer.validate(ours(), data) == []


def test_no_held_out_sequences_are_no_validation():
    data = TokenData("text", 32, 8, held_out=0)
    data.trainer = SimpleNamespace(accumulate_grad_batches=1, world_size=1)
    assert data.val_dataloader() == []


def test_each_held_out_sequence_is_validated_by_one_rank(monkeypatch):
    """Lightning's sampler shares them among the ranks."""
    data, ids = TokenData("text", 32, 8, held_out=16), torch.arange(16 * 33).view(16, 33)
    monkeypatch.setattr(data, "probe", lambda count: ids[:count])
    for ranks, parts, rows in ((2, 1, 4), (2, 2, 2), (16, 1, 1)):
        data.trainer = SimpleNamespace(accumulate_grad_batches=parts, world_size=ranks)
        batches = [*data.val_dataloader()]
        assert [len(batch["input_ids"]) for batch in batches] == [rows] * (16 // rows)
        assert torch.equal(torch.cat([batch["labels"] for batch in batches]), ids[:, 1:])


@pytest.mark.parametrize("at", [2, 3, 5])
def test_two_callbacks_drop_heads_in_steps_and_resume_between(tmp_path, at):
    def trainer(steps):
        return trainer_of(DropPositions(2, heads=[0]), DropPositions(4, heads=[1]), max_steps=steps)

    def rotating(module):
        return [[s.rotates for s in layout.layers[1].spectra] for layout in module.layouts]

    first, second = Own(), Own()
    half = trainer(at)
    half.fit(first, batches())
    half.save_checkpoint(tmp_path / "a.ckpt")
    trainer(6).fit(second, batches(), ckpt_path=tmp_path / "a.ckpt")
    expected = [[True, True]] * 2 + [[False, True]] * 2 + [[False, False]] * 2
    assert rotating(first) + rotating(second) == expected
