"""Strategies change where the decoder computes, not its results."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

from tests.training.test_run import assert_same_tensors, checkpoint_of, rows_of
from trainer.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.data.corpus import prepare_corpus
from trainer.model.config import ModelConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.ranks import Ranks, init_distributed, shutdown_distributed
from trainer.training import lightning_trainer, strategy
from trainer.training.lightning_trainer import make_trainer
from trainer.training.module import make_decoder
from trainer.training.run import train
from trainer.training.strategy import (
    checkpoint_activations,
    device_mesh,
    draw_weights,
    parallelize,
)


@pytest.fixture
def alone(monkeypatch):
    """A process group of one, left again."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    yield init_distributed(RunConfig(strategy=StrategyConfig(name="fsdp2")))
    shutdown_distributed()


def tiny(**more):
    model = ModelConfig(32, 48, 2, 2, 1, None, 50, tie_word_embeddings=False)
    return RunConfig(model=model, **more)


def test_lightning_s_part_of_a_strategy():
    """Each rank holds a shard, and none a part of a product."""
    strategies = {
        name: lightning_trainer.lightning_strategy(
            tiny(strategy=StrategyConfig(name=name)), Ranks(1, 4, 1, 4)
        )
        for name in ("single", "ddp", "fsdp2", "hsdp")
    }
    assert type(strategies["single"]) is lightning_trainer.Single
    assert type(strategies["ddp"]) is lightning_trainer.Replicated
    for name in ("fsdp2", "hsdp"):
        sharded = strategies[name]
        assert type(sharded) is lightning_trainer.Sharded
        assert (sharded._data_parallel_size, sharded._tensor_parallel_size) == (4, 1)


