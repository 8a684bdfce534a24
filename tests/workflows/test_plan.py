"""``plan`` says before a run what it will need."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from tests.program import ROOT
from trainer.__main__ import main
from trainer.commands import compose_words, run_of
from trainer.model.decoder import Decoder
from trainer.model.flops import forward_flops
from trainer.runs.parsing import parse
from trainer.workflows.plan import (
    activation_bytes,
    flops,
    longest,
    parameters,
    plan,
    shape_of,
)

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
COSTS = yaml.safe_load((ROOT / "docs" / "reproduce.yaml").read_text())["costs"]
"""GPU-hours on A100 and H100 that the documentation states, by experiment and its length."""
NANO = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1024}  # fmt: skip
PUBLISHED = {
    "drope_494m": (494_005_120, 357_870_464),
    "rope_id_1b": (962_807_040, 634_471_680),
    "smollm_360m": (361_821_120, 314_635_200),
    "smollm_1_7b": (1_711_376_384, 1_610_713_088),
    "llama2_7b": (6_738_415_616, 6_476_271_616),
    "llama3_8b": (8_030_261_248, 6_979_588_096),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_have_their_parameters(model):
    run = run_of(compose_words([f"model={model}", "data.sequence_length=2048"]))
    counted = parameters(shape_of(run))
    assert (counted["in all"], counted["without embeddings and head"]) == PUBLISHED[model]


def test_operations_of_a_branch_count_from_where_it_branches():
    controls = {"rope": {"branch": "drop", "drop": {"at": None}}}
    values = {"name": "x", "run_dir": "x", "model": NANO, "controls": controls}
    values |= {"data": {"sequence_length": 64}, "drop": {"at": 0.75}}
    values |= {"trainer": {"max_steps": 100, "batch_size": 8}}
    run = parse(values)
    a_step = 3 * 8 * forward_flops(run.config.model, run.layout, 64)
    assert flops(run) == 100 * a_step
    assert flops(run.controls["rope"], begin=run.phases.drop_step) == 25 * a_step
    rows = plan(run, 1, 0.5)["Training"]
    assert float(rows["operations of rope"]) == pytest.approx(25 * a_step, rel=1e-2)


def test_operations_of_phases_are_those_of_their_lengths_and_batches():
    phases = {"short": {"steps": 10}, "long": {"steps": 3, "sequence_length": 256, "batch_size": 4}}
    values = {"model": NANO, "data": {"sequence_length": 64}, "phases": phases}
    run = parse(values)
    short, long = (3 * forward_flops(run.config.model, run.layout, n) for n in (64, 256))
    assert flops(run) == 10 * 32 * short + 3 * 4 * long
    assert flops(run, begin=11) == 2 * 4 * long


def test_operations_follow_the_windows_of_a_drop():
    values = {"model": NANO, "data": {"sequence_length": 64}, "trainer": {"max_steps": 10}}
    run = parse(values | {"drop": {"at": 4, "windows": [8]}})
    model = run.config.model
    windowed = replace(run.layout, layers=[replace(x, window=8) for x in run.layout.layers])
    per_step = [32 * 3 * forward_flops(model, layout, 64) for layout in (run.layout, windowed)]
    assert flops(run) == 4 * per_step[0] + 6 * per_step[1]


def test_hours_follow_from_operations_peak_and_mfu():
    """The peak of an H100 is 989.4 TFLOP/s in bf16."""
    trainer = {"precision": "bf16", "max_steps": 10**9, "batch_size": 32}
    run = parse({"model": NANO, "strategy": {"name": "ddp"}, "trainer": trainer})
    hours = flops(run) / (989.4e12 * 0.25) / 3600
    *_, rows = plan(run, 4, 0.25).values()
    assert rows["4 x H100 80GB HBM3"] == f"{hours / 4:,.3g} hours, {hours:,.0f} GPU-hours"


def test_the_vocabulary_has_the_words_of_the_needles():
    """16 names and 90 numbers join the tokens that are trained."""
    values = {"model": NANO | {"vocab_size": None}, "tokenizer": {"vocab_size": 1000}}
    counted = plan(parse(values), 1, 0.4)["Parameters"]
    assert counted["embeddings"] == f"{(1000 + 106) * 64:,}"


def test_the_longest_sequence_fills_four_fifths_of_a_gpu():
    """A token leaves h in every layer, and the activations of one layer (docs/running.md)."""
    trainer = {"precision": "bf16", "batch_size": 8}
    strategy = {"name": "fsdp2", "activation_checkpointing": "full"}
    run = parse({"model": NANO, "strategy": strategy, "trainer": trainer})
    rows = plan(run, 8, 0.4)["Longest sequence that fits, about"]
    a_token = 2 * (3 * 64 + 5 * 64 + 4 * 64 + 3 * 64 + 4 * 160)
    state = 16 * sum(p.numel() for p in Decoder(run.config.model, run.layout).parameters()) / 8
    tokens = (0.8 * 139 * 2**30 - state) / a_token
    assert int(rows["H200"].split()[0].replace(",", "")) == pytest.approx(tokens, abs=1024)
    assert set(longest(139 * 2**30, a_token).values()) == {"none"}


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False, "qkv_bias": True, "head_dim": 16},
        {"num_key_value_heads": 1, "qk_norm": {"when": "after_drop"}},
        {"qk_norm": {"when": "always", "kind": "full", "targets": "k"}},
    ],
)
def test_parameters_are_those_of_the_decoder(changes):
    run = parse({"model": NANO | changes})
    with torch.device("meta"):
        model = Decoder(run.config.model, run.layout)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counted = parameters(run.config.model)
    assert counted["attention"] == sum(n for name, n in sizes.items() if "self_attn" in name)
    assert counted["MLP"] == sum(n for name, n in sizes.items() if "mlp" in name)
    assert counted["in all"] == sum(sizes.values())


@pytest.mark.parametrize("controls", ["controls=3", "+controls.x=null"])
def test_controls_of_another_type_are_refused_in_a_line(capsys, controls):
    with pytest.raises(SystemExit):
        main(["plan", controls])
    assert "Input should be a valid dictionary" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_heavy_is_imported_for_a_plan(tmp_path):
    code = "import sys; from trainer.__main__ import main; main(['plan']);"
    heavy = {"lightning", "scipy", "torch", "transformers", "datasets"}
    code += f"print(sorted({heavy} & sys.modules.keys()))"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_memory_is_that_of_the_phase_with_the_largest_micro_batch():
    """In tokens; every rank has its share of the sequences."""
    phases = {
        "short": {"steps": 1, "batch_size": 64},
        "long": {"steps": 1, "batch_size": 16, "sequence_length": 1024},
        "cut": {"steps": 1, "batch_size": 32, "sequence_length": 1024, "micro_batch_size": 1},
    }
    values = {"name": "x", "run_dir": "x", "model": NANO, "data": {"sequence_length": 64}}
    run = parse(values | {"phases": phases, "drop": {"at": None}})
    for gpus, rows in ((1, 16), (8, 2)):
        table = plan(run, gpus, 0.5)[f"Memory of each of {gpus} GPUs, about"]
        assert table["micro-batch"].startswith(f"{rows} x 1,024 tokens")


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [({"name": "ddp"}, 1), ({"name": "fsdp2"}, 16), ({"name": "hsdp"}, 8)]
    + [({"name": "hsdp", "shard_size": size}, size) for size in (2, 16)],
)
def test_a_state_is_shared_by_the_ranks_of_a_shard_group(strategy, shards):
    """By default the eight GPUs of a node."""
    values = {"name": "x", "run_dir": "x", "data": {"sequence_length": 64}, "strategy": strategy}
    shape = NANO | {"hidden_size": 4096, "intermediate_size": 14_336}
    values |= {"model": shape, "trainer": {"batch_size": 16}}
    run = parse(values)
    count = parameters(run.config.model)["in all"]
    table = plan(run, 16, 0.5)["Memory of each of 16 GPUs, about"]
    assert table["weights, gradients, optimizer"] == f"{16 * count / shards / 2**30:,.1f} GiB"


def test_sharding_takes_the_state_off_a_gpu():
    def memory(name):
        values = {"model": NANO, "strategy": {"name": name}}
        return plan(parse(values), 8, 0.4)["Memory of each of 8 GPUs, about"]

    state = "weights, gradients, optimizer"
    whole, shard = (float(memory(name)[state].split()[0]) for name in ("ddp", "fsdp2"))
    assert shard <= whole / 8 + 0.1


def test_activations_that_are_computed_again_are_fewer():
    """Of h, q, k and i numbers: a layer's inputs of norms, products and attention, and products."""
    config = parse({"model": NANO | {"num_key_value_heads": 1, "head_dim": 16}}).config.model
    h, q, k, i = 64, 32, 16, 160
    layer = 5 * h + 4 * q + 3 * k + 4 * i
    kept = 3 * h + 2 * q + 2 * k + 2 * i
    assert activation_bytes(config, 4, "none") == 3 * 4 * layer
    assert activation_bytes(config, 2, "selective") == 3 * 2 * kept + 2 * layer
    assert activation_bytes(config, 2, "full") == 3 * 2 * h + 2 * layer


