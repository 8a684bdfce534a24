"""Strategies change where the decoder computes, not its results."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops import utilities
from lightning.pytorch.strategies import ModelParallelStrategy
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.comparing import assert_same_tensors, checkpoint_of, rows_of
from tests.lightning.updates import decoder, fit, micro_batch, micro_batches
from tests.small_runs import SMALLEST
from trainer.common.ranks import process_group
from trainer.data.corpus import prepare_corpus
from trainer.lightning import LanguageModule
from trainer.lightning.strategy import parallelize, shard_like
from trainer.model.decoder import initial_value
from trainer.runs.parsing import merged, parse
from trainer.training import strategies
from trainer.training.fit import train
from trainer.training.setup import make_decoder

pytestmark = pytest.mark.slow


@pytest.fixture
def alone(monkeypatch):
    """A process group of one, left again."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    with process_group("fsdp2"):
        yield


def initial(model, seed=0):
    """Fill a decoder, sharded or not, with its initial weights."""

    def value(name, parameter):
        return shard_like(initial_value(model.config, name, parameter.shape, seed), parameter)

    model.fill(value)


def tiny(**more):
    shape = {**SMALLEST, "vocab_size": 50, "tie_word_embeddings": False}
    return parse({"model": shape, **more})


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_activations_give_the_same_run(run, kind):
    plain, _ = run("plain", trainer={"log_every": 1})
    saved, _ = run("saved", trainer={"log_every": 1}, strategy={"activation_checkpointing": kind})
    assert rows_of(saved) == rows_of(plain)
    assert_same_tensors(checkpoint_of(saved), checkpoint_of(plain))


def test_weights_are_drawn_on_the_cpu_whatever_the_default_device_is():
    """Lightning configures a model with its GPU as the default device."""
    config = tiny(seed=3)
    model, expected = (make_decoder(config, 50).to_empty(device="cpu") for _ in range(2))
    with torch.device("meta"):
        initial(model, 3)
    initial(expected, 3)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_sharded_model_starts_with_the_weights_of_a_single_device(alone):
    config = tiny(strategy={"name": "fsdp2"}, seed=3)
    model, plain = make_decoder(config, 50), make_decoder(config, 50)
    parallelize(model, torch.device("cpu"), "fsdp2")
    initial(model, 3)
    plain.to_empty(device="cpu")
    initial(plain, 3)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    assert all(isinstance(block, FSDPModule) for block in (model, *model.layers))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_process_trains_sharded_as_on_a_single_device(run, alone, precision):
    """So that a recipe whose strategy is fsdp2 runs as it is on one GPU, or on a CPU."""
    trainer, by_name = {"precision": precision, "micro_batch_size": 2, "log_every": 1}, {}
    for name in ("single", "fsdp2"):
        config, _ = run(name, strategy={"name": name}, trainer=trainer)
        by_name[name] = rows_of(config)
    assert len(by_name["single"]) == 12
    for row, expected in zip(by_name["fsdp2"], by_name["single"], strict=True):
        assert row["loss"] == pytest.approx(
            expected["loss"], rel=1e-5 if precision == "fp32" else 1e-2
        )


@pytest.mark.usefixtures("alone")
def test_a_sharded_module_is_validated_trained_and_trained_again(monkeypatch):
    """Lightning validates in inference mode, unless the process group is of gloo."""
    monkeypatch.setattr(utilities, "_distributed_is_initialized", lambda: False)
    module = LanguageModule(decoder(), 1e-2)
    loader = DataLoader([micro_batch(seed, 2, 8) for seed in range(3)], batch_size=None)

    def trainer():
        return L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    losses = []
    for _ in range(3):
        losses.append(trainer().validate(module, loader, verbose=False)[0]["val_loss"])
        trainer().fit(module, loader)
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.usefixtures("alone")
def test_a_module_that_was_trained_whole_trains_sharded_too():
    """With an optimizer of its new parameters."""
    module = LanguageModule(decoder(), 1e-2)
    fit(module, micro_batches())
    before = [parameter.detach().clone() for parameter in module.parameters()]
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1}
    fit(module, micro_batches(), strategy=ModelParallelStrategy(**sizes))
    for old, new in zip(before, module.parameters(), strict=True):
        assert not torch.equal(new.full_tensor(), old)


def test_bf16_is_the_same_computation_under_every_strategy(alone):
    """Weights, gradients and losses are float32; activations and products, the residual stream
    among them, bfloat16."""
    ids, results = torch.randint(50, (2, 16)), {}
    for name in ("single", "fsdp2"):
        model = make_decoder(tiny(), 50)
        parallelize(model, torch.device("cpu"), name, half=True)
        initial(model)
        seen = set()
        for block in model.layers:
            block.register_forward_hook(lambda _, __, out, seen=seen: seen.add(out.dtype))
        loss = model.loss(ids, ids)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        assert seen == {torch.bfloat16}
        assert {x.dtype for x in (loss, *model.parameters(), *gradients)} == {torch.float32}
        results[name] = (
            loss.item(),
            [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients],
        )
    (loss, expected), (other, gradients) = results.values()
    assert other == loss
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-2, atol=1e-4)


def test_compiled_blocks_stay_whole_under_ddp(base, tmp_path, alone, monkeypatch):
    """torch would cut each where DDP's buckets end, here after every parameter or two."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(strategies, "DDP", partial(strategies.DDP, bucket_cap_mb=0.01))
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 5_000)
    changes = {"run_dir": str(tmp_path / "run"), "strategy": {"name": "ddp"}}
    steps = {"max_steps": 8, "compile": True}
    run = parse(
        merged(
            base,
            {
                **changes,
                "trainer": steps,
                "model": {"qk_norm": {"when": "never"}},
                "drop": {"at": None},
            },
        ),
    )
    (tmp_path / "run").mkdir()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=True):  # restores what training sets
        train(run, prepare_corpus(run.config.data, run.config.tokenizer))
    assert counter.frame_count == 1
