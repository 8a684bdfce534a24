"""Updates of a LanguageModule are those of a plain loop, whatever optimizer and micro-batches."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, RMSprop

from tests.lightning.updates import (
    Smooth,
    decoder,
    fit,
    mean_loss,
    micro_batch,
    micro_batches,
    smooth,
    steps_of,
    train_plainly,
)
from tests.program import run_ranks
from trainer.common.errors import UserError
from trainer.lightning import LanguageModule, schedule
from trainer.lightning.module import Tally, check_updates, ends_step, evaluating
from trainer.model.backends import BACKENDS, cudnn_attention

CLIP = 0.5


class WithOptimizers(LanguageModule):
    """A module with optimizers of the user's: ``make`` returns one or several."""

    def __init__(self, make, **options):
        super().__init__(decoder(), gradient_clip=CLIP, **options)
        self.make = make
        self.automatic_optimization = not isinstance(make(self.model), list)

    def configure_optimizers(self):
        return self.make(self.model)


def muon_and_adamw(model):
    matrices = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if "layers" not in name or p.ndim < 2]
    return [Muon(matrices, lr=1e-2), AdamW(others, lr=1e-2)]


OPTIMIZERS = {
    "AdamW fused": lambda model: smooth(AdamW(model.parameters(), 1e-2, fused=True)),
    "AdamW": lambda model: smooth(AdamW(model.parameters(), 1e-2)),
    "AdamW, rate a tensor": lambda model: smooth(AdamW(model.parameters(), torch.tensor(1e-2))),
    "Adam fused": lambda model: smooth(Adam(model.parameters(), 1e-2, fused=True)),
    "Adagrad fused": lambda model: Adagrad(model.parameters(), 1e-2, fused=True),
    "SGD fused": lambda model: SGD(model.parameters(), 0.1, momentum=0.9, fused=True),
    "SGD": lambda model: SGD(model.parameters(), 0.1, momentum=0.9),
    "NAdam": lambda model: smooth(NAdam(model.parameters(), 1e-2)),
    "RMSprop": lambda model: smooth(RMSprop(model.parameters(), 1e-3)),
    "Adafactor": lambda model: Adafactor(model.parameters(), 1e-2),
    "ours": lambda model: Smooth(model, 1e-2).configure_optimizers(),
    "our Muon": lambda model: LanguageModule(model, optimizer="muon").configure_optimizers(),
}


def batches_with_nan():
    """The second of three steps has a loss that is not finite."""
    batches = micro_batches()
    batches[2]["weights"][0, 0] = math.nan
    return batches


def assert_close(model, other, atol=2e-6):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def copied(batches):
    """Copies, so that no test changes what another reads."""
    return copy.deepcopy(batches)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_weigh_tokens_alike_are_clipped_and_skipped(name):
    """Micro-batches of several shapes, a loss that is not finite, and a step of one micro-batch."""
    module = WithOptimizers(OPTIMIZERS[name])
    plain = copy.deepcopy(module.model)
    trainer = fit(module, batches_with_nan())
    optimizer = OPTIMIZERS[name](plain)
    train_plainly(plain, [optimizer], steps_of(batches_with_nan()), CLIP)
    # Muon's products are in bfloat16.
    assert_close(module.model, plain, atol=1e-3 if "Muon" in name else 2e-6)
    assert module.tally.read()["skipped_steps"] == 1
    assert trainer.global_step == 3
    (trained,) = trainer.optimizers
    for ours, reference in zip(trained.state.values(), optimizer.state.values(), strict=True):
        assert ours.keys() == reference.keys()
        if "step" in ours:
            assert ours["step"] == reference["step"] == 2


def test_several_optimizers_update_together():
    module = WithOptimizers(muon_and_adamw, schedule=lambda step: 1 / (1 + step))
    plain = copy.deepcopy(module.model)
    fit(module, batches_with_nan(), accumulate_grad_batches=1)
    optimizers = muon_and_adamw(plain)
    for step, batch in enumerate(batches_with_nan()):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        train_plainly(plain, optimizers, [[batch]], CLIP)
    assert_close(module.model, plain, atol=1e-3)
    assert module.tally.read()["skipped_steps"] == 1


