"""The schema, conf/, and the rules between keys."""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import asdict
from itertools import pairwise

import pytest
import yaml

from tests.program import ROOT
from trainer import commands
from trainer import config as schema
from trainer.commands import COMMANDS, compose_words, forget_absent_weights, run_of
from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.runs.parsing import parse

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
PAPERS = yaml.safe_load((ROOT / "docs" / "reproduce.yaml").read_text())["papers"]
LINES = sorted({c for paper in PAPERS for item in paper["items"] for c in item.get("command", ())})


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_keeps_the_rules(name):
    job = compose_words([f"+experiment={name}"])
    forget_absent_weights(job.values)
    config = run_of(job).config
    assert config.run_dir == f"runs/{config.name}"
    assert config.trainer.max_steps >= 1


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith("pytest")])
def test_every_command_that_reproduces_a_row_parses(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math.jsonl").touch()
    words = shlex.split(line)
    name = words[0] if words[0] in COMMANDS else "train"
    words = [word for word in words[words[0] == name :] if not word.startswith("prompt=")]
    if "--multirun" in words:
        words.remove("--multirun")
        words = [re.sub(r"=([^\[\]{},]+),.*", r"=\1", word) for word in words]
    composed = compose_words(words, name)
    if name == "evaluate":
        assert validated(schema.EvaluationRequest, composed.values).checkpoint
    elif name == "analyze":
        assert validated(schema.AnalysisRequest, composed.values).checkpoint
    elif name == "train":
        forget_absent_weights(composed.values)
        assert run_of(composed).config.name


PATHS = [
    (schema.DataConfig, "prepared"),
    (schema.DataConfig, "cache_dir"),
    (schema.RulerSettings, "squad_file"),
    (schema.RulerSettings, "hotpotqa_file"),
    (schema.LongBenchSettings, "directory"),
    (schema.ManyShotSettings, "file"),
    (schema.MultipleChoiceSettings, "directory"),
    (schema.AnalysisConfig, "file"),
    (schema.RunConfig, "run_dir"),
    (schema.EvaluationRequest, "output"),
    (schema.AnalysisRequest, "output"),
    (schema.ExportRequest, "to"),
    (schema.RecalibrateKeys, "to"),
]


@pytest.mark.parametrize(("group", "key"), PATHS)
def test_a_path_may_begin_with_the_home_directory(group, key, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert getattr(validated(group, {key: "~/a"}), key) == "/somewhere/a"
    assert getattr(validated(group, {key: "a/~"}), key) == "a/~"


def test_a_word_may_begin_with_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    values = compose_words(["run_dir=~/a", "data.cache_dir=~/b"]).values
    assert (values["run_dir"], values["data"]["cache_dir"]) == ("/somewhere/a", "/somewhere/b")


def test_every_key_is_documented_and_there_are_not_many():
    files = [ROOT / "trainer" / name for name in ("", "model", "positional")]
    nodes = [n for file in files for n in ast.parse((file / "config.py").read_text()).body]
    keys = 0
    for group in (n for n in nodes if isinstance(n, ast.ClassDef)):
        for key, text in pairwise([*group.body, None]):
            if isinstance(key, ast.AnnAssign) and key.target.id != "_":
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                is_group = isinstance(key.value, ast.Call) and "default_factory=" in ast.unparse(
                    key.value
                )
                keys += not is_group
                assert is_text or is_group, (group.name, key.target.id)
    assert keys <= 200


def test_a_control_without_a_drop_has_the_norm_of_its_run_that_drops():
    values = {
        "model": {"qk_norm": {"when": "after_drop"}},
        "drop": {"at": 5},
        "controls": {"c": {"branch": "drop", "drop": {"at": None}}},
    }
    assert parse(values).controls["c"].phases.drop_step is None


def test_defaults_of_the_schema_keep_its_rules():
    config = parse({}).config
    assert config.model.is_trained is False
    assert parse(asdict(config)).config == config


BROKEN = {
    "model.num_attention_heads": {"model": {"num_attention_heads": 7}},
    "model.head_dim": {"model": {"head_dim": 7}},
    "model.num_key_value_heads": {"model": {"num_key_value_heads": 2}},
    "name": {"name": "a/b"},
    "drop.at": {"drop": {"at": 1000}},
    "phases.a.steps": {"phases": {"a": {}}},
    "trainer.batch_size": {"trainer": {"batch_size": 3, "micro_batch_size": 2}},
    "benchmarks.every": {"benchmarks": {"tasks": ["standard"]}},
    "controls.c.branch": {"controls": {"c": {"branch": "drop"}}},
    "controls.c.branch: model": {
        "run_dir": "x",
        "drop": {"at": 5},
        "controls": {"c": {"branch": "drop", "seed": 1}},
    },
    "evaluation.methods": {"evaluation": {"methods": ["yarn"]}},
}


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_rule_is_named_by_its_key(key):
    with pytest.raises(UserError) as refused:
        parse({"model": {"num_hidden_layers": 2}} | BROKEN[key])
    assert str(refused.value).startswith(key)


def test_wrong_values_are_a_line_each():
    values = {"model": {"hidden_size": "x"}, "trainer": {"log_every": 0}, "sed": 1}
    with pytest.raises(UserError) as refused:
        parse(values)
    lines = sorted(str(refused.value).splitlines())
    assert [line.split(":")[0] for line in lines] == [
        "model.hidden_size",
        "sed",
        "trainer.log_every",
    ]
    assert lines[0].endswith(", got 'x'")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("drop.at", {"drop": {"at": "abc"}}),
        ("phases.a.drop.of_what", {"phases": {"a": {"steps": 1, "drop": {"of_what": 5}}}}),
        ("controls", {"controls": 5}),
        ("controls.x", {"controls": {"x": 5}}),
        ("controls.x.nokey", {"controls": {"x": {"nokey": 1}}}),
        ("controls.x.drop.at", {"controls": {"x": {"drop": {"at": "abc"}}}}),
        ("evaluation.lengths.1", {"evaluation": {"lengths": [1, "b"]}}),
        ("evaluation.layers.0", {"evaluation": {"layers": ["x"]}}),
        ("evaluation.layers", {"evaluation": {"layers": "x"}}),
        ("data.needles.names.1", {"data": {"needles": {"names": [2]}}}),
        ("data.needles.names", {"data": {"needles": {"names": [2, 3, 4]}}}),
        ("data.needles.names", {"data": {"needles": {"names": [2, 17]}}}),
        ("data.needles.names", {"data": {"needles": {"names": [4, 3]}}}),
        ("data.needles.mentions", {"data": {"needles": {"mentions": [4, 3]}}}),
        ("data.mixture.a.weight", {"data": {"mixture": {"a": {"weight": -3}}}}),
        ("data.mixture.a.validation", {"data": {"mixture": {"b": {}, "a": {"validation": 5}}}}),
        ("data.mixture.a.fiels", {"data": {"mixture": {"a": {"fiels": ["x"]}}}}),
        ("data.mixture.a", {"data": {"mixture": {"a": {"needles": {"share": 1}}}}}),
        ("data.prepared", {"data": {"prepared": "x", "mixture": {"a": {}}}}),
    ],
)
def test_a_wrong_value_is_one_line_that_begins_with_its_key(key, values):
    with pytest.raises(UserError) as refused:
        parse(values)
    assert str(refused.value).split(": ")[0] == key
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("names", ["a.txt", ["a.txt", "b.txt"]])
def test_held_out_files_are_named_alone(names):
    files = [names] if isinstance(names, str) else names
    text = validated(schema.EvaluationRequest, {"checkpoint": "x", "text": names}).text
    assert text == schema.DataConfig(source="files", files=files)


