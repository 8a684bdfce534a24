"""Llama models in GGUF, llama.cpp's file format: configuration, tokenizer and quantized weights.

The format differs in four ways. Names are shorter. Weights are quantized in blocks along their
rows. Rows of the query and key projections are permuted, because llama.cpp rotates neighbouring
channels (2 m, 2 m + 1) and Hugging Face (m, m + M). Llama 3's rescaling is a tensor of divisors of
the frequencies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from trainer.common.errors import Problem, UserError, first_line, raise_all
from trainer.interchange.tensor_files import PIECE, SINGLE, write_tensors
from trainer.interchange.token_files import CONFIG, TOKENIZER_CONFIG

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
_REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps"),
)
_IGNORED = ("tensor_data_layout", "attention.value_length", "rope.scaling.finetuned")
"""Keys ``llama.*`` that change nothing, or whose effect the shapes of the tensors show."""
_ROPE = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizers by ``tokenizer.ggml.pre``.
_PRE_TOKENIZERS: dict[str, list[Any]] = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(_LLAMA_3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
_WHOLE_WORDS = ("llama-bpe",)
"""Where a word in the vocabulary is a token, whatever the merges make of it."""
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Kinds of special tokens, and how the metadata calls them."""
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are matched as a whole


@dataclass(frozen=True)
class GgufTensor:
    """One tensor in a GGUF file; ``heads``: heads of a permuted projection, otherwise None."""

    name: str
    shape: tuple[int, ...]
    stored: Any
    heads: int | None = None

    def read_into(self, out: Tensor) -> None:
        """Dequantize into ``out`` (contiguous, of this shape), converting to its dtype."""
        from gguf import dequantize

        data = self.stored.data if len(self.shape) > 1 else self.stored.data[None]
        rows = torch.arange(len(data))
        if self.heads is not None:
            rows = rows.view(self.heads, 2, -1).transpose(1, 2).flatten()
        target = out.detach().view(len(data), -1)
        step = max(1, PIECE // self.shape[-1])
        for start in range(0, len(data), step):
            piece = dequantize(data[start : start + step], self.stored.tensor_type)
            target[rows[start : start + step]] = torch.tensor(piece).to(out)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], Tokenizer]:
    """Return the equivalents of ``config.json``, the weights' headers and ``tokenizer.json``.

    Returns:
        Values for :func:`trainer.interchange.hf_config.from_hf_config`, tensors by their Hugging
            Face names, and the tokenizer.

    Raises:
        UserError: the gguf package is missing, or the file is damaged or holds no supported model.
    """
    reader, metadata = _read(path)
    values = _config(metadata)
    values["tie_word_embeddings"] = all(t.name != "output.weight" for t in reader.tensors)
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    for stored in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
        _check_type(stored)
    tensors = {}
    for stored in reader.tensors:
        if stored.name == _ROPE_FACTORS:
            values["rope_scaling"] = _divided_frequencies(stored, values)
            continue
        kind = stored.name.removesuffix(".weight").split(".")[-1]
        shape = tuple(int(size) for size in reversed(stored.shape))
        tensors[_hf_name(stored.name)] = GgufTensor(stored.name, shape, stored, heads.get(kind))
    return values, tensors, _tokenizer(metadata)


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the reader of a file, and its metadata."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError.at(
            "",
            "a .gguf file needs the gguf package, which is not installed; pip install "
            "'unrope[gguf]'.",
        ) from error
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise UserError.at("", f"the file is truncated, damaged or no GGUF ({error}).") from error
    return reader, metadata


def gguf_token_files(path: Path) -> dict[str, str]:
    """Return the equivalents of a published model's files about its tokens, as
    :func:`~trainer.interchange.token_files.read_token_files` does.

    Raises:
        UserError: as for :func:`read_gguf`.
    """
    _, metadata = _read(path)
    words, settings = _listed(metadata, "tokens"), dict[str, str]()
    ids: dict[str, int | list[int]] = {}
    for kind, name in _SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(index) is int and 0 <= index < len(words):
            ids[f"{kind}_token_id"], settings[f"{kind}_token"] = index, words[index]
    if "eos_token_id" in ids:
        ids["eos_token_id"] = _eos(metadata)
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    return {CONFIG: json.dumps(ids), TOKENIZER_CONFIG: json.dumps(settings)}


def _check_type(stored: Any) -> None:
    """Check that a tensor's type can be dequantized, by its first row."""
    from gguf import dequantize

    if not stored.data.size:
        raise UserError.at("", f"tensor {stored.name!r}: it has no elements.")
    try:
        dequantize(stored.data.reshape(-1, stored.data.shape[-1])[:1], stored.tensor_type)
    except NotImplementedError as error:
        raise UserError.at("", f"tensor {stored.name!r}: {first_line(error)}.") from error


