"""Blocks multiply in float8 and are otherwise what they were; torch does so on a CPU, too."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lightning.test_distributed import launch, variant
from tests.lightning.test_run import assert_same_state, checkpoint_of, contents_of, rows_of
from tests.lightning.test_strategy import alone  # noqa: F401 - a fixture
from tests.small_runs import decoder_of
from trainer.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.lightning.setup import make_decoder
from trainer.lightning.strategy import fill, parallelize
from trainer.model.attention import Linear
from trainer.model.config import ModelConfig
from trainer.model.decoder import initial_value

pytestmark = pytest.mark.slow

IDS = torch.arange(64).view(2, 32) * 7 % 50
FP8 = {"precision": "bf16", "fp8": True}


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao.float8")


def spread(ranks=None, strategy=None, **trainer):
    """A tiny decoder, distributed as a run would."""
    model = ModelConfig(32, 48, 2, 2, 1, None, 50, False, qkv_bias=True, initializer="fan_in")
    config = RunConfig(
        model=model,
        strategy=StrategyConfig(**strategy or {}),
        trainer=TrainerConfig(**{"precision": "bf16", **trainer}),
    )
    made = make_decoder(config, 50)
    run, name = config.trainer, config.strategy.name
    parallelize(
        made,
        torch.device("cpu"),
        name,
        half=True,
        activation_checkpointing=config.strategy.activation_checkpointing,
        compile=run.compile,
        float8=run.fp8,
    )
    fill(made, lambda name, shape: initial_value(made.config, name, shape, 0))
    return made


def gradients(model):
    model.loss(IDS, IDS).backward()
    grads = [p.grad for p in model.parameters()]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]


def distance(grads, expected):
    """Relative distance of two lists of tensors."""
    first, second = (torch.cat([x.flatten() for x in tensors]) for tensors in (grads, expected))
    return ((first - second).norm() / second.norm()).item()


def test_blocks_multiply_in_float8_and_the_rest_does_not(torchao):
    """Parameters keep their names, values and dtypes; gradients those of bfloat16 to rounding."""
    plain, model = spread(), spread(fp8=True)
    swapped = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert swapped == {n for n, m in plain.named_modules() if type(m) is Linear} - {"lm_head"}
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    grads = gradients(model)
    assert {x.dtype for x in grads} == {torch.float32}
    assert 0.02 < distance(grads, gradients(plain)) < 0.2


def test_float8_is_the_same_computation_under_every_strategy(torchao, alone):  # noqa: F811
    """To rounding: shards are gathered in bfloat16, of which float8 is rounded a second time."""
    expected = gradients(spread(alone, fp8=True))
    for strategy in ({"name": "fsdp2"}, {"name": "hsdp", "shard_size": 1}):
        assert distance(gradients(spread(alone, strategy, fp8=True)), expected) < 0.2


def test_losses_of_a_sequence_depend_on_no_other_of_its_batch(torchao):
    """One scale for a tensor would round coarsely if other rows have larger values."""
    model = spread(fp8=True)
    with torch.no_grad():
        model.embed_tokens.weight[49] *= 1000
    other = IDS.clone()
    other[1] = 49
    assert torch.equal(model.token_losses(IDS, IDS)[0], model.token_losses(other, IDS)[0])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay_so(torchao, bad):
    """An update with them is skipped. float8 has no infinity and rounds large values down."""
    model = spread(fp8=True)
    model.layers[0].mlp.up_proj.weight.data[0, 0] = bad
    assert not model.loss(IDS, IDS).isfinite()
    model = spread(fp8=True)
    (bad * model.loss(IDS, IDS)).backward()
    assert not any(p.grad.isfinite().all() for p in model.parameters())


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten.mm.default
        return operator(*args, **(kwargs or {}))


def test_selective_recomputation_keeps_float8_products(torchao):
    counts = {}
    for kind in ("none", "selective", "full"):
        model = spread(strategy={"activation_checkpointing": kind}, fp8=True)
        with Products() as products:
            gradients(model)
        counts[kind] = products.count
    assert counts["selective"] == counts["none"] < counts["full"]


def test_blocks_that_multiply_in_float8_are_compiled_without_a_break(torchao, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    whole = partial(torch.compile, backend=counter, fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    strategy = {"activation_checkpointing": "selective"}
    compiled = gradients(spread(strategy=strategy, fp8=True, compile=True))
    assert counter.frame_count == 1
    assert distance(compiled, gradients(spread(fp8=True))) < 0.1


def test_runs_in_float8_drop_resume_and_are_read_without_torchao(
    torchao, base, run, tmp_path, monkeypatch
):
    """QK-norm is turned on at the drop. Two processes train as one does, to rounding; a resume is
    bitwise the uninterrupted run."""
    trainer = {"checkpoint_every": 4, "log_every": 1}
    single, trained = run("single", trainer=FP8 | trainer)
    plain, _ = run("plain", trainer={"precision": "bf16"} | trainer)
    hybrid = {"shard_size": 1, "activation_checkpointing": "selective"}
    variants = {
        "ddp": variant("ddp", trainer=FP8),
        "fsdp2": variant("fsdp2", trainer=FP8 | {"micro_batch_size": 1}),
        "hsdp": variant("hsdp", trainer=FP8, strategy=hybrid),
    }
    jobs = {name: (changes, None, None) for name, changes in variants.items()}
    begin = tmp_path / "fsdp2" / "checkpoints" / "step-000008"
    jobs["resumed"] = (variants["fsdp2"], begin, None)
    runs = launch(base, tmp_path, 2, jobs)
    losses = [row["loss"] for row in rows_of(single)]
    assert losses != [row["loss"] for row in rows_of(plain)]
    for config in (plain, *runs.values()):
        assert [row["loss"] for row in rows_of(config)] == pytest.approx(losses, rel=2e-2)
    assert_same_state(checkpoint_of(runs["resumed"]), checkpoint_of(runs["fsdp2"]))
    assert rows_of(runs["resumed"]) == rows_of(runs["fsdp2"])
    assert contents_of(checkpoint_of(single)).keys() == contents_of(checkpoint_of(plain)).keys()
    monkeypatch.setitem(sys.modules, "torchao", None)
    decoder = decoder_of(trained)
    assert {type(m) for n, m in decoder.named_modules() if n.endswith("_proj")} == {Linear}
