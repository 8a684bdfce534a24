"""Exported models, as transformers loads them, compute what ours compute."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.common.errors import UserError
from trainer.data.tokenizer import special_tokens, train_tokenizer
from trainer.interchange import export as module
from trainer.interchange.export import TEXT, Tokens, export_model, prompting
from trainer.interchange.pretrained import read_pretrained
from trainer.interchange.published import read_token_files
from trainer.model.config import QKNormConfig
from trainer.positional.config import TemperatureConfig
from trainer.positional.layout import drop
from trainer.positional.rescaling import dynamic, llama3, longrope, ntk_aware, yarn

IDS = torch.randint(50, (2, 50), generator=torch.Generator().manual_seed(1))
TOKENIZER = train_tokenizer(["some text and words "], 270, [])
WORD = TOKENIZER.id_to_token
PER_HEAD, FULL = QKNormConfig("always"), QKNormConfig("always", "full")


def layout_changed(change):
    def apply(model):
        model.layout = model.layout.map(change)

    return apply


def by_method(rescaling, factor):
    def apply(model):
        model.layout = model.layout.rescaled(rescaling, factor)

    return apply


def dropped(**options):
    def apply(model):
        model.layout = drop(model.layout, **options)

    return apply


def tempered(**changes):
    return layout_changed(lambda s: s.with_temperature(**changes))


def long_factors(spectrum):
    if not spectrum.rotates:
        return spectrum
    return longrope(spectrum, (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0), 32)


AFTER = {"qk_norm": QKNormConfig("after_drop")}
NATIVE = {
    "RoPE": ("Llama", "default", {}, None),
    "RoPE, untied": ("Llama", "default", {"model": {"tie_word_embeddings": False}}, None),
    "wide heads": ("Llama", "default", {"model": {"head_dim": 16}}, None),
    "undivided width": (
        "Mistral",
        "default",
        {"model": {"hidden_size": 30, "head_dim": 8}},
        None,
    ),
    "before its drop": ("Llama", "default", {"model": AFTER}, None),
    "after its drop": ("Qwen3", "llama3", {"model": AFTER}, dropped(qk_norm=True)),
    "after a drop without QK-norm": ("Llama", "llama3", {}, dropped()),
    "iRoPE": ("SmolLM3", "default", {"layers": ["rope", "nope"]}, None),
    "QK-norm": ("Qwen3", "default", {"model": {"qk_norm": PER_HEAD}}, None),
    "biases": ("Qwen2", "default", {"model": {"qkv_bias": True}}, None),
    "biases, half RoPE, tempered": (
        "Qwen2",
        "proportional",
        {"model": {"qkv_bias": True}, "layers": ["half_rope"]},
        tempered(scale=1.3),
    ),
    "half RoPE": ("Llama", "proportional", {"layers": ["half_rope"]}, None),
    "half RoPE, QK-norm, tempered": (
        "Qwen3",
        "proportional",
        {"model": {"qk_norm": PER_HEAD}, "layers": ["half_rope"]},
        tempered(scale=1.3),
    ),
    "a quarter RoPE, larger and tempered": (
        "Llama",
        "proportional",
        {"model": {"head_dim": 16}, "encodings": {"rope": {"rotary_fraction": 0.25}}},
        layout_changed(lambda s: replace(s, rotary_scale=1.2).with_temperature(scale=1.3)),
    ),
    "angles of iRoPE": (
        "Llama",
        "linear",
        {"encodings": {"rope": {"angle_scale": 0.25}}},
        None,
    ),
    "p-RoPE": ("Llama", "proportional", {"layers": ["p_rope"]}, None),
    "HoPE": ("Llama", "proportional", {"layers": ["hope"]}, None),
    "high frequency": ("Llama", "default", {"layers": ["high_frequency"]}, None),
    "RoPE-ID untempered": (
        "Llama",
        "proportional",
        {
            "layers": ["rope_id"],
            "training_length": 80,
            "encodings": {"rope_id": {"temperature": 0}},
        },
        None,
    ),
    "constant temperature": ("Llama", "default", {}, tempered(scale=1.7)),
    "tempered NoPE among RoPE": (
        "SmolLM3",
        "default",
        {"layers": ["rope", "nope"]},
        tempered(scale=0.7),
    ),
    "YaRN": ("Llama", "yarn", {"model": {"head_dim": 16}}, by_method(yarn, 4.0)),
    "Llama 3": (
        "Llama",
        "llama3",
        {"model": {"head_dim": 32}},
        by_method(llama3, 8.0),
    ),
    "dynamic NTK": (
        "Llama",
        "dynamic",
        {},
        layout_changed(lambda s: dynamic(s, ntk_aware, 32, 2.0)),
    ),
    "LongRoPE": ("Llama", "longrope", {}, layout_changed(long_factors)),
    "windows": ("Mistral", "default", {"windows": [7]}, None),
    "windows in some layers": ("SmolLM3", "default", {"windows": [7, None]}, None),
    "RNoPE-SWA": ("SmolLM3", "default", {"layers": ["rope", "nope"], "windows": [7, None]}, None),
}
LOGARITHM = {"temperature": TemperatureConfig(coefficient=2.0, scale=0.4, reference=1)}
STEPS = TemperatureConfig(coefficient=0.3, reference=8, steps=True, heads="free")
CUSTOM = {
    "QK-norm over the full projection": {"model": {"qk_norm": FULL}},
    "QK-norm of keys": {"model": {"qk_norm": QKNormConfig("always", targets="k")}},
    "ALiBi": {"layers": ["alibi", "rope"]},
    "RoPE-ID": {"layers": ["rope_id"], "training_length": 70},
    "Llama 4's temperature": {"layers": ["rope", "nope"], "temperature": STEPS},
    "the logarithm of the length": LOGARITHM,
    "the logarithm of the keys in a window": LOGARITHM | {"windows": [7, None]},
    "half of the heads": {"heads": {"nope": 0.5}},
    "windows of two sizes": {"windows": [7, 20]},
    "two bases": {"layers": ["rope", "high_frequency"]},
    "biases and NoPE in one layer": {"model": {"qkv_bias": True}, "layers": ["rope", "nope"]},
}


@pytest.fixture
def decoder(tiny_decoder):
    """Build a decoder with a vocabulary of the tokenizer's size."""

    def build(**options):
        vocab = {"vocab_size": TOKENIZER.get_vocab_size()}
        return tiny_decoder(**options | {"model": vocab | options.get("model", {})})

    return build


