"""What the metadata of a GGUF file become, without a file."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from trainer.common.errors import UserError
from trainer.interchange.gguf import _config, _divided_frequencies, _hf_name, _tokenizer

SIZES = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 3,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
}
WANTED = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": None,
    "max_position_embeddings": 128, "vocab_size": 0, "architectures": ["LlamaForCausalLM"],
    "model_type": "llama", "hidden_act": "silu", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ({}, {}),
        (
            {
                "llama.attention.head_count_kv": 2, "llama.attention.key_length": 32,
                "llama.rope.dimension_count": 32, "llama.rope.freq_base": 5e5,
                "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
                "tokenizer.ggml.tokens": ["a", "b"], "llama.rope.scaling.type": "none",
            },
            {
                "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 5e5, "bos_token_id": 1,
                "eos_token_id": 2, "vocab_size": 2,
            },
        ),
        ({"llama.vocab_size": 50, "tokenizer.ggml.tokens": ["a"]}, {"vocab_size": 50}),
        (
            {
                "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                }
            },
        ),
        (
            {"llama.rope.scaling.factor": 4.0},  # llama.cpp's default type
            {
                "rope_scaling": {
                    "rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": None,
                }
            },
        ),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
        ({"llama.rope.scaling.factor": 0.0}, {}),
        ({"llama.rope.dimension_count": 16}, {}),
        ({"llama.expert_count": 0, "llama.rope.scaling.finetuned": True}, {}),
    ],
)  # fmt: skip
def test_keys_become_those_of_a_config_json(more, changed):
    assert _config(SIZES | more) == WANTED | changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": None},
            "the architecture None is not supported; expected 'llama'.",
        ),
        (
            {"llama.block_count": None, "llama.context_length": 0},
            "metadata is missing: llama.block_count, llama.context_length.",
        ),
        (
            {"llama.rope.dimension_count": 8},
            "llama.rope.dimension_count: 8 of 16 channels rotate; a file is supported where all "
            "do.",
        ),
        (
            {"llama.attention.head_count": [4, 4, 4]},
            "llama.attention.head_count: expected a number, got [4, 4, 4].",
        ),
        (
            {"llama.rope.scaling.attn_factor": 2.0},
            "llama.rope.scaling.attn_factor: not supported: 2.0.",
        ),
    ],
)
def test_missing_and_unsupported_metadata_is_named(changes, message):
    with pytest.raises(UserError) as error:
        _config(SIZES | changes)
    assert tuple(map(str, error.value.problems)) == (message,)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.bias", "model.layers.0.post_attention_layernorm.bias"),
        ("blk.0.other.weight", "blk.0.other.weight"),
        ("strange", "strange"),
    ],
)
def test_names_become_those_of_hugging_face(theirs, ours):
    assert _hf_name(theirs) == ours


def test_factors_become_the_type_that_holds_any_numbers():
    factors = np.array([1.0, 2.0, 4.0, 8.0], dtype=np.float32)
    values = {"num_attention_heads": 4, "hidden_size": 32, "head_dim": None}
    values["max_position_embeddings"] = 128
    stored = SimpleNamespace(data=factors)
    wanted = {
        "rope_type": "longrope", "short_factor": [1.0, 2.0, 4.0, 8.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0], "factor": 1.0, "attention_factor": 1.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    assert _divided_frequencies(stored, values) == wanted
    assert _divided_frequencies(stored, values | {"head_dim": 8, "hidden_size": 9}) == wanted
    for wrong in (factors[:3], factors - 1, factors * np.float32("inf")):
        with pytest.raises(UserError, match=r"^rope_freqs\.weight: expected 4 positive numbers"):
            _divided_frequencies(SimpleNamespace(data=wrong), values)


WORDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<u>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 4],
}


def test_special_tokens_are_matched_whole_and_omitted_from_text():
    tokenizer = _tokenizer(WORDS)
    ids = tokenizer.encode("ab<s>a<u>b").ids
    assert ids == [2, 3, 0, 4, 1]
    assert tokenizer.decode(ids) == "aba<u>b"
    plain = _tokenizer({k: v for k, v in WORDS.items() if not k.endswith("type")})
    assert 3 not in plain.encode("ab<s>").ids


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_words_of_llama_are_tokens_without_merges(pre):
    words = WORDS | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": []}
    assert _tokenizer(words).encode("ab").ids == ([2] if pre == "llama-bpe" else [0, 1])


@pytest.mark.parametrize("changes", [{"model": "llama"}, {"pre": "other"}])
def test_other_tokenizers_are_refused(changes):
    words = WORDS | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(UserError, match=r"^the tokenizer .* is not supported; expected 'gpt2'"):
        _tokenizer(words)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": None}, {"tokens": [1, 2]}, {"merges": ["a c"]}, {"merges": ["a b b"]}],
)
def test_a_damaged_tokenizer_is_one_line(changes):
    words = WORDS | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(UserError, match=r"^tokenizer\.ggml: .* are damaged \(.*\)\.$"):
        _tokenizer(words)