@pytest.mark.parametrize("value", [0.1, 10.0, 0])
@pytest.mark.parametrize("name", ["SGD fused", "SGD"])
def test_the_trainers_norm_replaces_the_modules(name, value):
    module = WithOptimizers(OPTIMIZERS[name])
    plain = copy.deepcopy(module.model)
    fit(module, micro_batches(), gradient_clip_val=value)
    optimizer = OPTIMIZERS[name](plain)
    train_plainly(plain, [optimizer], steps_of(micro_batches()), value or math.inf)
    assert_close(module.model, plain)


class Hooks(L.Callback):
    """Notes the norm of gradients when Lightning says that they are not clipped yet."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        grads = [p.grad for p in module.parameters()]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))


@pytest.mark.parametrize("fused", [True, False])
def test_callbacks_see_gradients_of_the_mean_loss_before_they_are_clipped(fused):
    batches = [micro_batches()[0]] * 2
    hooks = Hooks()
    module = WithOptimizers(lambda model: SGD(model.parameters(), 0.1, fused=fused))
    plain = copy.deepcopy(module.model)
    fit(module, copied(batches), callbacks=[hooks])
    mean_loss(plain, batches).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert norm > CLIP
    assert hooks.norms == [pytest.approx(float(norm), rel=1e-5)]
    assert module.tally.read()["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_what_a_subclass_adds_to_the_loss_is_weighed_by_tokens():
    class Penalized(WithOptimizers):
        def training_step(self, batch, index):
            return super().training_step(batch, index) + self.model.norm.weight.sum()

    gains = []
    for kind in (WithOptimizers, Penalized):
        module = kind(OPTIMIZERS["SGD"])
        module.gradient_clip = 0
        fit(module, micro_batches()[:2])
        gains.append(module.model.norm.weight.detach())
    torch.testing.assert_close(gains[0] - gains[1], torch.full((32,), 0.1))


@pytest.mark.parametrize("fused", [True, False])
def test_optimizers_are_left_as_other_loops_expect_them(fused):
    module = WithOptimizers(lambda model: SGD(model.parameters(), 0.1, fused=fused))
    (optimizer,) = fit(module, micro_batches()).optimizers
    before = module.model.norm.weight.detach().clone()
    module.model.norm.weight.grad = torch.ones_like(before)
    optimizer.step()
    torch.testing.assert_close(module.model.norm.weight, before - 0.1)


def test_a_fit_that_was_interrupted_leaves_nothing_to_the_next():
    class Interrupted(L.Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError

    module = Smooth(decoder(), 1e-2, gradient_clip=0)  # which would hide another scale
    plain = copy.deepcopy(module.model)
    with pytest.raises(ZeroDivisionError):
        fit(module, micro_batches(), callbacks=[Interrupted()])
    fit(module, micro_batches())
    optimizer = Smooth(plain, 1e-2).configure_optimizers()
    train_plainly(plain, [optimizer], steps_of(micro_batches()), math.inf)
    assert_close(module.model, plain)


@pytest.mark.parametrize("accumulated", [1, 2, 3, 5, 9])
def test_the_end_of_a_step_is_known_in_its_last_micro_batch(accumulated):
    """Of five micro-batches in an epoch; the last step of an epoch may have fewer."""

    class Ends(L.Callback):
        known = 0

        def on_train_batch_start(self, trainer, module, batch, index):
            self.known += ends_step(trainer, index)

        def on_train_batch_end(self, trainer, *_):
            assert self.known == trainer.global_step

    trainer = fit(
        LanguageModule(decoder(), 1e-2),
        micro_batches(),
        callbacks=[Ends()],
        accumulate_grad_batches=accumulated,
        max_epochs=2,
    )
    assert trainer.global_step == 2 * math.ceil(5 / accumulated)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp"])
def test_ranks_with_unequal_tokens_make_the_updates_of_one_process(tmp_path, strategy):
    script = Path(__file__).with_name("updates.py")
    for rank in run_ranks(2, script, strategy, cwd=tmp_path):
        assert rank.returncode == 0, rank.stderr[-4000:]


def test_bf16_mixed_is_the_decoders_own_bf16():
    mixed, own = (LanguageModule(decoder(), 1e-2) for _ in range(2))
    own.model.compute_dtype = torch.bfloat16
    fit(mixed, micro_batches(), precision="bf16-mixed")
    fit(own, micro_batches(), precision="32-true")
    assert_close(mixed.model, own.model, atol=0)


def test_bf16_mixed_ends_with_its_trainer():
    module = LanguageModule(decoder(), 1e-2)
    fit(module, micro_batches(), precision="bf16-mixed")
    states = module.model.hidden_states(micro_batches()[0]["input_ids"])
    assert states.dtype == torch.float32


@pytest.mark.parametrize("own", [None, torch.bfloat16])
def test_the_decoder_s_own_dtype_outlives_bf16_mixed_also_behind_an_error(own):
    class Failing(L.Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError

    module = LanguageModule(decoder(), 1e-2)
    module.model.compute_dtype = own
    with pytest.raises(ZeroDivisionError):
        fit(module, micro_batches(), precision="bf16-mixed", callbacks=[Failing()])
    for precision in ("32-true", "bf16-mixed"):
        fit(module, micro_batches(), precision=precision)
        assert module.model.compute_dtype == own


def test_bf16_true_trains_on_weights_of_tokens():
    module = LanguageModule(decoder(), 1e-2)
    fit(module, micro_batches(), precision="bf16-true")
    assert module.model.norm.weight.dtype == torch.bfloat16
    assert module.tally.read()["skipped_steps"] == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_validation_loss_is_the_mean_over_weighted_tokens(precision):
    """Batches with few tokens, with none that counts, and with more than bfloat16 can count."""
    batches = [micro_batch(0, 3, 7), micro_batch(1, 3, 1000), micro_batch(2, 1, 30, weighted=True)]
    batches[1]["weights"] = torch.ones(3, 1000)
    batches.append({**micro_batch(3, 2, 9), "weights": torch.zeros(2, 9)})
    module = LanguageModule(decoder())
    trainer = L.Trainer(accelerator="cpu", logger=False, precision=precision)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    (logged,) = trainer.validate(module, loader, verbose=False)
    total = weight = 0.0
    for batch in copied(batches):
        with torch.no_grad():
            logits = module.model(batch["input_ids"]).float()
        losses = F.cross_entropy(logits.mT, batch["labels"], reduction="none")
        weights = batch.get("weights", torch.ones(losses.shape))
        total += (losses * weights).sum().item()
        weight += weights.sum().item()
    assert logged["val_loss"] == pytest.approx(total / weight, rel=1e-3)


def test_the_validation_loss_stays_within_documents():
    batch = micro_batch(0, 1, 12)
    batch["documents"] = torch.tensor([[0] * 5 + [1] * 7])
    module = LanguageModule(decoder())
    trainer = L.Trainer(accelerator="cpu", logger=False)
    loader = torch.utils.data.DataLoader([batch], batch_size=None)
    (logged,) = trainer.validate(module, loader, verbose=False)
    alone = []
    for part in (slice(0, 5), slice(5, 12)):
        alone.append(
            module.model.token_losses(batch["input_ids"][:, part], batch["labels"][:, part])
        )
    assert logged["val_loss"] == pytest.approx(torch.cat(alone, dim=1).mean().item(), rel=1e-5)


def with_scheduler(model):
    optimizer = AdamW(model.parameters(), 1e-2)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Half(L.pytorch.plugins.precision.Precision):
    precision = "16-mixed"


@pytest.mark.parametrize(
    ("make", "options", "key"),
    [
        (OPTIMIZERS["AdamW"], {"plugins": [Half()]}, "precision"),
        (OPTIMIZERS["AdamW"], {"precision": "16-true"}, "precision"),
        (
            OPTIMIZERS["AdamW"],
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm",
        ),
        (lambda model: LBFGS(model.parameters()), {}, "configure_optimizers"),
        (with_scheduler, {}, "schedule"),
    ],
    ids=["float16", "float16 weights", "clipping by value", "LBFGS", "two schedules"],
)
def test_what_an_update_cannot_serve_is_refused_before_the_first_one(make, options, key):
    module = WithOptimizers(make, schedule=schedule(3))
    with pytest.raises(UserError, match=f"^{key}: "):
        fit(module, micro_batches(), **options)
    assert not module.micro_batches


def test_strategies_whose_gradients_it_cannot_read_are_refused():
    module = SimpleNamespace(trainer=SimpleNamespace(strategy=object(), precision="32-true"))
    with pytest.raises(UserError, match=r"^strategy: "):
        check_updates(module)


def test_a_training_step_that_weighs_no_tokens_is_refused():
    class Own(LanguageModule):
        def training_step(self, batch, index):
            return self.model.loss(batch["input_ids"], batch["labels"])

    with pytest.raises(UserError, match=r"^training_step: "):
        fit(Own(decoder()), micro_batches())


def test_a_scheduler_of_the_users_holds_without_ours():
    module = WithOptimizers(with_scheduler)
    trainer = fit(module, micro_batches(), max_epochs=2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)


def test_our_schedule_holds_for_an_optimizer_of_the_users():
    module = WithOptimizers(OPTIMIZERS["SGD"], schedule=lambda step: 2.0**-step)
    trainer = fit(module, micro_batches())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 / 4


class Kernels(L.Callback):
    """Notes whether cuDNN's attention is allowed outside of the passes."""

    def __init__(self):
        self.allowed = []

    def on_train_batch_start(self, *_):
        self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())

    on_before_optimizer_step = on_train_batch_end = on_train_batch_start