@pytest.mark.parametrize(
    ("operator", "is_saved"),
    [
        ("aten.mm.default", True),
        ("aten.addmm.default", True),
        ("unrope.onednn_product.default", True),
        ("aten._scaled_dot_product_flash_attention.default", True),
        ("flash_attn.forward.default", True),
        ("aten.mul.Tensor", False),
        ("aten.silu.default", False),
    ],
)
def test_expensive_results_are_not_computed_again(operator, is_saved):
    policy = strategy._keep_products(None, operator)
    assert policy == (CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_activations_give_the_same_run(run, kind):
    plain, _ = run("plain", trainer={"log_every": 1})
    saved, _ = run("saved", trainer={"log_every": 1}, strategy={"activation_checkpointing": kind})
    assert rows_of(saved) == rows_of(plain)
    assert_same_tensors(checkpoint_of(saved), checkpoint_of(plain))


def activations(tiny_decoder, kind):
    """Bytes that a block's forward pass keeps for backward."""
    model = tiny_decoder()
    for block in model.layers:
        checkpoint_activations(block, kind)
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(torch.randint(50, (4, 32)), torch.randint(50, (4, 32)))
    return sum(sizes.values())


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_a_block_that_recomputes_is_compiled_without_a_break(tiny_decoder, kind):
    """Forward and backward, and to the same gradients; as many graphs as without recomputing."""
    torch._dynamo.reset()
    plain, compiled = tiny_decoder(), tiny_decoder()
    compiled.load_state_dict(plain.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    for block in compiled.layers:
        checkpoint_activations(block, kind)
        block.compile(backend=counter, fullgraph=True)
    ids = torch.randint(50, (4, 32))
    for model in (plain, compiled):
        model.loss(ids, ids).mean().backward()
    assert counter.frame_count == 1
    for expected, parameter in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_full_recomputation_keeps_less_than_selective_than_none(tiny_decoder):
    sizes = [activations(tiny_decoder, kind) for kind in ("full", "selective", "none")]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]


def test_a_sharded_model_starts_with_the_weights_of_a_single_device(alone):
    config = tiny(strategy=StrategyConfig(name="fsdp2"), seed=3)
    model, plain = make_decoder(config, 50), make_decoder(config, 50)
    parallelize(model, config, alone, torch.device("cpu"))
    plain.to_empty(device="cpu")
    draw_weights(plain, 3)
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


def test_bf16_is_the_same_computation_under_every_strategy(alone):
    """Weights, gradients and losses are float32; activations and products, the residual stream
    among them, bfloat16."""
    ids, results = torch.randint(50, (2, 16)), {}
    for name in ("single", "fsdp2"):
        config = tiny(strategy=StrategyConfig(name=name), trainer=TrainerConfig(precision="bf16"))
        model = make_decoder(config, 50)
        parallelize(model, config, alone, torch.device("cpu"))
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


@pytest.mark.parametrize(
    ("kind", "gigabytes", "once"),
    [("auto", 80, True), ("auto", 0, False), ("step", 0, True), ("micro_batch", 80, False)],
)
def test_unsharded_gradients_stay_until_the_step_ends_if_they_fit(
    tiny_decoder, kind, gigabytes, once
):
    model = tiny_decoder()
    assert strategy.reduces_once_a_step(model, kind, gigabytes * 10**9) == once
    assert strategy.reduces_once_a_step(model, "auto", None)


def test_ranks_with_gpus_of_several_sizes_decide_by_the_smallest(monkeypatch):
    """If one reduced every micro-batch and another every step, both would hang."""
    properties = SimpleNamespace(total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(strategy, "all_gather", lambda mine: [mine, 44])
    assert strategy.least_memory(torch.device("cuda", 1)) == 44
    assert strategy.least_memory(torch.device("cpu")) is None


def test_gradients_of_a_step_are_reduced_once(alone, monkeypatch):
    """Three micro-batches, one reduction a sharded module."""
    config = tiny(strategy=StrategyConfig(name="fsdp2"))
    model = make_decoder(config, 50)
    parallelize(model, config, alone, torch.device("cpu"))
    count, original = [], dist.reduce_scatter_tensor

    def counted(*args, **kwargs):
        count.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(dist, "reduce_scatter_tensor", counted)
    ids = torch.randint(50, (2, 16))
    for index in range(3):
        strategy.synchronize_gradients(model, index == 2, index == 2)
        model.loss(ids, ids).backward()
    reductions = len(count)
    strategy.synchronize_gradients(model, True, True)
    model.loss(ids, ids).backward()
    assert reductions == len(count) - reductions  # as many as one micro-batch alone needs
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("offload", "policy", "home"), [(True, CPUOffloadPolicy, "cpu"), (False, OffloadPolicy, "meta")]
)
def test_offloaded_parameters_live_on_the_cpu(alone, monkeypatch, offload, policy, home):
    """The meta device is in the place of a GPU."""
    mesh = device_mesh(StrategyConfig(name="fsdp2"), alone, torch.device("cpu"))
    monkeypatch.setattr(strategy, "device_mesh", lambda *_: mesh)
    policies, original = [], strategy.fully_shard

    def recorded(module, **options):
        policies.append(type(options["offload_policy"]))
        return original(module, **options)

    monkeypatch.setattr(strategy, "fully_shard", recorded)
    config = tiny(strategy=StrategyConfig(name="fsdp2", cpu_offload=offload))
    model = make_decoder(config, 50)
    parallelize(model, config, alone, torch.device("meta"), draw=False)
    assert policies == [policy] * 3  # two blocks and the model
    assert {p.device.type for p in model.parameters()} == {home}


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2"])
def test_memory_of_training_is_freed_and_not_copied(alone, base, tmp_path, monkeypatch, name):
    """Lightning copies weights and the optimizer's state to the host; with every stretch and
    control that ends, on all ranks of a node at once. The last hooks still see them."""
    ended, seen = [], []
    teardown = lightning_trainer.Uncopied.teardown
    monkeypatch.setattr(
        lightning_trainer.Uncopied,
        "teardown",
        lambda self: ended.append((self.lightning_module, self.optimizers[0])) or teardown(self),
    )

    class Last(L.Callback):
        def on_fit_end(self, trainer, module):
            seen.append(any(p.is_meta for p in module.parameters()))

        def teardown(self, trainer, module, stage):
            seen.append(any(p.is_meta for p in module.parameters()))

    monkeypatch.setattr(lightning_trainer.Strategy, "teardown", lambda self: pytest.fail("copies"))
    changes = {"strategy": {"name": name}, "trainer": {"max_steps": 8}}
    config = parse(RunConfig, merged({**base, "run_dir": str(tmp_path / "run")}, changes))
    (tmp_path / "run").mkdir()
    train(config, prepare_corpus(config.data, config.tokenizer), callbacks=[Last()])
    assert seen == [False, False]
    ((module, optimizer),) = ended
    assert all(p.is_meta for p in module.parameters())
    assert not optimizer.state


def test_stretches_and_controls_share_their_groups(alone):
    """Every group has threads and, of GPUs, communicators with memory of their own."""
    hybrid, device = StrategyConfig(name="hsdp", shard_size=1), torch.device("cpu")
    first = device_mesh(hybrid, alone, device)
    assert device_mesh(hybrid, alone, device) is first
    assert first.mesh_dim_names == ("replicate", "shard")


def test_lightning_makes_no_groups_of_ranks_for_a_sharded_run(monkeypatch):
    """Lightning's mesh would create groups at every stretch that nothing destroys."""
    environment = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = tiny(strategy=StrategyConfig(name="fsdp2"), trainer=TrainerConfig(accelerator="cpu"))
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        trainer = make_trainer(config, Ranks(0, 4, 0, 4), [], [])
        trainer.strategy._lightning_module = L.LightningModule()
        before = len(dist.distributed_c10d._world.pg_map)
        trainer.strategy.setup_environment()
        assert (trainer.world_size, trainer.global_rank) == (4, 0)
        assert len(dist.distributed_c10d._world.pg_map) == before
    finally:
        dist.destroy_process_group()


def test_compiled_blocks_stay_whole_under_ddp(base, tmp_path, alone, monkeypatch):
    """torch would cut each where DDP's buckets end, here after every parameter or two."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    buckets = partial(lightning_trainer.Replicated, bucket_cap_mb=0.01)
    monkeypatch.setattr(lightning_trainer, "Replicated", buckets)
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 5_000)
    changes = {"run_dir": str(tmp_path / "run"), "strategy": {"name": "ddp"}}
    steps = {"max_steps": 8, "compile": True}
    config = parse(
        RunConfig,
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
    train(config, prepare_corpus(config.data, config.tokenizer))
    assert counter.frame_count == 1


def test_a_run_is_compiled_for_its_own_shapes_whatever_ran_before(run, monkeypatch):
    """Encodings with another number of pairs, as controls have, would else count as dynamic."""
    symbolic = []

    def backend(graph, inputs):
        sizes = [size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape]
        symbolic.append(any(isinstance(size, torch.SymInt) for size in (*inputs, *sizes)))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for fraction in (0.5, 0.25):
        encodings = {"rope": {"rotary_fraction": fraction}}
        run(f"at {fraction}", positional={"encodings": encodings}, trainer={"compile": True})
    assert symbolic
    assert not any(symbolic)