def test_an_option_of_one_s_own_builds_on_another(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [nano, _self_]\nhidden_size: 32\n")
    composed = compose_words(["model=mine", f"hydra.searchpath=[{tmp_path}]"])
    assert composed.values["model"]["hidden_size"] == 32
    assert composed.values["model"]["num_hidden_layers"] == 3


def test_an_encoding_of_a_plugin_has_a_name(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from trainer.positional.encodings import encoding\n"
        "from trainer.positional.spectrum import Spectrum\n\n"
        "@encoding\ndef standing_still(head_dim, training_length):\n    return Spectrum()\n"
    )
    words = [f"plugins=[{plugin}]", "positional.layers=[standing_still]"]
    config = run_of(compose_words(words)).config
    assert config.positional.layers == ["standing_still"]


@pytest.mark.parametrize(
    "word",
    [
        *("model.hidden_size=32", "+model.head_dim=8", "positional=nope"),
        *("positional.layers=[nope]", "positional.windows=[8]", "+positional.heads.nope=0.5"),
    ],
)
def test_what_trained_weights_bring_is_not_chosen(word):
    job = compose_words(["model.from_pretrained=some/model", word])
    with pytest.raises(
        UserError, match=r"^(model\.h|positional).*: the trained weights bring their"
    ):
        run_of(job)


def test_a_run_with_trained_weights_chooses_norms_and_kernels(monkeypatch):
    monkeypatch.setattr(commands, "parse", lambda values: parse({"drop": {"at": 5}}))
    words = ["model.from_run=runs/a", "model.qk_norm.when=after_drop"]
    assert run_of(compose_words([*words, "model.attention_backend=sdpa"])).config.drop.at == 5


def test_a_plan_forgets_weights_that_are_not_here_also_those_of_controls(tmp_path):
    here = {"from_run": str(tmp_path), "from_pretrained": None}
    values = {"model": here | {}, "controls": {"a": {"model": {"from_pretrained": "owner/name"}}}}
    forget_absent_weights(values)
    assert values == {"model": here, "controls": {"a": {"model": {"from_pretrained": None}}}}


def test_plugins_of_a_control_are_run_too(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from trainer.positional.encodings import encoding\n"
        "from trainer.positional.spectrum import Spectrum\n\n"
        "@encoding\ndef still_in_a_control(head_dim, training_length):\n    return Spectrum()\n"
    )
    changes = {"plugins": [str(tmp_path / "mine.py")]}
    changes["positional"] = {"layers": ["still_in_a_control"]}
    words = json.dumps(changes).replace('"', "").replace(" ", "")
    control = run_of(compose_words([f"+controls.c={words}"])).controls["c"]
    assert control.config.positional.layers == ["still_in_a_control"]