@torch.no_grad()
def exported(model, tmp_path, **options):
    """Export and read again; return the files' config.json and the model."""
    to = tmp_path / "export"
    export_model(model, Tokens(TOKENIZER, 0), to, tolerance=1e-5, **options)
    read = read_pretrained(str(to))
    torch.testing.assert_close(read.decoder()(IDS), model(IDS), rtol=1e-5, atol=1e-5)
    values = json.loads((to / "config.json").read_text())
    return values, read


@pytest.mark.parametrize("name", NATIVE)
def test_native_architectures(decoder, tmp_path, name):
    architecture, rope_type, shape, change = NATIVE[name]
    model = decoder(**{"training_length": 32, **shape})
    if change is not None:
        change(model)
    values, _ = exported(model, tmp_path)
    assert values["architectures"] == [f"{architecture}ForCausalLM"]
    rope = values["rope_parameters"]
    assert rope["rope_type"] == rope_type
    assert values["rope_theta"] == rope.pop("rope_theta")  # as transformers 4 reads them
    assert values.get("rope_scaling") == (None if rope_type == "default" else rope)
    if rope_type == "llama3":
        original = "original_max_position_embeddings"
        assert values[original] == rope[original]
    assert not (tmp_path / "export" / "modeling_unrope.py").exists()


@pytest.mark.parametrize("name", CUSTOM)
def test_what_no_architecture_computes_comes_with_its_code(decoder, tmp_path, name):
    model = decoder(**{"training_length": 32, **CUSTOM[name]})
    values, read = exported(model, tmp_path)
    assert values["architectures"] == ["UnropeForCausalLM"]
    assert read.layout == model.layout


WINDOWED = {
    "windows": {"windows": [7, 20]},
    "ALiBi in a window": {"layers": ["alibi", "rope"], "windows": [9, 5]},
}
GENERATION = {
    "static": {"cache_implementation": "static"},
    "chunks": {"cache_implementation": "static", "prefill_chunk_size": 7},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 3},
    "beams, static": {"num_beams": 3, "cache_implementation": "static"},
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("how", GENERATION)
@pytest.mark.parametrize("shape", WINDOWED)
def test_every_way_to_generate_reads_windows_alike(decoder, tmp_path, shape, how):
    """Prompts are padded on the left, and one row reads beyond all windows."""
    model = decoder(training_length=32, **WINDOWED[shape])
    export_model(model, Tokens(TOKENIZER, 0), tmp_path / "export")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    lengths = [25] if how == "assisted" else [25, 1, 12]
    batch, mask = torch.zeros(len(lengths), 25, dtype=torch.long), torch.zeros(len(lengths), 25)
    for row, length in enumerate(lengths):
        batch[row, 25 - length :] = IDS[0, :length]
        mask[row, 25 - length :] = 1
    out = theirs.generate(
        batch,
        attention_mask=mask.long(),
        do_sample=False,
        max_new_tokens=9,
        min_new_tokens=9,
        pad_token_id=0,
        length_penalty=0.0,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **GENERATION[how],
    )
    for row, length in enumerate(lengths):
        tokens = out.sequences[row, 25 - length :]
        logits = model(tokens[None])[0, length - 1 : -1]
        if "beams" in how:
            chosen = logits.log_softmax(-1).gather(1, tokens[length:, None])
            torch.testing.assert_close(out.sequences_scores[row], chosen.sum())
        else:
            theirs_logits = torch.stack([step[row] for step in out.logits])
            torch.testing.assert_close(theirs_logits[:9], logits, rtol=1e-5, atol=1e-5)


