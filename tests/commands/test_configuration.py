"""From words to a checked configuration: every mistake is named, all at once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from tests.commands.malformed import files
from trainer.commands.hydra.composing import compose_words
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.sbatch import SlurmConfig
from trainer.commands.train import read_config
from trainer.common.errors import UserError

FILES = ConfigFiles()
LENGTHS = ("default", "extension", "niah", "ruler", "longbench", "many_shot")
"""Options that a run can end with."""


def problems(*words):
    with pytest.raises(UserError) as error:
        read_config(list(words))
    return tuple(map(str, error.value.problems))


@pytest.mark.parametrize("name", FILES.options("experiment"))
def test_every_experiment_is_valid_or_says_which_weights_it_needs(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("UNROPE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = [f"+experiment={name}"]
    model = compose_words(words).values["model"]
    weights, run = model["from_pretrained"], model["from_run"]
    if run is not None:
        (problem,) = problems(*words)
        assert problem.startswith(f"model.from_run: {run!r} is neither a run directory nor")
        return
    if weights is None:
        config = read_config(words)
        assert config.name in (name, f"{name}_{config.seed}")
        return
    (problem,) = problems(*words)
    if Path(weights).is_absolute():
        assert f"there is no directory {weights!r}" in problem
        assert "scripts/fetch_smollm2.py" in problem
    else:
        assert f"the weights {weights!r} are not on this machine" in problem
        assert f"hf download {weights} --local-dir DIR) and give DIR" in problem


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (group, option)
        for group in FILES.default_groups("config")
        for option in (LENGTHS if group == "evaluation" else FILES.options(group))
    ],
)
def test_every_option_of_every_group_is_valid(group, option):
    needed = {("data", "files"): ["data.files=[a.txt]"], ("drop", "pretrained"): ["drop.at=1"]}
    extra = needed.get((group, option), [])
    if group == "positional":  # the papers' windows and wavelengths are for longer sequences
        extra = ["data.sequence_length=8192", "model.num_hidden_layers=4"]
    read_config([f"{group}={option}", *extra])


def schemas():
    """Every schema with the file that holds its defaults, and the words that choose them."""
    from trainer.commands.evaluate import KINDS, request_schema
    from trainer.runs.config import RunConfig
    from trainer.workflows.requests import AnalysisRequest, ExportRequest, GenerationRequest

    return [
        (RunConfig, "config", ()),
        (AnalysisRequest, "analyze", ("analysis=all",)),
        (ExportRequest, "export", ()),
        (GenerationRequest, "generate", ()),
        *(
            (request_schema(kind), "evaluate", (f"evaluation={option}",))
            for kind, option in zip(KINDS, ("extension", "multiple_choice", "harness"), strict=True)
        ),
    ]


@pytest.mark.parametrize(("schema", "root", "words"), schemas())
def test_every_yaml_key_is_in_its_schema_and_every_schema_key_in_the_yaml(schema, root, words):
    values, _ = compose_words(words, root).without_kind("evaluation")
    compare(schema, values, root)


def test_the_group_slurm_has_the_defaults_of_its_schema():
    values = compose_words([], "slurm").values["slurm"]
    assert SlurmConfig(**values) == SlurmConfig()
    compare(SlurmConfig, values, "slurm")


def compare(schema, given, path):
    hints = get_type_hints(schema)
    assert set(given) == {field.name for field in fields(schema)}, path
    for key, value in given.items():
        if is_dataclass(hints[key]):
            compare(hints[key], value, f"{path}.{key}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.hiden_size=64"], "model.hiden_size: unknown key. Did you mean 'hidden_size'?"),
        (["trainer.max_step=5"], "trainer.max_step: unknown key. Did you mean 'max_steps'?"),
        (["optimizer.lr=fast"], "optimizer.lr: expected a number, got 'fast'"),
        (["optimizer.name=adam"], "Did you mean 'adamw'?"),
        (["optimizer=adam"], "optimizer: there is no optimizer 'adam'. Did you mean 'adamw'?"),
        (["model.head_dim=15"], "model.head_dim: 15 is odd"),
        (["model.num_attention_heads=5"], "5 heads do not divide hidden_size 64"),
        (["model.num_key_value_heads=4"], "4 does not divide num_attention_heads 2"),
        (["drop.at=5000"], "drop.at: 5000 is step 5000, but the run has steps 1 to 999"),
        (["drop.at=1.5"], "drop.at: 1.5 is step 1500"),
        (["drop.at=10", "drop.at_tokens=10"], "either drop.at or drop.at_tokens"),
        (["drop.at=10", "drop.to=nop"], "drop.to: unknown encoding 'nop'. Did you mean 'nope'?"),
        (
            ["+experiment=drope_demo", "drop=never"],
            "drop=never: the experiment sets drop.at=0.75, which stands above it; write drop."
            "enabled=false, and leave out the controls that begin at the drop (controls=null).",
        ),
        (
            ["+experiment=rope_id_extension_demo", "trainer.max_steps=10"],
            "trainer.max_steps: the phases (pretrain, to_256, to_1024) give the run's length; "
            "write phases.pretrain.steps=10.",
        ),
        (
            ["+experiment=rope_id_extension_demo", "trainer.max_tokens=2048"],
            "give the run's length; write phases.pretrain.tokens=2048.",
        ),
        (
            ["+experiment=rope_id_extension_demo", "+controls.rope.trainer.max_steps=9"],
            "controls.rope.trainer.max_steps: the phases (pretrain, to_256, to_1024) give",
        ),
        (
            ["+experiment=rope_id_extension_demo", "drop.schedule.peak=0.1"],
            "drop.schedule.peak: with phases it is one of them that drops; write "
            "phases.NAME.schedule.peak.",
        ),
        (
            ["+experiment=rope_id_extension_demo", "drop.layers=[0]"],
            "drop.layers: with phases it is one of them that drops; write phases.NAME.drop.layers.",
        ),
        (
            ["drop.layers=[0]"],
            "drop.layers: nothing is dropped; write drop.at=0.85 as well, or leave it out.",
        ),
        (["drop.anneal_steps=9"], "drop.anneal_steps: nothing is dropped"),
        (
            ["+experiment=encoding_zoo_demo", "+controls.hope.drop.layers=[0]"],
            "controls.hope.drop.layers: nothing is dropped",
        ),
        (
            ["optimizer.muon_lr=0.01"],
            "optimizer.muon_lr: optimizer=adamw does not use Muon; write optimizer=muon as well",
        ),
        (
            ["strategy=ddp", "strategy.reduce_gradients=step"],
            "strategy.reduce_gradients: strategy=ddp does not shard; choose fsdp2 or hsdp",
        ),
        (
            ["+experiment=drope_demo", "model=llama_135m"],
            "model=llama_135m: the experiment sets model.num_hidden_layers=5, which stands above "
            "it; write model.num_hidden_layers=30 as well.",
        ),
        (
            ["+experiment=ladder_1m", "model=llama_135m", "model.hidden_size=576"],
            "model=llama_135m: the experiment sets model.intermediate_size=240, model.num_hidden_"
            "layers=6, model.num_attention_heads=3, which stands above it; write model.interm",
        ),
        (
            ["+experiment=drope_demo", "drop=pretrained"],
            "drop=pretrained: the experiment sets drop.at=0.75, which stands above it; write "
            "drop.at=0 as well.",
        ),
        (
            ["+experiment=ladder_1m", "optimizer=adamw"],
            "optimizer=adamw: the experiment sets optimizer.lr=0.002, which stands above it; "
            "write optimizer.lr=0.0003 as well.",
        ),
        (["drop=late", "positional=nope"], "drop.to: 'nope' is what the layers to drop have"),
        (["drop=late", "drop.to=rope"], "drop.to: 'rope' is what the layers to drop have"),
        (
            ["drop=late", "positional.layers=[rope,nope]", "drop.layers=[1]"],
            "drop.to: 'nope' is what the layers to drop have",
        ),
        (["drop.at=10", "drop.layers=[3]"], "drop.layers: layer 3 does not exist"),
        (["positional.encodings.rope.rotary_fraction=1.5"], "rotary_fraction must be in (0, 1]"),
        (["positional.encodings.rope.base=1"], "base must be greater than 1"),
        (["+positional.encodings.rope.bas=2"], "unknown parameter 'bas'. Did you mean 'base'?"),
        (["positional.layers=[rop]"], "unknown encoding 'rop'. Did you mean 'rope'?"),
        (["positional=alibi", "positional.windows=[128]"], "window of 128 tokens does not fit"),
        (["+positional.heads.nope=0.3"], "is not a whole number"),
        (["+experiment=drope_dem"], "no experiment 'drope_dem'. Did you mean 'drope_demo'?"),
        (["experiment=drope_demo"], "write +experiment=drope_demo"),
        (["data.sequence_length=-3"], "data.sequence_length: expected 2 or more, got -3"),
        (["data.source=files"], "data.files: data.source is 'files', but no file is named"),
        (["data.needles.share=2"], "data.needles.share: expected at most 1, got 2"),
        (["data.needles.share=1", "data.needles.mentions=[2,40]"], "do not fit"),
        (["data.test=1.5"], "data.test: expected less than 1, got 1.5"),
        (["tokenizer.vocab_size=10"], "tokenizer.vocab_size"),
        (["trainer.micro_batch_size=5"], "5 does not divide trainer.batch_size 32"),
        (["trainer.step_timeout=0"], "trainer.step_timeout: expected a positive number, got 0"),
        (["trainer.checkpoint_minutes=-1"], "minutes: expected a positive number, got -1"),
        (["strategy.timeouts.start=0"], "strategy.timeouts.start: expected a positive number"),
        (["schedule.final=2"], "schedule.final: expected at most 1"),
        (["model.qk_norm.when=after_drop"], "but there is no drop"),
        (["model.attention_backend=flash"], "'flash' computes in 16 bits only"),
        (["evaluation.methods=[none,yarm]"], "unknown method 'yarm'. Did you mean 'yarn'?"),
        (["evaluation.lengths=[0]"], "evaluation.lengths[0]: expected a positive number"),
        (["evaluation.methods=[yarn]"], "evaluation.methods: expected 'none' among them"),
        (["evaluation.tasks=[statements]"], "evaluation.tasks: nothing but statements"),
        (["plugins=[nowhere.py]"], "plugins: there is no file 'nowhere.py'"),
        (["+controls.x.modell.hidden_size=1"], "controls.x.modell: unknown key"),
        (["positional.encodings.rope.bas=2"], "rope.bas: unknown key. Did you mean 'base'?"),
        (["name=../out"], "name: '../out' names a directory under runs/"),
        (["seed=[1"], "not readable as key=value"),
        (["label=two", "words"], "a value with blanks needs quotes"),
        (["evaluation.trials=4"], "Did you mean evaluation.needles.trials or"),
        (
            ["trainer.gradient_checkpointing=true"],
            "Did you mean strategy.activation_checkpointing?",
        ),
        (["trainer.run_dir=x"], "trainer.run_dir: unknown key. Did you mean run_dir?"),
        (["trainer.seed=1"], "trainer.seed: unknown key. Did you mean seed?"),
        (["trainer.lr=1"], "trainer.lr: unknown key. Did you mean optimizer.lr?"),
        (
            ["strategy.activation_checkpointing=true"],
            "checkpointing: expected one of none, selective, full, got true.",
        ),
        (["optimizer.betas=0.9"], "optimizer.betas: expected a list in brackets, got 0.9."),
        (["name=${hydra:job.name}"], "name: ${hydra:...} has no value here; name a key, such as"),
        (["+controls.x.run_dir=y"], "controls.x.run_dir: a control has none of its own;"),
        (["+controls.x.evaluation.windows=9"], "controls.x.evaluation: a control has none of"),
        (["controls.rope.seed=1"], "controls.rope.seed: not set yet; write +controls.rope.seed=1"),
        (["phases.schedule.steps=3"], "not set yet; write +phases.schedule.steps=3"),
        (["positional.heads.rope=1"], "not set yet; write +positional.heads.rope=1"),
        (["drope_demo"], "an experiment is named by +experiment=drope_demo."),
        (["data.files=a.txt"], "To give this one alone: 'data.files=[a.txt]'."),
        (["name=~/x"], """in quotes: 'name="~/x"'"""),
        (["data.files=[~/a, b]"], """in quotes: 'data.files=["~/a","b"]'"""),
        (["seed=0,1"], "seed=0,1: several values; write 'seed=[...]' for a list, or --multirun"),
        (["model=nano,llama_135m"], "several values; choose one, or --multirun"),
        (["model=nano", "model=llama_135m"], "model: expected one, got nano, llama_135m."),
        (["+evaluation=niah", "+evaluation=ruler"], "evaluation: expected one, got niah, ruler."),
        (["+analysis=sinks"], "analysis: unknown group here."),
        (["hydra/launcher=submitit_slurm"], "Hydra's own settings need --multirun"),
        (["evaluation=harness"], "'harness' is for the evaluate command"),
    ],
)  # fmt: skip
def test_mistake_is_named(words, said):
    assert any(said in problem for problem in problems(*words))


@pytest.mark.parametrize(
    "words",
    [
        ["+experiment=drope_demo", "model=nano"],
        ["+experiment=drope_demo", "positional=alibi", "controls=null"],
        ["+experiment=drope_demo", "drop=never", "drop.enabled=false", "controls=null"],
        ["+experiment=drope_demo", "drop=pretrained", "drop.at=0.5"],
        ["+experiment=drope_demo", "optimizer=adamw"],
        ["+experiment=rope_wikitext", "model=nano"],
        ["+experiment=rope_wikitext", "schedule=constant", "schedule.final=1"],
        ["+experiment=rope_id_3b", "strategy=fsdp2"],
    ],
)
def test_options_beside_an_experiment_that_overrides_none_of_their_keys_are_accepted(words):
    assert read_config(words).controls is not None


def test_a_value_that_lacks_quotes_is_not_called_missing():
    (problem,) = problems("data=files", "data.files=[~/x.txt]")
    assert problem.startswith("'data.files=[~/x.txt]': a value with such characters stands in")


def test_all_mistakes_are_named_at_once():
    found = problems(
        "model.hiden_size=1", "optimizer.lr=x", "drop.at=9999", "+experiment=nothing",
        "positional.layers=[rop]", "model.head_dim=15",
    )  # fmt: skip
    assert len(found) == 6


def test_overrides_reach_the_configuration():
    config = read_config(
        [
            "+experiment=drope_demo",
            "seed=3",
            "trainer.max_steps=40",
            "positional.encodings.rope.base=99",
        ]
    )
    assert (config.seed, config.trainer.max_steps, config.drop_step) == (3, 40, 30)
    assert config.positional.encodings["rope"]["base"] == 99
    assert config.run_dir == "runs/drope_demo"


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_group_with_a_default_may_be_chosen_with_a_plus(plus):
    composed = compose_words([f"{plus}evaluation=niah"], "evaluate")
    assert composed.choices["evaluation"] == "niah"
    assert composed.values["evaluation"]["tasks"][0] == "standard"
    assert composed.values["evaluation"]["windows"] == 96  # what it inherits
    assert not composed.problems


def test_every_evaluation_and_analysis_has_a_kind_that_exists():
    from trainer.analysis.settings import kinds
    from trainer.commands.evaluate import KINDS

    for group, root, known in (
        ("evaluation", "evaluate", KINDS),
        ("analysis", "analyze", kinds()),
    ):
        for option in FILES.options(group):
            composed = compose_words([f"{group}={option}"], root)
            assert composed.without_kind(group)[1] in known


@pytest.mark.parametrize("nothing", ["{}", "null"])
def test_nothing_in_the_place_of_controls_leaves_an_experiments_out(nothing):
    assert read_config(["+experiment=drope_demo"]).controls
    assert read_config(["+experiment=drope_demo", f"controls={nothing}"]).controls == {}


def test_what_the_model_of_another_run_has_already_is_not_given_beside_it(finished):
    """It would be left out without a word."""
    config, _ = finished
    begin = [f"model.from_run={config.run_dir}", "model.qk_norm.when=after_drop"]
    found = problems(
        *(*begin, "positional=alibi", "model.hidden_size=128", "positional.layers=[nope]"),
        "tokenizer.vocab_size=300",
    )
    for key in ("positional", "model.hidden_size", "positional.layers", "tokenizer.vocab_size"):
        assert any(p.startswith(f"{key}: the model that model.from_run names") for p in found)
    controls = "{wide: {model: {hidden_size: 128}}, other: {positional: {layers: [nope]}}, "
    controls += "words: {tokenizer: {path: null, vocab_size: 300}}}"
    found = problems(*begin, f"+controls={controls}")
    keys = ["controls.wide.model.hidden_size", "controls.other.positional"]
    keys.append("controls.words.tokenizer.vocab_size")
    for key in keys:
        assert any(p.startswith(f"{key}: the model that model.from_run names") for p in found)
    assert len(found) == 3
    scratch = "{from_run: null, hidden_size: 128, qk_norm: {when: never}}"
    assert read_config([*begin, f"+controls={{wide: {{model: {scratch}}}}}"]).controls
    assert read_config(begin).model.hidden_size == config.model.hidden_size


def test_what_published_weights_have_already_is_not_given_beside_them(tmp_path):
    begin = f"model.from_pretrained={tmp_path / 'published'}"
    words = (begin, "model.softmax.sinks=true", "model.hidden_size=128", "optimizer.lr=0")
    (rate, absent) = problems(*words)  # a plan of weights to come takes the shape from here
    assert absent.startswith("model.from_pretrained: there is no directory")
    assert rate.startswith("optimizer.lr: ")
    shape = files.LLAMA | {"num_hidden_layers": 2}
    files.model(tmp_path, shape, files.NO_TENSORS)
    found = problems(*words, "model.attention_backend=sdpa", "model.qk_norm.when=never")
    for key in ("model.softmax.sinks", "model.hidden_size"):
        said = f"{key}: the model that model.from_pretrained names has its own; leave it out."
        assert found.count(said) == 1
    assert not [p for p in found if p.startswith(("model.attention_backend", "model.qk_norm"))]


def test_files_of_your_own_leave_the_length_of_sequences_as_it_is():
    assert compose_words(["data=files"]).values["data"]["sequence_length"] == 64
    words = ["data=files", "data.sequence_length=128"]
    assert compose_words(words).values["data"]["sequence_length"] == 128


def test_a_number_of_steps_is_not_lost_under_the_tokens_of_an_experiment():
    said = problems("+experiment=rope_id_1b", "trainer.max_steps=5")
    assert any(
        one.startswith("trainer.max_steps: the experiment sets trainer.max_tokens=21000000000")
        and one.endswith("write trainer.max_tokens=null as well.")
        for one in said
    )
    both = "+experiment=rope_id_1b", "trainer.max_steps=5", "trainer.max_tokens=null"
    with suppress(UserError):  # its tokenizer is on the hub
        assert read_config(list(both)).trainer.max_steps == 5


def test_all_reasons_against_a_gpus_features_on_a_cpu_are_listed():
    words = ["trainer.accelerator=cpu", "strategy=fsdp2", "name=a"]
    assert problems(*words, "trainer.fp8=true", "model.attention_backend=flash") == (
        "trainer.fp8: needs trainer.precision=bf16, for all other products.",
        "trainer.fp8: float8 products need a GPU; leave out trainer.accelerator=cpu.",
        "model.attention_backend: 'flash' computes in 16 bits only; set trainer.precision=bf16, "
        "or choose 'auto' or 'sdpa'.",
        "model.attention_backend: 'flash' needs a GPU, but this run is on the CPU; choose 'auto' "
        "or 'sdpa'.",
    )
    assert read_config(words).trainer.accelerator == "cpu"
