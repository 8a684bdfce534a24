"""A step that is only pretended needs what a real one allocates."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.model import linear
from trainer.model.config import ModelConfig, SoftmaxConfig
from trainer.runs.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.ranks import Ranks
from trainer.training.rehearsal import (
    fake_tensors,
    memory_peaks,
    simulated_rank,
    step_memory,
    train_step,
)

SHAPE = 4, 128
RECOMPUTED = {"fp32": "none", "bf16": "full"}
PLAIN, ALL = SoftmaxConfig(), SoftmaxConfig(True, True, 50.0, 30.0)


def configured(precision, softmax=PLAIN):
    return RunConfig(
        model=ModelConfig(128, 352, 3, 4, 2, None, 1024, softmax=softmax),
        strategy=StrategyConfig(name="fsdp2", activation_checkpointing=RECOMPUTED[precision]),
        trainer=TrainerConfig(
            batch_size=2 * SHAPE[0], micro_batch_size=SHAPE[0], precision=precision,
            accelerator="cpu",
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "softmax"), [("fp32", PLAIN), ("bf16", PLAIN), ("fp32", ALL)]
)
def test_memory_of_a_rank(monkeypatch, precision, softmax):
    # As on a GPU: oneDNN copies what it multiplies.
    monkeypatch.setattr(linear, "MKL_IS_SLOW", False)
    config = configured(precision, softmax)
    with simulated_rank(config, Ranks(0, 2, 0, 2)) as module, fake_tensors(device="cpu"):
        module.configure_model()
        peaks = memory_peaks(module, module.configure_optimizers(), SHAPE)
    with simulated_rank(config, Ranks(0, 2, 0, 2)) as module:
        real = allocated(module, SHAPE)
    expected = max(sum(parts.values()) for parts in peaks.values())
    assert expected == pytest.approx(real, rel=0.02), peaks


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_loss_of_a_large_vocabulary_holds_half_a_gib(softcap):
    """Logits of a chunk in bfloat16, over which their gradient is written."""
    shape = 16, 2048
    config = replace(
        configured("fp32"),
        model=ModelConfig(
            128, 352, 1, 4, 2, None, 49_152, softmax=SoftmaxConfig(final_softcap=softcap)
        ),
        trainer=TrainerConfig(batch_size=16, precision="bf16", accelerator="cpu"),
        strategy=StrategyConfig(name="single"),
    )
    with simulated_rank(config, Ranks(0, 1, 0, 1)) as module, fake_tensors():
        module.configure_model()
        peaks = memory_peaks(module, module.configure_optimizers(), shape)
    logits = 4 * math.prod(shape) * 49_152
    assert logits == 6 << 30
    assert 1 << 28 < peaks["loss"]["loss"] < 1 << 29


def allocated(module, shape):
    """Bytes of real tensors at the peak of a second update. Only the other ranks are pretended: the
    threads by which real ones talk let go of memory where the profiler does not see it."""
    torch.set_num_threads(1)  # with more, products in 16 bits may have buffers of their own
    gc.collect()  # or what other tests have left would be let go of meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        module.configure_model()
        optimizer = module.configure_optimizers()
        train_step(module, optimizer, shape)
        with record_function("second update"):
            train_step(module, optimizer, shape)
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now, peak, second = 0, 0, False
    for event in events:
        second = second or event.name() == "second update"
        if event.name() == "[memory]":
            now += event.nbytes()
        peak = max(peak, now) if second else 0
    return peak


def described(words):
    """A small deep run of ``fsdp2 x4 full, 2 of 8 tied kv1``: its configuration and its rank."""
    strategy, ranks, recomputed, rows, _, batch, *options = words.replace(",", "").split()
    count = int(ranks[1:])
    model = ModelConfig(
        64, 176, 6, 4, 2 if "kv2" in options else 1 if "kv1" in options else 4, None, 4096,
        tie_word_embeddings="tied" in options,
    )  # fmt: skip
    config = RunConfig(
        model=model,
        strategy=StrategyConfig(
            name=strategy,
            activation_checkpointing=recomputed,
            reduce_gradients="step" if "once" in options else "micro_batch",
        ),
        trainer=TrainerConfig(
            batch_size=int(batch) * count, micro_batch_size=int(rows), precision="bf16"
        ),
    )
    return config, Ranks(0, count, 0, count)


@pytest.mark.parametrize(
    "words",
    [
        "single x1 full, 2 of 8 kv2",
        "single x1 none, 4 of 4 tied",
        "ddp x2 selective, 2 of 4 tied kv1",
        "fsdp2 x4 none, 2 of 2",
        "fsdp2 x4 full, 2 of 4 once kv2",
        "fsdp2 x2 selective, 8 of 16 tied",
    ],
)
def test_layers_that_were_left_out_follow_from_the_others(words):
    """``plan`` says within 5% what ``exact=true`` does, which goes through all layers."""
    config, ranks = described(words)
    whole, estimated = (step_memory(config, ranks, exact=exact) for exact in (True, False))
    assert sum(estimated.values()) == pytest.approx(sum(whole.values()), rel=0.05)


def test_gathered_blocks_do_not_grow_with_depth():
    config, ranks = described("fsdp2 x4 full, 2 of 2")
    config = replace(config, model=replace(config.model, num_hidden_layers=16))
    whole, estimated = (step_memory(config, ranks, exact=exact) for exact in (True, False))
    assert estimated["gathered"] == pytest.approx(whole["gathered"], rel=0.05)


def test_one_micro_batch_that_finds_gradients_needs_what_the_second_does():
    config, ranks = described("fsdp2 x4 full, 2 of 4")
    config = replace(config, model=replace(config.model, num_hidden_layers=2))
    with simulated_rank(config, ranks) as module, fake_tensors():
        module.configure_model()
        two = memory_peaks(module, module.configure_optimizers(), (2, config.data.sequence_length))
    assert module.trainer.accumulate_grad_batches == 2
    expected = max(sum(parts.values()) for parts in two.values())
    assert sum(step_memory(config, ranks).values()) == pytest.approx(expected, rel=1e-4)


def test_one_micro_batch_finds_no_gradients_where_there_is_no_other():
    """Whole ones of several micro-batches are kept until the last; of one they never are."""
    of_one, of_two = (
        step_memory(*described(f"fsdp2 x4 full, 2 of {batch} once")) for batch in (2, 4)
    )
    assert sum(of_one.values()) < 0.95 * sum(of_two.values())


def test_an_update_never_holds_the_whole_model():
    """Fake tensors that DTensor makes to infer shapes do not count."""
    config, ranks = described("fsdp2 x16 full, 2 of 2")
    with simulated_rank(config, ranks) as module, fake_tensors():
        module.configure_model()
        whole = 4 * sum(p.numel() for p in module.parameters())
        peaks = memory_peaks(module, module.configure_optimizers(), (2, 32))
    assert sum(peaks["update"].values()) < 0.5 * whole


def test_no_fake_tensor_stays_cached(tiny_decoder):
    """Tables of rotations are kept from one forward pass to the next."""
    model, ids = tiny_decoder(), torch.arange(8)[None]
    real = model(ids)
    with fake_tensors():
        tiny_decoder()(ids)
    torch.testing.assert_close(tiny_decoder()(ids), real, rtol=0, atol=0)