def test_the_code_follows_the_length_in_temperatures_and_not_in_frequencies(decoder, tmp_path):
    model = decoder(training_length=32, heads={"nope": 0.5})
    tempered(coefficient=0.5, per="sequence")(model)
    exported(model, tmp_path)
    model.layout = model.layout.map(lambda s: dynamic(s, ntk_aware, 32, 2.0))
    with pytest.raises(UserError, match="frequencies that follow the length"):
        exported(model, tmp_path / "other")


def test_wrong_logits_leave_nothing(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "exported", lambda model, name, _: model.get_parameter(name).data)
    model = decoder(layers=["half_rope"])
    with pytest.raises(UserError, match="logits as transformers computes them differ"):
        export_model(model, Tokens(TOKENIZER, 0), tmp_path / "export")
    assert not [*tmp_path.iterdir()]


def test_logits_may_differ_by_the_tolerance(decoder, tmp_path):
    with pytest.raises(UserError, match="tolerance=-1"):
        export_model(decoder(), Tokens(TOKENIZER, 0), tmp_path / "export", tolerance=-1.0)


def test_a_tokenizer_that_transformers_reads_as_qwen2_s_is_named(tiny_decoder, tmp_path):
    words = Tokenizer(WordLevel({"?": 0, "The": 1, "ships": 2}, "?"))
    words.pre_tokenizer = Whitespace()
    model = tiny_decoder(model={"qkv_bias": True, "vocab_size": 3})
    with pytest.raises(UserError, match="Qwen2Tokenizer"):
        export_model(model, Tokens(words, 0), tmp_path / "export")
    assert not [*tmp_path.iterdir()]


def test_a_directory_that_holds_something_is_refused(decoder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="expected a new or empty directory"):
        export_model(decoder(), Tokens(TOKENIZER, 0), tmp_path)


@pytest.mark.parametrize(
    ("template", "first"), [("$A </s>", 7), ("<s> $A </s>", 8), ("<s> $A", 8), ("$A", 7)]
)
def test_prompts_get_the_first_token_of_training_and_no_other(template, first):
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 8), ("</s>", 9)]
    )
    text = TOKENIZER.encode("some text").ids
    assert prompting(tokenizer, 7).encode("some text").ids == [first, *text]


def test_prompts_begin_as_the_training_s_sequences_did(decoder, tmp_path):
    model = decoder()
    model.layout = model.layout.with_training_length(999)
    card = {"title": "A model", "parameters": 9, "steps": 3, "training_length": 999}
    card |= {"encoding": "kept", "logit_scale": 1}
    export_model(model, Tokens(TOKENIZER, 7), tmp_path / "export", card=card)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer("some")["input_ids"] == [7, *TOKENIZER.encode("some").ids]
    assert tokenizer("some").keys() == {"input_ids", "attention_mask"}
    assert not tokenizer.clean_up_tokenization_spaces
    assert tokenizer.eos_token == WORD(7)
    values = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (values["max_position_embeddings"], values["bos_token_id"]) == (999, 7)
    page = (tmp_path / "export" / "README.md").read_text()
    assert page.count("# A model") == 1
    assert "times" not in page
    assert "read 999 tokens" in page
    assert ("vllm" in page, "llama.cpp" in page, "trust_remote_code" in page) == (
        True,
        False,
        False,
    )
    ours = module.readme(card, values | {"architectures": ["UnropeForCausalLM"]}, "export", True)
    assert ("vllm" in ours, "llama.cpp" in ours, "trust_remote_code" in ours) == (
        False,
        False,
        True,
    )
    assert "-m model.gguf -c 999" in module.readme(card, values, "export", True)
    assert "times 1.2" in module.readme(card | {"logit_scale": 1.2}, values, "export", False)


