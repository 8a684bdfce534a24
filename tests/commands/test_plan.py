"""``plan`` says before a run what it will need."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.program import ROOT
from trainer.__main__ import main
from trainer.commands.train import read_config
from trainer.model.flops import forward_flops
from trainer.runs.config import RunConfig
from trainer.runs.directory import plain
from trainer.runs.parsing import control_config, parse
from trainer.training.module import make_decoder
from trainer.workflows import plan as plans
from trainer.workflows.costs import flops
from trainer.workflows.plan import parameters

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
COSTS = yaml.safe_load((ROOT / "docs" / "reproduce.yaml").read_text())["costs"]
"""GPU-hours on A100 and H100 that the documentation tells, by experiment and its length."""
NANO = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
PUBLISHED = {
    "drope_494m": (494_005_120, 357_870_464),
    "rope_id_1b": (962_807_040, 634_471_680),
    "smollm_360m": (361_821_120, 314_635_200),
    "smollm_1_7b": (1_711_376_384, 1_610_713_088),
    "llama2_7b": (6_738_415_616, 6_476_271_616),
    "llama3_8b": (8_030_261_248, 6_979_588_096),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_have_their_parameters(model):
    config = read_config([f"model={model}", "data.sequence_length=2048"])
    counted = parameters(make_decoder(config, 0))
    assert (counted["in all"], counted["without embeddings and head"]) == PUBLISHED[model]


def test_operations_of_a_branch_count_from_where_it_branches():
    config = read_config(["+experiment=drope_demo", "model.vocab_size=1024"])
    model = make_decoder(config, 0)
    a_step = 3 * 32 * forward_flops(model.config, model.layout, 64)
    nope, rope = (control_config(plain(config), name) for name in ("nope", "rope"))
    assert flops(config) == flops(nope) == 1280 * a_step
    assert flops(rope, begin=config.drop_step) == 320 * a_step


def test_operations_of_phases_are_those_of_their_lengths_and_batches():
    phases = {"short": {"steps": 10}, "long": {"steps": 3, "sequence_length": 256, "batch_size": 4}}
    values = {"model": {**NANO, "vocab_size": 1024}, "data": {"sequence_length": 64}}
    config = parse(RunConfig, {**values, "phases": phases})
    model = make_decoder(config, 0)
    short, long = (3 * forward_flops(model.config, model.layout, n) for n in (64, 256))
    assert flops(config) == 10 * 32 * short + 3 * 4 * long
    assert flops(config, begin=11) == 2 * 4 * long


@pytest.mark.parametrize("name", sorted({*EXPERIMENTS, *COSTS}))
def test_every_experiment_is_planned_without_network(capsys, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plans, "step_memory", lambda *_: {"parameters": 1})  # seconds each
    out = said(capsys, *f"+experiment={name}".split(), f"data.cache_dir={tmp_path}")
    for title in (
        "Parameters",
        "Training",
        "Memory of each GPU",
        "Time at 40% of the peak",
        "Disk",
    ):
        assert title in out
    if measuring := re.search(r"evaluation ([\d.e+]+) operations, ([\d.e+-]+) times", out):
        operations, share = map(float, measuring.groups())
        assert share <= 0.05 or operations / share < 1e18  # the training
    if isinstance(told := COSTS.get(name), list):  # of small ones it is minutes on a CPU
        a100, h100, *_ = re.findall(r"([\d,]+) GPU-hours", out)
        assert [a100, h100] == [f"{hours:,}" for hours in told]


def said(capsys, *words):
    main(["plan", *words])
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_recipe_is_planned_without_its_weights_and_text(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = said(
        capsys,
        "+experiment=drope_smollm",
        "slurm.nodes=2",
        f"data.cache_dir={tmp_path}",
    )
    assert "in all 361,862,080" in out  # with the norms that come on at the drop
    assert "GPUs 16, strategy fsdp2" in out
    assert "16 x 2,048 tokens, 2 a step" in out
    assert "the weights 'HuggingFaceTB/SmolLM-360M' are not on this machine" in out
    assert "has not been prepared" in out
    assert "does not fit" not in out


def test_the_command_that_prepares_the_text_is_a_line_that_a_shell_accepts(
    capsys, tmp_path, monkeypatch
):
    """A shell would run the first line of a command that a table wraps."""
    monkeypatch.setattr(plans, "step_memory", lambda *_: {"parameters": 1})
    text = tmp_path / "a text of some length"
    text.mkdir()
    (text / "a.txt").write_text("some words " * 900)
    words = ["data=files", f"data.files=['{text}/*.txt']", f"data.cache_dir={tmp_path}/cache"]
    monkeypatch.setattr("sys.argv", ["unrope", "plan", *words])
    main(["plan", *words])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "trainer prepare" in line)
    assert shlex.split(line) == ["python", "-m", "trainer", "prepare", *words]


def test_one_gpu_is_planned_for_where_no_more_are_used(capsys):
    out = said(capsys, "model=nano", "strategy=single", "slurm.gpus_per_node=8")
    assert "GPUs 1, strategy single" in out


def test_what_is_offloaded_is_not_of_the_gpu(capsys):
    words = ["model=llama2_7b", "model.num_hidden_layers=3", "trainer.batch_size=2"]
    words += ["strategy=fsdp2", "slurm.gpus_per_node=2", "tokenizer.vocab_size=32000"]
    on_gpu, offloaded = (
        {
            name: float(re.search(rf"{name} ([\d.]+) GiB", out)[1])
            for name in ("parameters", "optimizer", "in all")
        }
        for out in (said(capsys, *words), said(capsys, *words, "strategy.cpu_offload=true"))
    )
    away = on_gpu["parameters"] + on_gpu["optimizer"]
    assert away > 1
    assert offloaded["in all"] == pytest.approx(on_gpu["in all"] - away, abs=0.15)


def test_impossible_requests_are_refused(capsys):
    for words, expected in (
        (["mfu=2"], "mfu: expected at most 1, got 2"),
        (["gpu=h1000"], "got 'h1000'. Did you mean 'h100'?"),
        (["slurm.gpus_per_node=8", "strategy=ddp", "trainer.batch_size=12"], "12 sequences do not"),
        (
            ["slurm.nodes=2", "strategy=single"],
            "'single' uses one GPU, but slurm.nodes is",
        ),
        (["+controls.odd.seed=1"], "controls.odd.label: 'RoPE' is what main is called too"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["plan", "model=nano", *words])
        assert stopped.value.code == 2
        assert expected in capsys.readouterr().err
