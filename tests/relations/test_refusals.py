"""What is documented to be refused is refused, and what is just allowed is not."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from trainer import commands, hf
from trainer.commands import Job, overrides_of, run_of
from trainer.common.errors import UserError
from trainer.common.files import check_is_new
from trainer.common.processes import Ranks
from trainer.config import (
    AnalysisConfig,
    AnalysisRequest,
    DataConfig,
    EvaluationConfig,
    ExportRequest,
    ManyShotSettings,
    RunConfig,
    StrategyConfig,
    TrainerConfig,
)
from trainer.data import corpus, prepared
from trainer.data.prepared import split_bounds
from trainer.data.sources import TEXT_SOURCES
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.longbench import longbench_task
from trainer.evaluation.many_shot import many_shot_tasks, read_problems
from trainer.evaluation.multiple_choice import read_questions
from trainer.evaluation.tasks import make_tasks
from trainer.interchange.pretrained import Pretrained
from trainer.lightning.drop import DropPositions
from trainer.lightning.module import check_updates
from trainer.lightning.optimizers import make_optimizer
from trainer.model.config import ModelConfig, check_shape
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.encodings import by_name
from trainer.positional.layout import uniform
from trainer.positional.spectrum import Spectrum
from trainer.runs import models as of_runs
from trainer.runs.models import find_models, starting_weights
from trainer.runs.parsing import merged, parse
from trainer.training import setup
from trainer.training.fit import user_callbacks
from trainer.training.setup import check_device, optimizer_settings
from trainer.workflows import analyze, evaluate, experiment, export, recalibrate
from trainer.workflows.plan import shape_of

REFUSAL = UserError, ValueError, TypeError
ONE_HEAD = {"layers": 1, "heads": 1, "training_length": 32}


def refuses(function, *arguments, **options):
    """Whether a call is refused."""
    try:
        function(*arguments, **options)
    except REFUSAL:
        return True
    return False


# Keys of a run


BASE = {"run_dir": "x", "drop": {"at": 500}, "trainer": {"max_steps": 1000}}
PHASES = {"drop": {"at": None}, "phases": {"a": {"steps": 5}}}


def control(**changes):
    return {"controls": {"c": changes}}


BOTH_SIDES = [
    (control(data={"sequence_length": 128}), control(data={"sequence_length": 64})),
    ({"controls": {"main": {}}}, {"controls": {"other": {}}}),
    (control(data={"source": "files"}), control(data={"needles": {"share": 0.5}})),
    (control(tokenizer={"vocab_size": 300}), control(tokenizer={"vocab_size": 1024})),
    (control(strategy={"name": "ddp"}), control(strategy={"name": "single"})),
    (control(branch=1000), control(branch=999)),
    (control(branch=-1), control(branch=1)),
    (control(branch=0), control(branch=1)),
    (control(branch="dropp"), control(branch="drop")),
    (control(branch="drop", seed=1), control(branch="drop", optimizer={"lr": 1.0})),
    (control(branch=400, optimizer={"name": "muon"}), control(optimizer={"name": "muon"})),
    (control(branch=9, optimizer={"betas": [0, 0]}), control(optimizer={"betas": [0, 0]})),
    (control(branch=9, trainer={"gradient_clip": 0}), control(trainer={"gradient_clip": 0})),
    ({"data": {"needles": {"names": [5, 2]}}}, {"data": {"needles": {"names": [5, 5]}}}),
    ({"data": {"needles": {"names": [2, 17]}}}, {"data": {"needles": {"names": [2, 16]}}}),
    ({"data": {"needles": {"mentions": [8, 2]}}}, {"data": {"needles": {"mentions": [2, 2]}}}),
    (merged(PHASES, {"drop": {"at": 2}}), PHASES),
    ({"benchmarks": {"every": 5}}, {"benchmarks": {"every": 5, "tasks": ["statements"]}}),
    ({"benchmarks": {"tasks": ["statements"]}}, {"benchmarks": {}}),
    ({"evaluation": {"methods": ["pi"]}}, {"evaluation": {"methods": ["pi"], "enabled": False}}),
    ({"positional": {"heads": {"nope": 0.5}}}, {"positional": {"heads": {"nope": 2 / 3}}}),
    (
        {"positional": {"heads": {"nope": 2 / 3, "alibi": 2 / 3}}},
        {"positional": {"heads": {"nope": 2 / 3, "alibi": 1 / 3}}},
    ),
    ({"positional": {"encodings": {"mine": {}}}}, {"positional": {"encodings": {"rope": {}}}}),
    ({"model": {"head_dim": 7}}, {"model": {"head_dim": 6}}),
    ({"model": {"num_key_value_heads": 2}}, {"model": {"num_key_value_heads": 9}}),
    (
        {"trainer": {"batch_size": 6, "micro_batch_size": 4}},
        {"trainer": {"batch_size": 8, "micro_batch_size": 4}},
    ),
    (
        merged(PHASES, {"phases": {"b": {"steps": 1, "rescale": {"method": "yarn"}}}}),
        merged(PHASES, {"phases": {"b": {"steps": 1, "rescale": {"factor": 2.0}}}}),
    ),
    (
        merged(PHASES, {"phases": {"b": {"steps": 1, "rescale": {"method": "a", "factor": 2}}}}),
        merged(PHASES, {"phases": {"b": {"steps": 1, "rescale": {"base": 2.0}}}}),
    ),
    ({"drop": {"layers": [30]}}, {"drop": {"layers": [29]}}),
]


@pytest.mark.parametrize(("refused", "allowed"), BOTH_SIDES)
def test_keys_of_a_run(refused, allowed):
    parse(merged(BASE, allowed))
    with pytest.raises((UserError, IndexError)):
        parse(merged(BASE, refused))


def test_norms_that_wait_for_a_drop_need_one():
    def run(at):
        values = {"model": {"qk_norm": {"when": "after_drop"}}, "drop": {"at": at}}
        model = {"from_pretrained": None, "from_run": None}
        return run_of(Job(merged(values, {"model": model}), {}, []))

    run(5)
    with pytest.raises(UserError):
        run(None)


def test_one_model_to_begin_with():
    with pytest.raises(UserError, match="both"):
        starting_weights(ModelConfig(from_pretrained="a/b", from_run="runs/c"))


# Commands


def test_words_of_a_command(tmp_path):
    assert refuses(overrides_of, "train", ["=5"])
    assert not refuses(overrides_of, "train", ["seed=5"])
    config = commands.OmegaConf.create({"plugins": ["a.txt"]})
    assert refuses(commands.job_of, config, None)


def test_an_export_needs_an_empty_place(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    check_is_new(str(tmp_path / "new"))
    check_is_new(str(tmp_path / "model"))
    (tmp_path / "model" / "a").touch()
    monkeypatch.setattr(commands, "check_model", lambda reference: None)
    monkeypatch.setattr("trainer.workflows.export.export_checkpoint", lambda request: "Llama")
    for to, is_refused in (("model", True), ("new", False)):
        job = Job({"checkpoint": "a", "to": str(tmp_path / to)}, {}, [])
        assert refuses(commands.export, job) is is_refused


def test_a_generation_needs_a_prompt(monkeypatch):
    monkeypatch.setattr("trainer.workflows.generate.continue_prompts", lambda request: ["b"])
    assert refuses(commands.generate, Job({"checkpoint": "a"}, {}, []))
    assert not refuses(commands.generate, Job({"checkpoint": "a", "prompts": ["a"]}, {}, []))


# Machines


@pytest.mark.parametrize(
    ("ranks", "strategy", "is_refused"),
    [
        (1, {"name": "single"}, False),
        (2, {"name": "single"}, True),
        (4, {"name": "hsdp", "shard_size": 3}, True),
        (4, {"name": "hsdp", "shard_size": 2}, False),
        (4, {"name": "fsdp2", "shard_size": 3}, False),
        (3, {"name": "ddp"}, True),  # of a batch of 32
        (4, {"name": "ddp"}, False),
    ],
)
def test_ranks_of_a_strategy(monkeypatch, ranks, strategy, is_refused):
    monkeypatch.setattr(experiment, "current_ranks", lambda: Ranks(0, ranks, 0, ranks))
    run = parse(merged(BASE, {"strategy": strategy}))
    assert run.config.strategy == StrategyConfig(**strategy)
    assert refuses(experiment.check_machine, run) is is_refused


def test_a_precision_that_the_gpu_has(monkeypatch):
    assert refuses(check_device, TrainerConfig(accelerator="gpu"))
    monkeypatch.setattr(setup, "device_type", lambda accelerator: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old one")
    for best in ("fp32", "bf16"):
        monkeypatch.setattr(setup, "best_precision", lambda device, best=best: best)
        assert refuses(check_device, TrainerConfig(precision="bf16")) is (best == "fp32")
        assert not refuses(check_device, TrainerConfig())


# Training


@pytest.mark.parametrize(
    ("callback", "options", "sharded", "whole"),
    [
        ("EMAWeightAveraging", {}, True, False),
        ("BatchSizeFinder", {}, True, True),
        ("GradientAccumulationScheduler", {"scheduling": {0: 2}}, True, True),
        ("LearningRateFinder", {}, True, True),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1}, True, True),
        ("Timer", {}, False, False),
        ("DropPositions", {"at": 5}, True, True),
    ],
)
def test_callbacks_that_would_be_wrong_in_a_run(callback, options, sharded, whole):
    module = "trainer.lightning" if callback == "DropPositions" else "lightning.pytorch.callbacks"
    configured = {"a": {"_target_": f"{module}.{callback}", **options}}
    for strategy, expected in (("fsdp2", sharded), ("single", whole)):
        config = RunConfig(callbacks=configured, strategy=StrategyConfig(name=strategy))
        assert refuses(user_callbacks, config) is expected


SOUND = {
    "strategy": SingleDeviceStrategy("cpu"),
    "precision": "32-true",
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "optimizers": [],
    "lr_scheduler_configs": [],
    "schedule": None,
    "automatic_optimization": True,
}
WEIGHT = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, False),
        ({"strategy": DDPStrategy()}, False),
        ({"strategy": object()}, True),
        ({"precision": "bf16-mixed"}, False),
        ({"precision": "16-mixed"}, True),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}, False),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, True),
        ({"gradient_clip_algorithm": "value"}, False),
        ({"optimizers": [torch.optim.SGD([WEIGHT])]}, False),
        ({"optimizers": [torch.optim.SGD([WEIGHT]), torch.optim.LBFGS([WEIGHT])]}, True),
        ({"lr_scheduler_configs": [1]}, False),
        ({"lr_scheduler_configs": [1], "schedule": float}, True),
        ({"lr_scheduler_configs": [1], "automatic_optimization": False}, True),
        ({"schedule": float, "automatic_optimization": False}, False),
    ],
)
def test_trainers_with_which_updates_would_be_wrong(changes, is_refused):
    every = SimpleNamespace(**SOUND | changes)
    every.trainer = every
    assert refuses(check_updates, every) is is_refused


def test_a_drop_that_cannot_be_made():
    probe = torch.zeros(1, 3, dtype=torch.long)
    for options, is_refused in (
        ({"gain": "matched"}, True),
        ({"gain": "matched", "probe": probe}, False),
        ({"gain": "two"}, True),
        ({"optimizer_state": "new"}, True),
    ):
        assert refuses(DropPositions, 5, **options) is is_refused
    assert refuses(hf.DropPositions, 5, 0, "reset_new")
    assert not refuses(hf.DropPositions, 5, 0, "keep")
    rewarming = DropPositions(5, rewarm=3)
    rewarming.dropped_at = 5
    trainer = SimpleNamespace(strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy), callbacks=[])
    assert refuses(rewarming.on_train_start, trainer, None)


def test_optimizers_and_their_settings(tiny_decoder):
    config = parse({}).config.optimizer
    assert refuses(optimizer_settings, replace(config, name="sgdd"))
    assert refuses(optimizer_settings, replace(config, arguments={"momentum": 0.9}))
    assert not refuses(optimizer_settings, replace(config, arguments={"betas": (0.5, 0.5)}))
    assert refuses(make_optimizer, tiny_decoder(), "sgdd")


# Text and tasks


@pytest.mark.parametrize(
    ("sizes", "has_same_tokens", "is_refused"),
    [
        ((5, 5, 5), True, False),
        ((4, 5, 5), True, True),
        ((5, 4, 5), True, True),
        ((5, 5, 4), True, True),
        ((5, 5, 5), False, True),
    ],
)
def test_texts_of_a_corpus(monkeypatch, sizes, has_same_tokens, is_refused):
    """Each split holds a sequence of five tokens."""
    splits = {name: range(n) for name, n in zip(corpus.SPLITS, sizes, strict=True)}
    text = SimpleNamespace(special=SimpleNamespace(tokenizer=None), **splits)
    monkeypatch.setattr(corpus, "open_prepared", lambda *given: text)
    monkeypatch.setattr(corpus, "same_tokens", lambda first, second: has_same_tokens)
    config = DataConfig(sequence_length=5)
    assert refuses(corpus.corpus_at, config, ["somewhere"]) is is_refused


def test_three_documents_make_three_splits():
    assert refuses(split_bounds, ["a", "b", "b"], 0.1, 0.1)
    assert not refuses(split_bounds, ["a", "b", "c"], 0.1, 0.1)


def test_problems_have_answers(tmp_path):
    file = tmp_path / "math.jsonl"
    for row, is_refused in (({"solution": "a"}, True), ({"solution": r"\boxed{1}"}, False)):
        file.write_text(json.dumps({"problem": "b"} | row))
        assert refuses(read_problems, str(file)) is is_refused
    assert refuses(many_shot_tasks, ManyShotSettings(), None)


def test_questions_have_all_their_choices(tmp_path):
    for last, is_refused in ((1, False), (2, True)):
        with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
            for index in (0, last):
                request = {"context": "a", "continuation": " b"}
                row = {"doc_id": 0, "idx": index, "label": 0, "request": request}
                file.write(json.dumps(row) + "\n")
        encoder = Encoder(train_tokenizer([], 257, []), (7,), 7)
        assert refuses(read_questions, tmp_path / "a.jsonl.gz", encoder) is is_refused


def test_an_evaluation_has_a_task():
    """Statements are left out of models that were trained without."""
    config = EvaluationConfig(tasks=["statements"])
    text = SimpleNamespace(training_share=0.0)
    assert refuses(make_tasks, text, config, [32], 32)


def test_prepared_text_is_of_this_format(tmp_path):
    for number, is_refused in ((prepared.FORMAT, False), (prepared.FORMAT - 1, True)):
        prepared.Manifest({"format": number}, None, 0, "<u2", (1, 2)).save(tmp_path)
        assert refuses(prepared.Manifest.load, tmp_path) is is_refused


def test_text_of_the_hub_is_text(monkeypatch):
    hub = SimpleNamespace(config=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "datasets", hub)
    for value, is_refused in (("a", False), (None, False), (5, True)):
        rows = SimpleNamespace(
            iter=lambda n, value=value: [{"text": SimpleNamespace(to_pylist=lambda: [value])}]
        )
        rows.select_columns = rows.with_format = lambda name, rows=rows: rows
        hub.load_dataset = lambda *names, rows=rows, **options: rows
        read = TEXT_SOURCES["hub"].documents(DataConfig(source="hub", hub_name="a/b"))
        assert refuses(list, read) is is_refused


def test_a_continuation_has_a_token():
    encoder = Encoder(train_tokenizer([], 257, []), (7,), 7)
    assert refuses(encoder.requests, [("a", "")])
    assert not refuses(encoder.requests, [("a", "b")])


def test_questions_of_longbench_leave_room_for_a_token_of_each_half():
    encoder = Encoder(train_tokenizer([], 257, []), (), 7)
    row = {"input": "a", "context": "b", "answers": ["c"]}
    task = longbench_task("hotpotqa", [row], encoder, 32)
    assert refuses(task.prompts, 32 + 1)
    assert not refuses(task.prompts, 32 + 2)


# Models


def found(**changes):
    """Models to compare, one of which differs."""
    tokenizers = train_tokenizer([], 257, []), train_tokenizer(["ab ab ab"], 258, [])
    made = {}
    for name in "ab":
        values = {"training_length": 32, "tokenizer": 0, "name": name}
        values |= changes if name == "b" else {}
        tokens = SimpleNamespace(tokenizer=tokenizers[values.pop("tokenizer")])
        made[name] = SimpleNamespace(
            reference=name, home=of_runs.Path(name), path=of_runs.Path(name), tokens=tokens,
            run=None, is_dropped=False, **values,
        )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [({}, False), ({"training_length": 64}, True), ({"tokenizer": 1}, True)],
)
def test_models_that_do_not_compare(monkeypatch, changes, is_refused):
    models = found(**changes)
    monkeypatch.setattr(of_runs, "find_model", lambda reference, length: models[reference])
    monkeypatch.setattr(of_runs, "distinct", list)
    assert refuses(find_models, ["a", "b"]) is is_refused


def test_weights_that_do_not_suffice():
    weights = Pretrained("a", ModelConfig(), uniform(Spectrum(), **ONE_HEAD), None, {})
    assert refuses(weights.require_tokenizer)
    sound = replace(weights, tokenizer=train_tokenizer([], 257, []))
    assert not refuses(sound.require_tokenizer)


def test_a_recalibrated_model_rotates(monkeypatch):
    for name, is_refused in (("nope", True), ("rope", False)):
        layout = uniform(by_name(name, 8, 32), **ONE_HEAD)
        start = SimpleNamespace(layout=layout, config=None, require_tokenizer=lambda: None)
        monkeypatch.setattr(recalibrate, "is_published", lambda model: True)
        monkeypatch.setattr(recalibrate, "read_pretrained", lambda model, start=start: start)
        assert refuses(recalibrate.shape_of, "a/b") is is_refused
    job = Job({"minutes": 1.0, "text": None, "to": None, "checkpoint": "a"}, {"data": "files"}, [])
    assert refuses(commands.choose_keys, job, 0.0)


def test_an_export_is_of_a_run(monkeypatch):
    published = SimpleNamespace(run=None, state={}, layout=None, reference="a")
    monkeypatch.setattr(export, "find_model", lambda reference: published)
    assert refuses(export.export_checkpoint, ExportRequest("a", "b"))


def test_a_plan_knows_the_vocabulary():
    for tokenizer, is_refused in (({"path": "a"}, True), ({"vocab_size": 300}, False)):
        assert refuses(shape_of, parse({"tokenizer": tokenizer})) is is_refused
    assert not refuses(shape_of, parse({"tokenizer": {"path": "a"}, "model": {"vocab_size": 9}}))


def test_the_tokens_of_a_run_are_those_of_its_text(monkeypatch):
    run = parse({}).config
    model = SimpleNamespace(run=run, state={}, tokens=SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(evaluate, "prepare_corpus", lambda *given, **options: model.tokens)
    for is_same in (True, False):
        monkeypatch.setattr(evaluate, "same_tokens", lambda a, b, is_same=is_same: is_same)
        assert refuses(evaluate.held_out_corpus, None, model) is not is_same


def test_shapes_of_heads():
    for shape, is_refused in (((32, 4, 2), False), ((33, 4, 2), True), ((32, 4, 3), True)):
        width, heads, kv = shape
        config = ModelConfig(width, num_attention_heads=heads, num_key_value_heads=kv)
        assert refuses(check_shape, config) is is_refused
    layout = {"num_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "training_length": 32}
    assert refuses(build_layout, PositionalConfig(layers=["ropee"]), **layout)


# Analyses


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        (AnalysisConfig(kind="sinkss"), True),
        (AnalysisConfig(arguments={"a": 1}), True),
        (AnalysisConfig(kind="sinks", arguments={"a": 1}), False),
    ],
)
def test_an_analysis_that_is_there(monkeypatch, config, is_refused):
    class FindsModel(Exception):  # noqa: N818
        pass

    def find_model(reference):
        raise FindsModel

    monkeypatch.setattr(analyze, "find_model", find_model)
    with pytest.raises(UserError if is_refused else FindsModel):
        analyze.analyze(AnalysisRequest("a", analysis=config))


def test_a_comparison_needs_one_vocabulary_or_a_checkpoint_before_the_drop(monkeypatch, tmp_path):
    models = found(tokenizer=1)
    first = models["a"]
    first.path, first.run = tmp_path / "step-000001", object()
    monkeypatch.setattr(analyze, "find_model", lambda reference: models[reference])
    assert refuses(analyze._other, AnalysisRequest("a", compare="b"), first, "all")
    assert not refuses(analyze._other, AnalysisRequest("a", compare="a"), first, "all")
    assert refuses(analyze._other, AnalysisRequest("a"), first, "drop")
    assert not refuses(analyze._other, AnalysisRequest("a"), first, "all")