def test_fp32_has_its_own_peak_and_takes_twice_the_memory():
    """The TF32 peak of an A100 is 156 TFLOP/s, in bf16 312."""
    hours, memory = {}, {}
    for precision in ("fp32", "auto"):
        trainer = {"precision": precision, "max_steps": 10**9, "batch_size": 1024}
        tables = plan(parse({"model": NANO, "trainer": trainer}), 1, 0.5)
        times = tables["Time at 50% of the peak"]["1 x A100-SXM4-80GB"]
        hours[precision] = float(times.split()[0].replace(",", ""))
        activations = tables["Memory of each of 1 GPUs, about"]["activations"]
        memory[precision] = float(activations.split()[0].replace(",", ""))
    assert hours["fp32"] == pytest.approx(2 * hours["auto"], rel=0.01)
    assert memory["fp32"] == pytest.approx(2 * memory["auto"], rel=0.1)


def test_phases_and_a_drop_are_told_with_their_own_tokens():
    phases = {"a": {"steps": 10}, "b": {"steps": 3, "sequence_length": 128, "drop": {}}}
    run = parse({"model": NANO, "data": {"sequence_length": 64}, "phases": phases})
    rows = plan(run, 1, 0.5)["Training"]
    assert rows["a"] == "10 steps of 32 x 64: 20,480 tokens"
    assert rows["b"] == "3 steps of 32 x 128: 12,288 tokens, dropped the encoding (nope)"
    assert rows["first drop"] == "after step 10, then 12,288 tokens"
    assert rows["all tokens"] == "32,768"