@pytest.mark.parametrize("to", [".", "~"])
def test_an_export_goes_into_the_empty_directory_that_is_meant(decoder, tmp_path, monkeypatch, to):
    directory = tmp_path / "empty"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HOME", str(directory))
    export_model(decoder(), Tokens(TOKENIZER, 7), Path(to))
    assert (directory / "config.json").is_file()
    assert not (directory / "~").exists()


def test_the_first_token_that_a_tokenizer_puts_before_texts_is_named(decoder, tmp_path):
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    first = (WORD(8), 8)
    tokenizer.post_processor = TemplateProcessing(single=f"{WORD(8)} $A", special_tokens=[first])
    export_model(decoder(), Tokens(tokenizer, 7), tmp_path / "export")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "export" / name).read_text())
        assert (values["bos_token_id"], values["eos_token_id"]) == (8, 7)
    assert values["pad_token_id"] == 7  # of generation, which pads prompts
    loaded = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (loaded.bos_token_id, loaded.eos_token_id) == (8, 7)
    assert loaded("some")["input_ids"] == [8, *TOKENIZER.encode("some").ids]


def test_the_context_is_what_it_is_told(decoder, tmp_path):
    model = decoder(training_length=32)
    dropped()(model)
    export_model(model, Tokens(TOKENIZER, 0), tmp_path / "export", context=4096)
    texts = {path.name: path.read_text() for path in (tmp_path / "export").glob("*.json")}
    for name in ("config.json", "config_for_llama_cpp.json"):
        assert json.loads(texts[name])["max_position_embeddings"] == 4096
    assert json.loads(texts["tokenizer_config.json"])["model_max_length"] == 4096
    for_llama_cpp = json.loads(texts["config_for_llama_cpp.json"])
    assert for_llama_cpp["rope_parameters"]["factor"] == 1e30
    assert not {"rope_scaling", "original_max_position_embeddings"} & for_llama_cpp.keys()
    long_factors_model = decoder(training_length=32)
    layout_changed(long_factors)(long_factors_model)
    with pytest.raises(UserError, match="context: expected 32"):
        export_model(long_factors_model, Tokens(TOKENIZER, 0), tmp_path / "other", context=64)


def test_only_a_model_without_rotation_has_another_configuration_for_llama_cpp(decoder, tmp_path):
    export_model(decoder(), Tokens(TOKENIZER, 0), tmp_path / "export")
    assert not (tmp_path / "export" / "config_for_llama_cpp.json").exists()


def test_settings_of_a_published_model_s_tokens_are_kept(decoder, tmp_path):
    published = tmp_path / "published"
    export_model(decoder(), Tokens(TOKENIZER, 0), published)
    config, settings = published / "config.json", published / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [3, 4]}))
    of_tokens = json.loads(settings.read_text())
    more = {"eos_token": WORD(3), "chat_template": "{{ x }}", "auto_map": {"AutoTokenizer": "evil"}}
    settings.write_text(json.dumps(of_tokens | more | {"add_bos_token": False}))
    (published / "generation_config.json").write_text('{"eos_token_id": [4], "max_length": 9}')
    (published / "chat_template.jinja").write_text("{{ y }}")
    files = read_token_files(published)

    place = tmp_path / "tuned"
    export_model(decoder(), Tokens(TOKENIZER, 0, files), place)
    written = json.loads((place / "tokenizer_config.json").read_text())
    assert (written["eos_token"], written["chat_template"]) == (WORD(3), "{{ x }}")
    assert not {"auto_map", "add_bos_token"} & written.keys()
    assert json.loads((place / "generation_config.json").read_text()) == {"eos_token_id": [4]}
    assert json.loads((place / "config.json").read_text())["eos_token_id"] == [3, 4]
    assert (place / "chat_template.jinja").read_text() == "{{ y }}"
    read = read_pretrained(str(place))
    tokens = special_tokens(read.tokenizer, read.token_files)
    assert (tokens.end, tokens.stops) == (3, {3, 4})
    assert AutoTokenizer.from_pretrained(place)(TEXT)["input_ids"] == TOKENIZER.encode(TEXT).ids


@torch.no_grad()
def test_a_published_yarn_comes_back_with_its_lengths(decoder, tmp_path):
    model = decoder(training_length=16, model={"head_dim": 16})
    model.layout = replace(model.layout.rescaled(yarn, 4.0), reach=64)
    values, read = exported(model, tmp_path)
    rope = values["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4)
    assert (values["max_position_embeddings"], rope["original_max_position_embeddings"]) == (64, 16)
    assert (read.layout.training_length, read.layout.longest) == (16, 64)
