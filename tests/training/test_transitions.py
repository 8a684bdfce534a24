"""Changes between phases, on hand-made phases and batches."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.config import ChangeConfig, DataConfig, RescaleConfig, RunConfig, TrainerConfig
from trainer.model.attention import RMSNorm
from trainer.model.backends import Choice
from trainer.model.config import QKNormConfig
from trainer.positional.spectrum import Spectrum, Temperature
from trainer.recalibration.drop import NOPE
from trainer.runs.phases import phases_of
from trainer.runs.ranks import Ranks
from trainer.runs.saved_state import Effect
from trainer.training.callbacks import transitions
from trainer.training.callbacks.transitions import (
    Transitions,
    describe,
    input_sizes,
)


def phase(**changes):
    config = RunConfig(
        data=DataConfig(sequence_length=changes.pop("length", 64)),
        trainer=changes.pop("trainer", TrainerConfig()),
    )
    (single,) = phases_of(config)
    return replace(single, **changes)


def made(*phases, **more):
    options = {"effect_batch": None, "before_drop": None, "add_metrics": None} | more
    return Transitions(phases, **options)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"drop": ChangeConfig()}, "dropped the encoding (nope)"),
        (
            {"drop": ChangeConfig(layers=[0], windows=[None, 16])},
            "dropped the encoding (nope) of layers 0; windows none, 16",
        ),
        (
            {"rescale": RescaleConfig("base", base=5e6), "windows": [16, None]},
            "new base of the frequencies (5,000,000, layers 1)",
        ),
        ({"rescale": RescaleConfig("yarn")}, "frequencies rescaled for longer sequences (yarn)"),
        ({"name": "long", "length": 4096}, "phase 'long' with sequences of 4,096 tokens"),
        (
            {"name": "long", "length": 4096, "rescale": RescaleConfig("yarn"), "layers": ["nope"]},
            "phase 'long' with sequences of 4,096 tokens",
        ),
        (
            {"rescale": RescaleConfig("pi"), "windows": [16, None]},
            "frequencies rescaled for longer sequences (pi, layers 1)",
        ),
        (
            {"rescale": RescaleConfig("pi", layers="all"), "windows": [16, None]},
            "frequencies rescaled for longer sequences (pi)",
        ),
    ],
)
def test_description_of_a_change(tiny_decoder, changes, text):
    positional = {key: changes.pop(key) for key in ("layers", "windows") if key in changes}
    layout = tiny_decoder(**positional).layout
    assert describe(phase(**changes), layout) == text
    if not positional:
        assert describe(phase(**changes)) == text


@pytest.mark.parametrize(
    ("sequences", "batch", "micro", "ranks", "shared", "parts"),
    [
        (8, 4, 4, 1, 1, 2),  # of four, as the run trains on
        (8, 12, 3, 1, 1, 4),  # three are too few to divide eight: parts of two
        (8, 16, 8, 2, 2, 2),  # they fit at once, but two ranks share them
        (8, 16, 8, 2, 1, 1),
        (9, 12, 2, 3, 3, 9),  # parts of two would not be alike
        (6, 16, 4, 4, 4, 2),  # of which four ranks have no equal shares
        (7, 2, 2, 1, 1, 7),
    ],
)
def test_a_fixed_batch_is_read_in_equal_parts_that_fit(
    sequences, batch, micro, ranks, shared, parts
):
    ids = torch.arange(sequences)[:, None].expand(sequences, 3)
    drawn = []

    def effect_batch(drawn_for):
        drawn.append(drawn_for.name)
        return {"input_ids": ids, "labels": ids + 100}

    callback = made(effect_batch=effect_batch)
    module = SimpleNamespace(device="cpu", ranks=Ranks(0, ranks, 0, ranks))
    run = TrainerConfig(batch_size=batch, micro_batch_size=micro)
    micro_batches = callback._micro_batches(module, phase(trainer=run), shared)
    assert [len(inputs) for inputs, _ in micro_batches] == [sequences // parts] * parts
    assert torch.equal(torch.cat([inputs for inputs, _ in micro_batches]), ids)
    assert torch.equal(torch.cat([targets for _, targets in micro_batches]), ids + 100)
    callback._micro_batches(module, phase(trainer=run), shared)
    callback._micro_batches(module, phase(trainer=run, name="other"), shared)
    assert drawn == ["pretrain", "other"]  # drawn once for each phase


@pytest.mark.parametrize(("parts", "alone"), [(4, False), (3, True)])
def test_ranks_share_the_parts_and_have_all_losses_in_order(monkeypatch, parts, alone):
    """Fewer parts than they could share they read alone, all of them."""
    model = SimpleNamespace(token_losses=lambda x, y: torch.stack([x, y], dim=1).float())
    monkeypatch.setattr(transitions, "evaluating", lambda module: nullcontext(model))
    callback = made()
    batches = [(torch.tensor([10 * n, 10 * n + 1]),) * 2 for n in range(parts)]
    monkeypatch.setattr(callback, "_micro_batches", lambda module, phase, ranks: batches)

    def losses(rank):
        return callback.losses(SimpleNamespace(ranks=Ranks(rank, 2, rank, 2)), phase())

    sent = []

    def first_round(losses_of_rank):
        sent.append(losses_of_rank)
        return [losses_of_rank, losses_of_rank]

    monkeypatch.setattr(transitions, "all_gather", first_round)
    losses(0), losses(1)
    in_order = [10 * n + i for n in range(parts) for i in (0, 1)]
    if alone:
        assert sent == []
    else:
        assert sent == [[[0, 1], [20, 21]], [[10, 11], [30, 31]]]
        monkeypatch.setattr(transitions, "all_gather", lambda _: sent)
    assert losses(0) == losses(1) == in_order


class Model(nn.Module):
    """Parts of a decoder that a reset of the optimizer reads."""

    def __init__(self, when):
        super().__init__()
        self.config = SimpleNamespace(qk_norm=SimpleNamespace(when=when))
        self.q_norm, self.k_norm, self.norm = (RMSNorm(2, 1e-6) for _ in range(3))
        self.linear = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("policy", "when", "remaining"),
    [
        ("keep", "after_drop", {"q_norm", "k_norm", "norm", "linear"}),
        ("reset", "after_drop", set()),
        ("reset_new", "after_drop", {"norm", "linear"}),
        ("reset_new", "always", {"q_norm", "k_norm", "norm", "linear"}),
    ],
)
def test_an_optimizer_forgets_what_its_phase_says(policy, when, remaining):
    model = Model(when)
    names = {parameter: name.split(".")[0] for name, parameter in model.named_parameters()}
    optimizer = SimpleNamespace(state=dict.fromkeys(names, "averages"))
    trainer = SimpleNamespace(optimizers=[optimizer])
    made()._reset_optimizer(trainer, SimpleNamespace(model=model), phase(optimizer_state=policy))
    assert {names[parameter] for parameter in optimizer.state} == remaining


@pytest.mark.parametrize("sides", ["both", "q"])
@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({"rotary_scale": 1.25}, NOPE, 1.25**2),
        ({"temperature": Temperature(scale=1.5)}, NOPE, 1.5),
        ({"temperature": Temperature(scale=1.5)}, Spectrum(temperature=Temperature(scale=1.5)), 1),
        ({"rotary_scale": 1.25}, None, 1),
        ({}, NOPE, 1),
    ],
)
def test_matched_gains_make_up_for_factors_that_the_drop_removes(
    tiny_decoder, monkeypatch, sides, before, after, lost
):
    """Gains multiply what normed queries and keys are, so their product multiplies logits."""
    model = tiny_decoder(model={"qk_norm": QKNormConfig("after_drop", targets=sides)})
    ids = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))
    model.layout = model.layout.map(lambda s: replace(s, **before))
    layout = model.layout if after is None else model.layout.map(lambda _: after)
    sizes = input_sizes(model, [ids])
    callback = made()
    monkeypatch.setattr(callback, "_micro_batches", lambda *_: [(ids, ids)])
    module = SimpleNamespace(model=model)
    monkeypatch.setattr(transitions, "evaluating", lambda _: nullcontext(model))
    callback._match_gains(module, phase(), layout)
    for block in model.layers:
        norms = [n for n in (block.self_attn.q_norm, block.self_attn.k_norm) if n is not None]
        gains = [(norm.weight / sizes[norm]).mean().item() for norm in norms]
        assert math.prod(gains) == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize("sides", ["both", "q"])
def test_sizes_of_norm_inputs_are_the_rms_of_projections(tiny_decoder, sides):
    """Over several batches; no hook stays behind."""
    model = tiny_decoder(model={"qk_norm": QKNormConfig("after_drop", targets=sides)})
    ids = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))
    outputs = {}
    hooks = [
        projection.register_forward_hook(lambda _, __, out, norm=norm: outputs.update({norm: out}))
        for attention in (block.self_attn for block in model.layers)
        for projection, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        )
        if norm is not None
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    expected = {norm: out.double().square().mean().sqrt().item() for norm, out in outputs.items()}
    assert len(expected) == (4 if sides == "both" else 2)
    assert input_sizes(model, ids.split(1)) == pytest.approx(expected)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.fixture
def crossing(monkeypatch, tiny_decoder):
    """Go through a run of two steps before a second phase and four in it, of two micro-batches:
    the callback, what others were told, and the layouts in each step."""

    def go(second, *, begin=0, resume=None):
        first = phase(end=2)
        second = replace(second, name="second", start=2, end=6)
        losses = iter([[4.0, 6.0], [7.0, 9.0], [1.0, 2.0]])
        calls: list = []
        callback = made(
            first,
            second,
            before_drop=lambda trainer: calls.append("saved"),
            add_metrics=calls.append,
        )
        monkeypatch.setattr(callback, "losses", lambda module, phase: next(losses))
        if resume:
            callback.restore(resume)
        model = tiny_decoder(training_length=64)
        optimizer = SimpleNamespace(state={"a": 1})
        trainer = SimpleNamespace(
            global_step=begin,
            accumulate_grad_batches=2,
            optimizers=[optimizer],
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )
        module = SimpleNamespace(
            model=model, trainer=trainer, choose_attention=lambda *_: Choice("sdpa", "as before")
        )
        layouts = []
        for index in range(2 * (6 - begin)):
            callback.on_train_batch_start(trainer, module, None, index)
            layouts.append(model.layout)
            trainer.global_step += index % 2
            callback.on_train_batch_end(trainer, module, None, None, index)
        return callback, calls, layouts[::2], optimizer.state

    return go


def test_a_drop_is_saved_before_measured_around_and_at_its_end(crossing):
    callback, calls, layouts, state = crossing(phase(drop=ChangeConfig(), optimizer_state="reset"))
    assert calls == [
        "saved",
        {"drop/loss_before": 5.0, "drop/loss_after": 8.0},
        {"drop/loss_end": 1.5},
    ]
    assert callback.effects == {
        "second": Effect(
            step=2,
            what="dropped the encoding (nope)",
            loss_before=5.0,
            loss_after=8.0,
            loss_end=1.5,
            sequences={"before": [4.0, 6.0], "after": [7.0, 9.0], "end": [1.0, 2.0]},
        )
    }
    assert [layout.rotates for layout in layouts] == [True, True, False, False, False, False]
    assert state == {}
    assert callback.has_dropped
    assert [callback.changed_at(step) for step in (1, 2, 3)] == [False, True, False]


def test_a_longer_phase_is_measured_too_and_nothing_is_saved(crossing):
    callback, calls, layouts, state = crossing(phase(length=128))
    assert calls == [
        {"phase_second/loss_before": 5.0, "phase_second/loss_after": 8.0},
        {"phase_second/loss_end": 1.5},
    ]
    assert [layout.training_length for layout in layouts] == [64, 64, 128, 128, 128, 128]
    assert state == {"a": 1}
    assert not callback.has_dropped


@pytest.mark.parametrize("length", [64, 32])
def test_a_phase_that_changes_nothing_is_not_measured(crossing, length):
    callback, calls, layouts, _ = crossing(phase(length=length))
    assert (callback.effects, calls) == ({}, [])
    assert {layout.training_length for layout in layouts} == {64}


def test_cudnns_attention_sees_plain_training_alone(run, monkeypatch):
    """A drop to ALiBi brings a mask, and what is measured between two steps has other shapes."""

    def choose(name, device, needs):
        return Choice("sdpa", "for the test", needs.are_plain and needs.length is not None)

    calls, kernel = [], F.scaled_dot_product_attention

    def recorded(q, k, v, attn_mask=None, **options):
        plain = attn_mask is None and torch.is_grad_enabled()
        calls.append((torch.backends.cuda.cudnn_sdp_enabled(), plain))
        return kernel(q, k, v, attn_mask, **options)

    monkeypatch.setattr("trainer.model.decoder.choose_backend", choose)
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    run(drop={"at": 6, "to": "alibi"}, monitor={"lengths_every": 4, "lengths": [1, 2]})
    assert set(calls) == {(True, True), (False, False)}
    assert not torch.backends.cuda.cudnn_sdp_enabled()