@pytest.mark.parametrize("before", [True, False])
def test_cudnns_attention_is_allowed_within_the_passes_alone(monkeypatch, before):
    module, callback, within = LanguageModule(decoder()), Kernels(), []
    monkeypatch.setattr(module.model, "use_backend", lambda *_, **__: "cudnn")

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            within.append(torch.backends.cuda.cudnn_sdp_enabled())
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            within.append(torch.backends.cuda.cudnn_sdp_enabled())
            if len(within) == 6:
                raise ZeroDivisionError
            return gradient

    module.model.norm.register_forward_hook(lambda _, __, out: Watched.apply(out))
    with cudnn_attention(before):
        with pytest.raises(ZeroDivisionError):
            fit(module, micro_batches(), callbacks=[callback])
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert within == [True] * 6
    assert callback.allowed == [before] * len(callback.allowed)
    assert callback.allowed


def stored(tally):
    """The state of a tally as a checkpoint's JSON holds it."""
    return json.loads(json.dumps(tally.state()))


def add(tally, loss, skipped=False):
    tally.add(torch.tensor(loss), torch.tensor(2.0), torch.tensor(skipped))


def test_each_row_is_of_the_steps_since_the_one_before():
    """Losses begin anew; updates skipped are counted since the start."""
    tally, rows = Tally(), []
    for losses in ([1.0, 3.0], [5.0, math.nan, 7.0], [math.nan]):
        for loss in losses:
            add(tally, loss, math.isnan(loss))
        read = tally.read()
        rows.append((read["loss"], read["skipped_steps"]))
    assert rows[:2] == [(2.0, 0), (6.0, 1)]
    assert math.isnan(rows[2][0])
    assert rows[2][1] == 2
    # What a checkpoint between two rows has is of the row that has begun.
    again = Tally()
    again.load(stored(tally), torch.device("cpu"))
    for counter in (tally, again):
        add(counter, 4.0)
    assert again.read() == tally.read()
    assert again.read()["skipped_steps"] == 2