def test_a_group_of_shards_is_no_larger_than_all_gpus():
    run = parse({"model": NANO | {"hidden_size": 4096}, "strategy": {"name": "hsdp"}})
    tables = plan(run, 4, 0.5)["Memory of each of 4 GPUs, about"]
    count = parameters(run.config.model)["in all"]
    assert tables["weights, gradients, optimizer"] == f"{16 * count / 4 / 2**30:,.1f} GiB"


@pytest.mark.slow
def test_activations_are_about_those_that_autograd_saves():
    values = {"model": NANO | {"hidden_size": 128, "num_hidden_layers": 6, "vocab_size": 64}}
    run = parse(values)
    model = Decoder(run.config.model, run.layout)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, or its place is reused
        return tensor

    ids = torch.randint(64, (2, 256))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(ids, ids)
    measured = sum(size for size, _ in saved.values()) / ids.numel()
    assert loss.requires_grad
    assert activation_bytes(run.config.model, 4, "none") == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "drope_smollm" else pytest.mark.slow)
        for name in sorted({*EXPERIMENTS, *COSTS})
    ],
)
def test_every_experiment_is_planned_without_network(capsys, tmp_path, monkeypatch, name):
    """The hours in docs/reproduce.md are the plan's."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    main(["plan", *f"+experiment={name}".split(), f"data.cache_dir={tmp_path}"])
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Parameters" in out
    if isinstance(told := COSTS.get(name), list):  # of small ones it is minutes on a CPU
        a100, h100, *_ = re.findall(r"([\d,]+) GPU-hours", out)
        assert [a100, h100] == [f"{hours:,}" for hours in told]
