"""What an exported model's directory holds, and where it may not go."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from trainer.common.errors import UserError
from trainer.interchange.export import directory as export_directory
from trainer.interchange.export.directory import (
    check_destination,
    export_model,
    prompting,
    write_files,
)
from trainer.interchange.export.plan import make_plan
from trainer.interchange.token_files import published_file, read_token_files

TOKENIZER = Tokenizer(models.WordLevel({f"t{i}": i for i in range(50)}, unk_token="t0"))


def test_the_files_say_which_token_is_which(tiny_decoder, tmp_path):
    model = tiny_decoder()
    plan = make_plan(model.config, model.layout)
    write_files(model, plan, TOKENIZER, 7, tmp_path, "bfloat16")
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert written.keys() == {
        "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
    }  # fmt: skip
    assert written["config.json"] == plan.values | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 7,
        "eos_token_id": 7, "pad_token_id": None, "dtype": "bfloat16",
    }  # fmt: skip
    assert written["generation_config.json"] == {
        "bos_token_id": 7, "eos_token_id": 7, "pad_token_id": 7,
    }  # fmt: skip
    assert written["tokenizer_config.json"] == {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t7", "eos_token": "t7",
        "pad_token": "t7", "model_max_length": 32,
        "model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False,
    }  # fmt: skip


def test_the_first_token_is_the_one_that_the_tokenizer_puts_before_texts(tiny_decoder, tmp_path):
    model = tiny_decoder()
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.post_processor = TemplateProcessing(single="t5 $A", special_tokens=[("t5", 5)])
    write_files(model, make_plan(model.config, model.layout), tokenizer, 7, tmp_path, "bfloat16")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (5, 7)
    names = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (names["bos_token"], names["eos_token"]) == ("t5", "t7")


def test_a_model_that_needs_code_has_it_beside_it(tiny_decoder, tmp_path):
    model = tiny_decoder(layers=["alibi"])
    plan = make_plan(model.config, model.layout)
    write_files(model, plan, TOKENIZER, 0, tmp_path, "float32")
    assert {path.name for path in tmp_path.glob("*.py")} == {
        "configuration_unrope.py", "modeling_unrope.py", "serving_unrope.py",
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "unrope"


def test_prompts_begin_as_sequences_of_the_training_did():
    ours = prompting(TOKENIZER, 7)
    assert ours.encode("t3").ids == [7, 3]
    assert ours.encode("t3", add_special_tokens=False).ids == [3]
    assert TOKENIZER.encode("t3").ids == [3]  # as it was
    with_template = Tokenizer.from_str(TOKENIZER.to_str())
    with_template.post_processor = TemplateProcessing(single="t5 $A", special_tokens=[("t5", 5)])
    assert prompting(with_template, 7).encode("t3").ids == [5, 3]
    with_template.post_processor = TemplateProcessing(single="$A")
    assert prompting(with_template, 7).encode("t3").ids == [7, 3]


def test_an_export_goes_into_a_directory_that_is_new_or_empty(tiny_decoder, tmp_path):
    check_destination(tmp_path / "new")
    check_destination(tmp_path)
    (tmp_path / "file").touch()
    for place, why in ((tmp_path, "is not empty; choose"), (tmp_path / "file", "is a file")):
        with pytest.raises(UserError, match=re.escape(f"to: {str(place)!r} {why}")):
            exported(tiny_decoder(), place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def differs(monkeypatch):
    """A function that sets by how much what transformers loads differs."""

    def by(difference):
        monkeypatch.setattr(export_directory, "transformers_is_here", lambda: True)
        monkeypatch.setattr(export_directory, "largest_difference", lambda *_, **__: difference)

    return by


def exported(model, to, **options):
    return export_model(model, TOKENIZER, 0, to, **options)


def test_an_export_within_the_tolerance_is_kept_with_its_card(tiny_decoder, tmp_path, differs):
    differs(0.25)
    to = tmp_path / "a" / "b"
    done = exported(
        tiny_decoder(), to, card=lambda plan, by: f"{plan.architecture} {by}", tolerance=0.25
    )
    assert done.difference == 0.25
    assert done.plan.is_native
    assert (to / "README.md").read_text() == "LlamaForCausalLM 0.25"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("difference", [0.26, float("nan")])
def test_an_export_beyond_the_tolerance_leaves_nothing(tiny_decoder, tmp_path, differs, difference):
    differs(difference)
    message = (
        f"^export: logits .* differ by {difference:.1e} of the largest, more than tolerance=0.25"
    )
    with pytest.raises(UserError, match=message.replace("+", r"\+")):
        exported(tiny_decoder(), tmp_path / "a" / "b", tolerance=0.25)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tiny_decoder, tmp_path, differs):
    differs(0.0)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^to: '.*file/model' cannot be written \(.*\)\.$"):
        exported(tiny_decoder(), tmp_path / "file" / "model")


def again(model, tmp_path, monkeypatch, **settings):
    """Export ``model`` in the place of a published one; the written JSON files by their names."""
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, to = tmp_path / "published", tmp_path / "again"
    published.mkdir(exist_ok=True)
    config = {"bos_token_id": 1, "eos_token_id": [4, 5], "pad_token_id": None}
    for name, values in {"config": config, **settings}.items():
        (published / f"{name}.json").write_text(json.dumps(values))
    exported(model, to, token_files=read_token_files(published), as_published=True)
    return {path.stem: json.loads(path.read_text()) for path in to.glob("*.json")}


def test_tokens_come_from_the_config_without_other_files(tiny_decoder, tmp_path, monkeypatch):
    written = again(tiny_decoder(), tmp_path, monkeypatch)
    assert written["config"]["eos_token_id"] == [4, 5]
    assert "generation_config" not in written
    assert written["tokenizer_config"] == {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t4",
        "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip


def test_no_code_that_a_published_tokenizer_names_comes_along(tiny_decoder, tmp_path, monkeypatch):
    code = {"auto_map": {"AutoTokenizer": ["someone/code--tokenizer.Mine", None]}}
    settings = {"bos_token": "t1", "image_token": "t2", "chat_template": "{{ messages }}"}
    model = tiny_decoder(layers=["alibi"])  # whose users trust the code beside it
    written = again(model, tmp_path, monkeypatch, tokenizer_config=settings | code)
    assert written["tokenizer_config"] == settings | {
        "model_input_names": ["input_ids", "attention_mask"]
    }


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_link_out_of_the_published_model_is_refused(tiny_decoder, tmp_path, monkeypatch, name):
    (tmp_path / "secret").write_text('{"access_token": "x"}')
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / name).symlink_to("../secret")
    with pytest.raises(UserError, match=rf"^checkpoint: .*{name}' is a link to .*secret', outside"):
        again(tiny_decoder(), tmp_path, monkeypatch)
    assert not (tmp_path / "again").exists()


def test_links_within_a_model_and_in_the_cache_of_the_hub_are_followed(tmp_path):
    blob = tmp_path / "models--a--b" / "blobs" / "0f"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    for directory in (blob.parent, snapshot):
        directory.mkdir(parents=True)
    blob.touch()
    (snapshot / "README.md").symlink_to("../../blobs/0f")
    (snapshot / "chat_template.jinja").symlink_to("README.md")
    for name in ("README.md", "chat_template.jinja"):
        assert published_file(snapshot, name) == snapshot / name
    assert published_file(snapshot, "chat_template.json") is None


def test_without_transformers_nothing_is_compared(tiny_decoder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    done = exported(tiny_decoder(), tmp_path / "a")
    assert done.difference is None
    assert "the export was not loaded and compared" in caplog.text
    assert not (tmp_path / "a" / "README.md").exists()