def test_updates_that_were_skipped_are_counted_in_a_row_and_since_the_start():
    tally, counted = Tally(), []
    for skipped in (True, True, False, True):
        add(tally, 1.0, skipped)
        counted.append((tally.skipped_in_a_row(), tally.read()["skipped_steps"]))
    assert counted == [(1, 1), (2, 2), (0, 2), (1, 3)]


def test_a_model_is_evaluated_without_gradients_compilation_and_kernels_for_one_length():
    """Afterwards everything is as it was, also behind an error."""
    model = decoder()
    model.layers[1].self_attn.attend = BACKENDS["flex"].attend

    def compiler(*_):
        raise AssertionError("compiled")

    compiled = torch.compile(lambda x: x + 1, backend=compiler)
    with cudnn_attention(True):  # as in training at a fixed length
        with evaluating(model):
            assert not torch.is_grad_enabled()
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert {block.self_attn.attend for block in model.layers} == {BACKENDS["sdpa"].attend}
            assert compiled(torch.ones(())) == 2
        assert torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(RuntimeError), evaluating(model):
        raise RuntimeError
    assert torch.is_grad_enabled()
    assert model.layers[1].self_attn.attend is BACKENDS["flex"].attend


@pytest.mark.parametrize(
    ("own", "precision", "half"),
    [
        (None, "32-true", False),
        (torch.bfloat16, "32-true", True),
        (None, "bf16-true", True),
        (None, "bf16-mixed", True),
    ],
)
def test_the_kernel_is_chosen_for_what_it_computes(monkeypatch, own, precision, half):
    batch, asked = micro_batch(0, 3, 8), []
    of_documents = batch | {"documents": torch.zeros(3, 8, dtype=torch.long)}
    module = LanguageModule(decoder(), attention="sdpa")
    module.model.compute_dtype = own
    use_backend = module.model.use_backend

    def noted(*given, **options):
        asked.append((*given, options))
        return use_backend(*given, **options)

    monkeypatch.setattr(module.model, "use_backend", noted)
    fit(module, [batch, of_documents], precision=precision)
    options = {"half": half, "length": 8}
    expected = [("sdpa", "cpu", {"documents": given, **options}) for given in (False, True)]
    assert asked == expected


