"""GGUF files: small ones written by the gguf package, against the model they were written from and
against what transformers reads from them."""

import importlib
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.interchange.test_pretrained import IDS, LLAMA3, published
from trainer.common.errors import UserError
from trainer.interchange.gguf import convert_gguf
from trainer.interchange.pretrained import read_pretrained

ROOT = Path(__file__).parents[2]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXTS = [
    "Positions turn queries and keys; a score depends on distance alone.",
    "Digits: 12345, 3.14159 and 2024-11-21 are split one by one.",
    "It's the model's own text, isn't it?\n\n\tIndented,  twice  spaced.\n",
    "naïve café — “quotes” … 日本語 🙂",
    "<|im_start|>user\nHello<|im_end|>\n",
    "",
]


def byte_level_bpe():
    """A small tokenizer in the manner of SmolLM's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def permuted(weight, heads):
    """Row m + M of a head beside row m, the order that llama.cpp rotates in, by a plain loop."""
    rows = []
    for head in weight.chunk(heads):
        first, second = head.chunk(2)
        for a, b in zip(first, second, strict=True):
            rows += [a, b]
    return torch.stack(rows)


def gguf_name(name):
    """``model.layers.3.self_attn.q_proj.weight`` to ``blk.3.attn_q``."""
    module = name.removeprefix("model.").removesuffix(".weight")
    if not module.startswith("layers."):
        return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[module]
    _, layer, module = module.split(".", 2)
    return f"blk.{layer}.{NAMES[module]}"


def write(
    path,
    model,
    tokenizer,
    quantised=None,
    architecture="llama",
    rope_factors=None,
    pre="smollm",
    add_bos=None,
    **metadata,
):
    """``model`` as llama.cpp's converter writes it."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        short = gguf_name(name)
        if short == "output" and config.tie_word_embeddings:
            continue
        kind = short.split(".")[-1]
        data = (permuted(weight, heads[kind]) if kind in heads else weight).numpy()
        raw_dtype = quantised if weight.dim() > 1 else None
        if raw_dtype is not None:
            data = gguf.quantize(data, raw_dtype)
        writer.add_tensor(f"{short}.weight", data, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_bpe()


@pytest.fixture
def small(tokenizer):
    """A function that makes a small Llama with the tokenizer's vocabulary."""

    def make(**changes):
        size = tokenizer.get_vocab_size()
        shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": size}
        return published(**shape | changes)

    return make


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_are_those_of_the_model_it_was_written_from(
    tmp_path, tokenizer, small, tied, kv_heads
):
    theirs = small(tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    write(tmp_path / "small.gguf", theirs, tokenizer)
    pretrained = read_pretrained(str(tmp_path / "small.gguf"))
    torch.testing.assert_close(pretrained.decoder()(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)
    assert pretrained.layout.training_length == 64
    assert pretrained.config.tie_word_embeddings == tied


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantised_weights_are_those_of_transformers(tmp_path, tokenizer, small, kind):
    kind = gguf.GGMLQuantizationType[kind]
    write(tmp_path / "small.gguf", small(), tokenizer, quantised=kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="small.gguf", dtype=torch.float32
    ).eval()
    model = read_pretrained(str(tmp_path / "small.gguf")).decoder()
    weights = theirs.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights.get(f"model.{name}", weights.get(name)))
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)


def test_tokens_are_those_of_the_tokenizer_and_of_transformers(tmp_path, tokenizer, small):
    """transformers ignores the kind of pre-tokenizer: it splits spaces before a digit."""
    write(tmp_path / "small.gguf", small(), tokenizer)
    ours = read_pretrained(str(tmp_path / "small.gguf")).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    spaced = "spaced    7"
    assert ours.encode(spaced).tokens == tokenizer.encode(spaced).tokens


def llama3_factors(config):
    """What llama.cpp's converter divides frequencies by: 1 for pairs that turn more often than
    ``high_freq_factor`` times within the original length, the whole factor for those that turn less
    often than ``low_freq_factor`` times, smoothly between."""
    rope, pairs = config.rope_parameters, config.head_dim // 2
    factors = []
    for m in range(pairs):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (m / pairs)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


@torch.no_grad()
def test_llama_3_s_factors_rescale_as_transformers_does(tmp_path, tokenizer, small):
    theirs = small(hidden_size=128, rope_parameters=LLAMA3)
    factors = llama3_factors(theirs.config)
    assert len({round(float(f), 3) for f in factors}) > 3
    write(tmp_path / "small.gguf", theirs, tokenizer, rope_factors=factors)
    pretrained = read_pretrained(str(tmp_path / "small.gguf"))
    (spectrum,) = pretrained.layout.spectra
    inv_freq = theirs.model.rotary_emb.inv_freq.double().tolist()
    assert spectrum.inv_freq == pytest.approx(inv_freq, rel=1e-6)
    assert (spectrum.long, spectrum.rotary_scale) == (None, 1.0)
    torch.testing.assert_close(pretrained.decoder()(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)
    convert_gguf(tmp_path / "small.gguf", tmp_path / "converted")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    torch.testing.assert_close(loaded(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-4)


def test_factors_that_do_not_fit_are_refused(tmp_path, tokenizer, small):
    path, ones = tmp_path / "small.gguf", np.ones(8, dtype=np.float32)
    write(path, small(), tokenizer, rope_factors=ones[:5])
    with pytest.raises(UserError, match=r"rope_freqs.weight: expected 8 positive numbers"):
        read_pretrained(str(path))
    write(path, small(), tokenizer, rope_factors=ones, llama__rope__scaling__type="linear")
    with pytest.raises(UserError, match=r"'linear' together with rope_freqs\.weight"):
        read_pretrained(str(path))


def test_llama_3_cuts_text_by_the_pattern_of_transformers(tmp_path, tokenizer, small):
    """A word that is a token stays one."""
    write(tmp_path / "small.gguf", small(), tokenizer, pre="llama-bpe")
    ours = read_pretrained(str(tmp_path / "small.gguf")).tokenizer
    module = importlib.import_module("transformers.convert_slow_tokenizer")
    pattern = inspect.signature(module.TikTokenConverter).parameters["pattern"].default
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in (*TEXTS, "1234567 x\r\n  \t y  ", "I'LL'd (see) §3"):
        assert ours.pre_tokenizer.pre_tokenize_str(text) == split.pre_tokenize_str(text)
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert json.loads(ours.to_str())["model"]["ignore_merges"]


@pytest.mark.parametrize(
    ("pre", "add_bos", "first"),
    [
        ("smollm", None, []),
        ("smollm", True, [1]),
        ("llama-bpe", None, [1]),
        ("llama-bpe", False, []),
    ],
)
def test_a_file_decides_whether_prompts_begin_with_bos(
    tmp_path, tokenizer, small, pre, add_bos, first
):
    """Without its word llama.cpp adds it for Llama 3."""
    write(tmp_path / "small.gguf", small(), tokenizer, pre=pre, add_bos=add_bos)
    assert read_pretrained(str(tmp_path / "small.gguf")).tokenizer.encode("").ids == first


@torch.no_grad()
def test_a_converted_file_is_the_same_model(tmp_path, tokenizer, small):
    theirs = small(tie_word_embeddings=True)
    chat = {"tokenizer__chat_template": "{{ messages[0].content }}"}
    write(tmp_path / "small.gguf", theirs, tokenizer, **chat)
    convert_gguf(tmp_path / "small.gguf", tmp_path / "new" / "converted")
    before = read_pretrained(str(tmp_path / "small.gguf"))
    after = read_pretrained(str(tmp_path / "new" / "converted"))
    assert (after.config, after.layout) == (before.config, before.layout)
    assert after.require_tokenizer().to_str() == before.require_tokenizer().to_str()
    for files in (before.token_files(), after.token_files()):
        assert json.loads(files["config.json"]) == {"bos_token_id": 1, "eos_token_id": 2}
        assert json.loads(files["tokenizer_config.json"]) == {
            "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
            "chat_template": "{{ messages[0].content }}",
        }  # fmt: skip
    assert torch.equal(after.decoder()(IDS), before.decoder()(IDS))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new" / "converted"
    ).eval()
    torch.testing.assert_close(loaded(IDS).logits, theirs(IDS).logits)


def test_a_missing_package(tmp_path, tokenizer, small, monkeypatch):
    write(tmp_path / "small.gguf", small(), tokenizer)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the gguf package.*unrope\[gguf\]"):
        read_pretrained(str(tmp_path / "small.gguf"))


@pytest.mark.parametrize("size", [0, 100, 5000, -100])
def test_a_truncated_file(tmp_path, tokenizer, small, size):
    path = tmp_path / "small.gguf"
    write(path, small(), tokenizer)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match="truncated"):
        read_pretrained(str(path))


def test_a_type_that_cannot_be_dequantised_is_refused(tmp_path, tokenizer, small):
    model = small().double()
    model.model.norm.float()
    write(tmp_path / "small.gguf", model, tokenizer)
    with pytest.raises(UserError, match=r"tensor '.*': Dequantization for F64 is not yet"):
        read_pretrained(str(tmp_path / "small.gguf"))


def test_a_tensor_without_elements_is_refused(tmp_path, tokenizer, small):
    write(tmp_path / "small.gguf", small(), tokenizer, rope_factors=np.zeros(0, np.float16))
    with pytest.raises(UserError, match=r"tensor 'rope_freqs.weight': it has no elements"):
        read_pretrained(str(tmp_path / "small.gguf"))


def test_another_architecture_is_refused(tmp_path, tokenizer, small):
    write(tmp_path / "small.gguf", small(), tokenizer, architecture="qwen2")
    with pytest.raises(UserError, match="architecture 'qwen2' is not supported; expected 'llama'"):
        read_pretrained(str(tmp_path / "small.gguf"))


def test_the_script_prints_where_the_model_is_and_nothing_else(tmp_path):
    """And does nothing where it has been."""
    target = tmp_path / "models" / "SmolLM2-135M-Instruct"
    target.mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "scripts/fetch_smollm2.py"],
        cwd=ROOT,
        env={"UNROPE_CACHE": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (result.stdout, result.stderr) == (f"{target}\n", "")