def convert_gguf(source: Path, directory: Path) -> None:
    """Convert a GGUF file to ``config.json``, ``model.safetensors`` (float32), ``tokenizer.json``
    and ``tokenizer_config.json``.

    Raises:
        UserError: as for :func:`read_gguf`.
    """
    values, stored, tokenizer = read_gguf(source)
    weights = {name: torch.empty(tensor.shape) for name, tensor in stored.items()}
    for name, tensor in stored.items():
        tensor.read_into(weights[name])
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(weights, directory / SINGLE)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.dumps(values | {"dtype": "float32"}, indent=2)
    (directory / "config.json").write_text(config + "\n", encoding="utf-8")
    settings = gguf_token_files(source)[TOKENIZER_CONFIG]
    (directory / TOKENIZER_CONFIG).write_text(settings + "\n", encoding="utf-8")


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UserError.at(
            "", f"the architecture {architecture!r} is not supported; expected 'llama'."
        )
    values: dict[str, Any] = {key: metadata.get(f"llama.{name}") for key, name in _KEYS.items()}
    if missing := [f"llama.{_KEYS[key]}" for key in _REQUIRED if not values[key]]:
        raise UserError.at("", f"metadata is missing: {', '.join(missing)}.")
    _check_metadata(metadata)
    heads = values["num_attention_heads"]
    head_dim = values["head_dim"] or values["hidden_size"] // heads
    if (rotary_dim := metadata.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise UserError.at(
            "llama.rope.dimension_count",
            f"{rotary_dim} of {head_dim} channels rotate; a file is supported where all do.",
        )
    values |= {
        "num_key_value_heads": values["num_key_value_heads"] or heads,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": values["vocab_size"] or len(_listed(metadata, "tokens")),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(metadata),
    }
    rope = {key: metadata.get(f"llama.{name}") for key, name in _ROPE.items()}
    if rope["rope_type"] is None and rope["factor"]:
        rope["rope_type"] = "linear"  # as llama.cpp takes a factor without a type
    if rope["rope_type"] not in (None, "none"):
        values["rope_scaling"] = rope
    return values


def _eos(metadata: Mapping[str, Any]) -> Any:
    """Return the id that ends a text; with a second one, that ends a turn, a list of both."""
    eos, turn = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return eos if turn in (None, eos) else [eos, turn]


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check that the keys ``llama.*`` are known or ask for nothing, and hold one number each."""
    known = {"rope.dimension_count", *_KEYS.values(), *_ROPE.values(), *_IGNORED}
    problems = []
    for key, value in metadata.items():
        prefix, _, name = key.partition(".")
        if prefix != "llama":
            continue
        if name not in known and value:  # 0 and false ask for nothing
            problems.append(Problem(key, f"not supported: {str(value)[:40]}."))
        elif name in _KEYS.values() and type(value) not in (int, float):
            problems.append(Problem(key, f"expected a number, got {str(value)[:40]}."))
    raise_all(problems)


def _divided_frequencies(stored: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Divide each frequency by its entry of a tensor, at any sequence length.

    This is Llama 3's rescaling as llama.cpp stores it; LongRoPE's type can hold arbitrary numbers.
    """
    if kind := values.get("rope_scaling", {}).get("rope_type"):
        raise UserError.at(
            "llama.rope.scaling.type", f"{kind!r} together with {_ROPE_FACTORS} is not supported."
        )
    factors = [float(factor) for factor in stored.data.flatten()]
    heads = values["num_attention_heads"]
    pairs = (values["head_dim"] or values["hidden_size"] // heads) // 2
    if len(factors) != pairs or not all(0 < factor < math.inf for factor in factors):
        raise UserError.at(
            _ROPE_FACTORS, f"expected {pairs} positive numbers, one for each pair of channels."
        )
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": values["max_position_embeddings"],
    }


def _hf_name(name: str) -> str:
    """Convert ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)
    if match is None or match[2] not in _NAMES:
        return name
    module = _NAMES[match[2]] if match[1] is None else f"layers.{match[1]}.{_NAMES[match[2]]}"
    return f"{module}.{match[3]}" if module == "lm_head" else f"model.{module}.{match[3]}"


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the byte-level BPE of the vocabulary, merges and special tokens in the metadata."""
    kind, pre = (str(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UserError.at(
            "",
            f"the tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; expected 'gpt2' "
            f"with {' or '.join(map(repr, _PRE_TOKENIZERS))}.",
        )
    tokens, types = _listed(metadata, "tokens"), _listed(metadata, "token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs: list[Any] = [tuple(str(merge).split(" ")) for merge in _listed(metadata, "merges")]
    try:
        bpe = models.BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError.at(
            "tokenizer.ggml", f"the vocabulary and merges are damaged ({first_line(error)})."
        ) from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    for add, matched in (
        (tokenizer.add_special_tokens, _CONTROL),
        (tokenizer.add_tokens, _USER_DEFINED),
    ):
        typed = zip(tokens, types, strict=False)
        add([AddedToken(token, normalized=False) for token, kind in typed if kind == matched])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    # llama.cpp too puts it before Llama 3's prompts unless the file says otherwise.
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and bos is not None:
        token = tokenizer.id_to_token(int(bos))
        if token is None:
            raise UserError.at("tokenizer.ggml.bos_token_id", f"{bos} is no token of the file.")
        tokenizer.post_processor = TemplateProcessing(
            single=[token, "$A"], special_tokens=[(token, int(bos))]
        )
    return tokenizer


def _listed(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list of the tokenizer's metadata; empty if there is none."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, list) else []