def test_a_module_keeps_its_optimizer_for_another_fit():
    module = LanguageModule(decoder(), 1e-2)
    first, second = (fit(module, micro_batches()[:2]).optimizers[0] for _ in range(2))
    assert first is second
    assert {int(state["step"]) for state in second.state.values()} == {2}


@pytest.mark.parametrize("weighted", [False, True])
def test_labels_of_minus_100_count_neither_in_training_nor_in_validation(weighted):
    """As with torch's ``ignore_index``: like tokens of weight 0."""
    ignored = torch.zeros(3, 7, dtype=torch.bool)
    ignored[0, 2:5] = ignored[2] = True
    plain, masked = ([micro_batch(n, 3, 7, weighted=weighted) for n in range(2)] for _ in range(2))
    for batch in plain:
        batch["weights"] = batch.get("weights", torch.ones(3, 7)) * ~ignored
    for batch in masked:
        batch["labels"] = batch["labels"].masked_fill(ignored, -100)
    modules = [LanguageModule(decoder(), 1e-2) for _ in range(2)]
    losses = []
    for module, batches in zip(modules, (plain, masked), strict=True):
        fit(module, batches)
        trainer = L.Trainer(accelerator="cpu", logger=False)
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        losses += trainer.validate(module, loader, verbose=False)
    assert_close(modules[1].model, modules[0].model, atol=0)
    assert losses[0] == losses[1]
    assert modules[1].tally.read()["skipped_steps"] == 0
