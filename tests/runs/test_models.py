"""Models by what a user calls them, and what reports call runs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.comparing import checkpoint_of, contents_of
from tests.interchange.families import made
from trainer.checkpoint import read_state
from trainer.common.errors import UserError
from trainer.config import ChangeConfig, DropConfig, PhaseConfig, RunConfig, TrainerConfig
from trainer.evaluation.saved_model import distinct
from trainer.model.backends import sdpa
from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig
from trainer.positional.encodings import by_name
from trainer.positional.layout import LayerEncoding, Layout
from trainer.runs import models
from trainer.runs.directory import plain
from trainer.runs.models import (
    _files_fingerprint,
    encodings_in,
    encodings_of,
    find_model,
    find_models,
    is_published,
    name_and_role,
    origins,
    provenance,
    starting_weights,
    without_home,
)
from trainer.runs.parsing import parse
from trainer.runs.phases import layout_of_phase, phases_of


def test_a_run_is_its_newest_checkpoint_and_an_earlier_one_is_named(finished):
    config, _ = finished
    newest = find_model(config.run_dir)
    assert (newest.reference, newest.name, newest.role) == (config.run_dir, "DroPE", "drope")
    assert newest.path == checkpoint_of(config)
    assert newest.home == Path(config.run_dir)
    assert newest.run == config
    assert newest.state["step"] == 12
    assert newest.parameters == sum(p.numel() for p in newest.load().parameters())
    assert newest.tokens.first == newest.tokens.end == 0
    earlier = find_model(str(checkpoint_of(config, 6)))
    assert (earlier.name, earlier.role) == ("RoPE (step-000006)", "rope")
    assert earlier.fingerprint != newest.fingerprint
    assert earlier.layout.rotates
    assert not newest.layout.rotates


def test_the_longest_context_is_of_the_model_and_not_the_unit_of_lengths(finished):
    run = find_model(finished[0].run_dir)
    C = run.layout.training_length
    shorter, same = (find_model(finished[0].run_dir, length) for length in (C // 2, C))
    assert shorter.longest_context == run.longest_context == C
    assert shorter.fingerprint != run.fingerprint == same.fingerprint
    models = find_models([finished[0].run_dir], C // 2, with_origins=True)
    assert [model.training_length for model in models] == [C // 2] * 2


def test_a_checkpoint_between_phases_counts_from_the_length_before(finished, monkeypatch):
    config, _ = finished
    longer = {"a": PhaseConfig(9), "b": PhaseConfig(3, sequence_length=64)}
    phases = phases_of(replace(config, drop=DropConfig(), phases=longer))
    monkeypatch.setattr(models, "phases_of", lambda run: phases)
    lengths = {n: find_model(str(checkpoint_of(config, n))).training_length for n in (6, 9, 12)}
    assert lengths == {6: 32, 9: 32, 12: 64}


def test_published_weights_are_a_directory_of_theirs_or_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_published("runs/b")
    for place in ("runs/a", "llama", "lora"):
        Path(place).mkdir(parents=True)
    Path("llama/config.json").touch()
    Path("lora/adapter_config.json").touch()
    names = "llama", "owner/model", "lora", "runs/a", "runs/b", "a/b/c", "run"
    assert [name for name in names if is_published(name)] == ["llama", "owner/model", "lora"]
    with pytest.raises(UserError, match="lora: merge the adapter of peft into its base"):
        find_model("lora")


def test_published_weights_are_told_apart_by_names_and_contents(tmp_path, monkeypatch):
    """Copies on several nodes have other times. A file is read once."""
    monkeypatch.setenv("UNROPE_CACHE", str(tmp_path / "cache"))

    def written(content=b"1234", time=5, name="b.bin"):
        place = tmp_path / name.replace(".", "-") / "model"
        place.mkdir(parents=True, exist_ok=True)
        for file, data, when in (("a.bin", b"first", 1), (name, content, time)):
            (place / file).write_bytes(data)
            os.utime(place / file, ns=(when, when))
        return _files_fingerprint(place)

    first = written()
    assert first not in (written(b"1235", time=6), written(b"12345"), written(name="c.bin"))
    assert written(time=7) == first
    monkeypatch.setattr("trainer.data.checksums.checksums", None)
    assert written(time=7) == first


def test_models_of_one_name_are_told_apart(finished):
    first = find_model(finished[0].run_dir)
    second = replace(first, reference="b", path=Path("b"), home=Path("runs/second"))
    third = replace(first, reference="c", path=Path("c"), name="Other", home=Path("runs/third"))
    hf = replace(first, reference="hf:a", computed_by="transformers")
    assert [model.name for model in distinct([first, third])] == ["DroPE", "Other"]
    assert [model.name for model in distinct([first, second, third])] == [
        "DroPE (run)", "DroPE (second)", "Other",
    ]  # fmt: skip
    # Of one directory: by what they were called.
    assert [model.name for model in distinct([first, hf])] == [
        f"DroPE ({first.reference})", "DroPE (hf:a)",
    ]  # fmt: skip
    again = replace(first, reference=f"{first.reference}/")
    with pytest.raises(UserError, match=r"/'\] are one model"):
        distinct([first, third, again])


def test_published_models_of_one_name_keep_their_directories(finished):
    first = replace(find_model(finished[0].run_dir), run=None, home=Path("runs/Llama"))
    named = replace(first, name="Llama")
    a, b = (replace(named, reference=f"hf:{owner}/Llama", path=Path(owner)) for owner in "ab")
    renamed = distinct([a, b])
    assert [model.name for model in renamed] == ["Llama (hf:a/Llama)", "Llama (hf:b/Llama)"]
    assert [model.home for model in renamed] == [Path("runs/Llama")] * 2


@pytest.mark.parametrize(
    ("name", "reason"), [("flash", "'flash' needs"), ("of_a_plugin", "got 'of_a_plugin'")]
)
def test_a_backend_that_cannot_run_here_is_replaced(finished, caplog, name, reason):
    saved = find_model(finished[0].run_dir)
    model = saved.load()
    model.config = replace(model.config, attention_backend=name)
    replace(saved, read=lambda *_: model).for_inference("cpu", "fp32")
    assert [r.levelname for r in caplog.records if reason in r.message] == ["WARNING"]
    assert model.attentions[0].attend is sdpa


def test_an_origin_names_time_program_and_steps_and_nobody_s_home():
    path = Path.home() / "runs/a/last"
    run = SimpleNamespace(name="DroPE", path=path, state={"step": 1600}, computed_by=None)
    published = SimpleNamespace(
        name="SmolLM", path=Path("models/s"), state={}, computed_by="transformers 5.23"
    )
    result = provenance([run, published])
    assert result["Models"] == (
        "DroPE: ~/runs/a/last, step 1,600; SmolLM: models/s, computed by transformers 5.23"
    )
    made = datetime.strptime(result["Made"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - made).total_seconds()) < 3600


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_published_settings_end_the_answers_of_a_model(tmp_path, prefix):
    words = ["a", "</s>", "<eos>", "<end_of_turn>", *map(str, range(93))]
    model = made("Llama", vocab_size=97, eos_token_id=2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ends = tmp_path / "generation_config.json"
    ends.write_text("{}")
    found = find_model(f"{prefix}{tmp_path}")
    assert found.tokens.end == 2
    assert found.load().end_tokens == {2}
    ends.write_text('{"eos_token_id": [2, 3]}')
    again = find_model(f"{prefix}{tmp_path}")
    assert again.load().end_tokens == {2, 3}
    ends.write_text('{"eos_token_id": [2, 7]}')
    other = find_model(f"{prefix}{tmp_path}", 99)
    assert other.load().end_tokens == {2, 7}
    assert (found.training_length, other.training_length) == (64, 99)
    assert len({m.fingerprint for m in (found, again, other)}) == 3


def test_a_run_ends_as_the_published_model_in_which_it_began(finished, monkeypatch):
    read, token_files = models.read_state, {"generation_config.json": '{"eos_token_id": [5, 9]}'}
    run = find_model(finished[0].run_dir)
    assert run.state["end_of_text"] == run.tokens.first == 0
    assert run.load().end_tokens == {0}
    changes = {"token_files": token_files, "end_of_text": 7}
    monkeypatch.setattr(models, "read_state", lambda path: read(path) | changes)
    changed = find_model(finished[0].run_dir)
    assert changed.tokens.first == 7
    assert changed.load().end_tokens == {5, 7, 9}


def test_a_run_begins_with_the_weights_of_another_to_the_bit(finished):
    path = checkpoint_of(finished[0])
    state, saved = read_state(path), contents_of(path)
    start = starting_weights(ModelConfig(from_run=str(path)))
    assert start.layout == Layout.from_dict(state["layout"])
    assert start.require_tokenizer().to_str() == state["tokenizer"]
    for name, parameter in start.decoder().named_parameters():
        assert torch.equal(saved[f"model.{name}"], parameter)


def test_norms_that_still_wait_for_a_drop_are_no_part_of_the_weights(finished):
    before = starting_weights(ModelConfig(from_run=str(checkpoint_of(finished[0], 6))))
    assert not [name for name in before.tensors if "q_norm" in name or "k_norm" in name]
    assert len(before.tensors) == len(dict(before.decoder().named_parameters())) - 4


def test_without_a_model_there_is_none_and_two_are_too_many():
    with pytest.raises(UserError, match=r"^model: expected one of"):
        starting_weights(ModelConfig(from_run="a", from_pretrained="b"))


def test_the_encodings_of_a_run_are_those_that_full_drops_until_then_have_left(monkeypatch):
    def left(step=20, **changes):
        run = parse({"run_dir": "x", "trainer": {"max_steps": 20}, **changes})
        layout = layout_of_phase(run.config, run.phases.at(step - 1), run.layout)
        state = {"step": step, "config": plain(run.config), "layout": layout.to_dict()}
        monkeypatch.setattr(models, "find_checkpoint", Path)
        monkeypatch.setattr(models, "read_state", lambda path: state)
        return encodings_of("x")

    assert left(drop={"at": 10}, step=10).layers == ["rope"]
    assert left(drop={"at": 10}, step=11).layers == ["nope"]
    dropped = left(drop={"at": 10, "to": "alibi"}, positional={"heads": {"nope": 1 / 3}})
    assert (dropped.layers, dropped.heads) == (["alibi"], {})
    partly = left(drop={"at": 10, "layers": [0]})
    assert partly.layers == ["nope"] + ["rope"] * 29
    assert named(RunConfig(positional=partly)) == ("nope + rope", "nope_rope")
    assert left(drop={"at": 10, "layers": [0], "heads": [1]}).heads
    for layers in (None, [0]):  # windows are those of all layers, whichever drop
        changes = {"positional": {"windows": [8]}, "drop": {"at": 10, "layers": layers}}
        assert {*left(**changes).windows} == {8}
        changes["drop"]["windows"] = [16, None]
        assert left(**changes, step=10).windows == [8]
        assert left(**changes).windows[:2] == [16, None]


def test_a_run_has_the_shape_and_the_name_of_its_weights(finished):
    reference = str(checkpoint_of(finished[0]))
    config = parse({"run_dir": "x", "model": {"from_run": reference}}).config
    saved = replace(finished[0].model, qk_norm=config.model.qk_norm, from_run=reference)
    assert config.model == replace(saved, vocab_size=config.model.vocab_size)
    assert config.model.qk_norm == replace(finished[0].model.qk_norm, when="always")
    assert config.positional.layers == ["nope"]
    before = str(checkpoint_of(finished[0], 6))
    own = {"from_run": before, "attention_backend": "reference"}
    assert parse({"run_dir": "x", "model": own}).config.model.attention_backend == "reference"
    values = {"run_dir": "x", "model": {"from_run": before, "qk_norm": {"when": "always"}}}
    with pytest.raises(UserError, match=r"^model\.qk_norm\.when: 'always', but the weights were"):
        parse(values)
    assert Path(before).name == "step-000006"


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("Llama, YaRN", ("RoPE", "rope"), ("DroPE", "drope")),
        ("SmolLM3", ("rope + nope", "rope_nope"), ("rope + nope, dropped", None)),
        (
            "Mistral",
            ("RoPE with windows", "rope_window"),
            ("RoPE with windows, dropped", None),
        ),
    ],
)
def test_published_weights_are_called_by_their_own_encodings(tmp_path, family, before, after):
    made(family).save_pretrained(tmp_path)
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(97)}, unk_token="0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    values = {"run_dir": "x", "model": {"from_pretrained": str(tmp_path)}}
    run = parse({**values, "trainer": {"max_steps": 20}, "drop": {"at": 10}})
    assert [name_and_role(run.config, run.phases, step) for step in (10, 20)] == [before, after]
    assert parse(plain(run.config)).config == run.config


def test_published_weights_whose_heads_differ_have_no_role():
    heads = (by_name("rope", 8, 32), by_name("rope", 8, 32), by_name("alibi", 8, 32))
    layout = Layout(32, (LayerEncoding(heads, 16), LayerEncoding(heads[:1] * 3)))
    positional = encodings_in(layout, PositionalConfig())
    assert (positional.layers, positional.windows) == (["rope", "rope"], [16, None])
    assert positional.heads == {"alibi": 1 / 3}
    assert named(RunConfig(positional=positional))[1] is None


# Names


def named(config, step=None):
    return name_and_role(config, phases_of(config), step)


DROPS = RunConfig(trainer=TrainerConfig(max_steps=20), drop=DropConfig(at=10))


def test_the_checkpoint_of_the_step_of_a_drop_is_of_before():
    phases = phases_of(DROPS)
    assert [phases.is_dropped(step) for step in (0, 10, 11, 20)] == [False, False, True, True]
    assert not phases_of(replace(DROPS, drop=DropConfig())).is_dropped(20)


@pytest.mark.parametrize(
    ("positional", "role_of", "label_of"),
    [
        ({}, "rope", "RoPE"),
        ({"layers": ["rope", "nope", "rope"]}, "rope_nope", "rope + nope"),
        ({"heads": {"nope": 0.5}}, None, "rope"),
        ({"windows": [16]}, "rope_window", "RoPE with windows"),
        ({"layers": ["cope"]}, "cope", "CoPE"),
        ({"windows": [None]}, "rope", "RoPE"),
        (
            {"layers": ["own"], "encodings": {"own": {"type": "p_rope", "base": 2.0}}},
            "p_rope", "p-RoPE",
        ),
        ({"layers": ["own"], "encodings": {"own": {"base": 2.0}}}, "own", "own"),
    ],
)  # fmt: skip
def test_a_run_that_drops_nothing_is_called_by_its_encodings(positional, role_of, label_of):
    config = RunConfig(positional=PositionalConfig(**positional))
    assert named(config) == (label_of, role_of)
    dropped = named(replace(config, drop=DropConfig(at=0.5)))
    assert dropped == (("DroPE", "drope") if role_of == "rope" else (f"{label_of}, dropped", None))


@pytest.mark.parametrize("more", [{"layers": ["rope", "nope"]}, {"windows": [None, 16]}])
def test_a_run_is_called_by_the_layers_that_it_has(more):
    model = ModelConfig(num_hidden_layers=1)
    assert named(RunConfig(model=model, positional=PositionalConfig(**more))) == ("RoPE", "rope")


def test_a_checkpoint_is_not_named_by_the_drops_that_come_after_it():
    phases = {
        "rope": PhaseConfig(10),
        "first": PhaseConfig(5, drop=DropConfig(layers=[0])),
        "second": PhaseConfig(5, drop=DropConfig(layers=[1])),
    }
    config = replace(DROPS, drop=DropConfig(), phases=phases)
    names = [named(config, step)[0] for step in (10, 15, 16)]
    first = "RoPE, drop of layers 0 to nope"
    assert names == ["RoPE", first, f"{first}, drop of layers 1 to nope"]


@pytest.mark.parametrize("windows", [[None], [16]])
def test_weights_without_positions_lose_none_at_a_drop(windows):
    """A published model has such a phase, since its run cannot know."""
    positional = PositionalConfig(layers=["nope"], windows=windows)
    name, role = named(replace(DROPS, positional=positional))
    assert "dropped" not in name
    assert (name.endswith(", schedule of a drop"), role) == (True, None)


@pytest.mark.parametrize(
    ("drop", "expected"),
    [
        ({}, ("DroPE", "drope")),
        ({"to": "none"}, ("DroPE", "drope")),
        ({"to": "alibi"}, ("RoPE, drop to alibi", None)),
        ({"layers": [0, 1]}, ("RoPE, drop of layers 0, 1 to nope", None)),
        ({"heads": [0]}, ("RoPE, drop of heads 0 to nope", None)),
        ({"windows": [16]}, ("RoPE, drop to nope and windows", None)),
    ],
)
def test_only_a_drop_of_all_encodings_to_none_is_drope(drop, expected):
    positional = PositionalConfig(encodings={"none": {"type": "nope"}})
    config = replace(DROPS, drop=DropConfig(at=10, **drop), positional=positional)
    assert named(config) == expected
    assert [named(config, step) for step in (0, 10)] == [("RoPE", "rope")] * 2


@pytest.mark.parametrize("rescale", [{"method": "yarn"}, {"base": 500.0}])
def test_a_run_that_rescales_is_a_variant_from_then_on(rescale):
    phases = {"a": {"steps": 10}, "b": {"steps": 10, "sequence_length": 128, "rescale": rescale}}
    config = parse({"run_dir": "x", "phases": phases}).config
    assert [named(config, step) for step in (0, 10)] == [("RoPE", "rope")] * 2
    name, role = named(config, 11)
    assert name.startswith("RoPE, rescaled")
    assert role is None


def test_a_dropped_model_came_from_one_with_its_encoding_best_of_its_own_run():
    def model(name, place, step, **changes):
        run = replace(DROPS, **changes)
        path = Path(place, "checkpoints", str(step))
        return SimpleNamespace(
            name=name,
            run=run,
            path=path,
            is_dropped=phases_of(run).is_dropped(step),
            reference=str(path),
        )

    last = DROPS.trainer.max_steps
    dropped, before = model("DroPE", "a", last), model("before", "a", 10)
    control = model("RoPE", "b", last, drop=DropConfig())
    other = model(
        "NoPE", "c", last, drop=DropConfig(), positional=PositionalConfig(layers=["nope"])
    )
    assert origins([dropped, other]) == {}
    for shape in ({"hidden_size": 64}, {"num_hidden_layers": 9}):  # the same encoding
        size = replace(DROPS.model, **shape)
        assert origins([dropped, model("size", "d", last, drop=DropConfig(), model=size)]) == {}
    assert origins([dropped, other, control]) == {"DroPE": "RoPE"}
    assert origins([control, dropped, before, other]) == {"DroPE": "before"}
    another = model("RoPE of another seed", "e", last, drop=DropConfig(), seed=7)
    assert origins([another, dropped]) == {"DroPE": another.name}
    assert origins([another, control, dropped]) == {"DroPE": "RoPE"}
    published = SimpleNamespace(name="Llama", run=None, path=Path("Llama"), reference="a/Llama")
    assert origins([published, dropped]) == {}
    begun = model("begun", "f", last, model=replace(DROPS.model, from_pretrained="a/Llama"))
    assert origins([published, begun]) == {"begun": "Llama"}


@pytest.mark.parametrize("lengths", [(32, 32, 32), (32, 64, 64), (32, 32, 64)], ids=str)
@pytest.mark.parametrize("step", [6, 7, 9, 10, 12])
def test_a_dropped_model_comes_with_its_state_before_the_drop_unless_sequences_grew(
    finished, monkeypatch, lengths, step
):
    """At the drop, or in a phase behind it that has begun."""
    config, _ = finished
    before, dropped, after = (PhaseConfig(3, sequence_length=length) for length in lengths)
    phases = {"a": replace(before, steps=6), "b": replace(dropped, drop=ChangeConfig()), "c": after}
    run = replace(config, drop=DropConfig(), phases=phases)
    state = {**find_model(config.run_dir).state, "step": step}
    changes = {"run": run, "state": state, "is_dropped": phases_of(run).is_dropped(step)}

    def found(reference, training_length=None):
        model = find_model(reference, training_length)
        return replace(model, **changes) if reference == config.run_dir else model

    monkeypatch.setattr(models, "find_model", found)
    assert len(find_models([config.run_dir])) == 1
    *others, _ = find_models([config.run_dir], with_origins=True)
    length = lengths[1] if step <= 9 else lengths[2]
    is_added = step > 6 and length == lengths[0]
    assert [model.path.name for model in others] == ["before-drop"] * is_added


def test_home_directory_does_not_get_into_reports():
    values = {"files": [str(Path.home() / "a.txt")], "n": 3, "deep": {"x": f"{Path.home()}/y"}}
    assert without_home(values) == {"files": ["~/a.txt"], "n": 3, "deep": {"x": "~/y"}}


def test_only_whole_paths_of_the_home_directory_are_shortened(monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    others = ["/home/alice/x", "/home/al.old", "/data/home/al/x"]
    values = [*others, "/home/al", "a='/home/al' \"/home/al\"", "[/home/al,/home/al/x]"]
    assert without_home(values) == [*others, "~", "a='~' \"~\"", "[~,~/x]"]
    monkeypatch.setenv("HOME", "/")
    assert without_home(values) == values


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    path = tmp_path / "llama"
    made("Llama").save_pretrained(path)
    words = json.loads((path / "config.json").read_text())["vocab_size"]
    for size in (words, words + 1):
        vocabulary = {"</s>": 0, **{f"w{i}": i for i in range(1, size)}}
        tokenizer = Tokenizer(WordLevel(vocabulary, "</s>"))
        tokenizer.add_special_tokens(["<unused pad>"])
        tokenizer.save(str(path / "tokenizer.json"))
        if size == words:
            assert find_model(str(path)).name == path.name
    with pytest.raises(UserError, match=rf"^model\.vocab_size: .* {words + 1}, got {words}"):
        find_model(str(path))
